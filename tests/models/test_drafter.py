"""The network against a second, dense implementation of the contract in float64."""

import itertools
from collections.abc import Callable

import pytest
import torch
from drafter_configs import make_config
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask
from transformers import Qwen3Config
from transformers.models.qwen3 import modeling_qwen3

from dflash_toolkit import Drafter, DrafterConfig
from dflash_toolkit.fingerprint import drafter_digest
from dflash_toolkit.models.dflash import network as drafter
from dflash_toolkit.models.dflash.network import MLP, RMSNorm

Visible = Callable[[int, int, int], bool]  # layer, query position, key position


def make_drafter(**changes: object) -> Drafter:
    """Every parameter random, norms and biases too, and large enough that attention is far from uniform."""
    drafter = Drafter(make_config(**changes))
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.copy_(0.4 * torch.randn(parameter.shape, generator=generator) + (parameter.dim() == 1))
    return drafter.eval()


def make_inputs(config: DrafterConfig, context: int = 7, batch: int = 1, first: int = 0) -> tuple[Tensor, ...]:
    """features [B, T, K*D] at positions [B, T], and one block [B, S, D] that follows at positions [B, S]."""
    generator = torch.Generator().manual_seed(context)
    features = torch.randn(batch, context, config.feature_size, generator=generator)
    block = torch.randn(batch, config.block_size, config.hidden_size, generator=generator)
    positions = first + torch.arange(context + config.block_size).expand(batch, -1)
    return features, positions[:, :context], block, positions[:, context:]


def run(drafter: Drafter, inputs: tuple[Tensor, ...]) -> Tensor:
    features, before, block, at = inputs
    with torch.no_grad():
        return drafter(block, at, drafter.context_kv(features, before))


# ---- the second implementation ---------------------------------------------------------------------


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def rotate(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Neox RoPE [T, heads, H]: elements j and j + H/2, a complex number, turn by position / theta^(2j/H)."""
    half = x.shape[-1] // 2
    angles = positions[:, None].double() / theta ** (torch.arange(half).double() / half)
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angles), angles)[:, None]
    return torch.cat([turned.real, turned.imag], -1)


def dense(drafter: Drafter, inputs: tuple[Tensor, ...], visible: Visible | None = None) -> Tensor:
    """One sequence after another, one head after another, in float64."""
    config = drafter.config
    w = {name: p.detach().double() for name, p in drafter.named_parameters()}
    heads, groups, size, eps = config.num_heads, config.num_kv_heads, config.head_dim, config.rms_norm_eps
    results = []
    for features, before, block, at in zip(*(t.double() for t in inputs), strict=True):
        ctx = rms_norm(features @ w["fc.weight"].T, w["hidden_norm.weight"], eps)  # the same for every layer
        everywhere = torch.cat([before, at])
        x = block * config.input_embedding_scale  # every slot's, the anchor's too, as z-lab's client has it
        for layer in range(config.num_layers):

            def project(name: str, value: Tensor, prefix: str = f"layers.{layer}.") -> Tensor:
                return value @ w[f"{prefix}{name}.weight"].T + w.get(f"{prefix}{name}.bias", 0.0)

            def norm(name: str, value: Tensor, prefix: str = f"layers.{layer}.") -> Tensor:
                return rms_norm(value, w[f"{prefix}{name}.weight"], eps)

            hidden = norm("input_layernorm", x)
            both = torch.cat([ctx, hidden])
            q = norm("self_attn.q_norm", project("self_attn.q_proj", hidden).view(-1, heads, size))
            k = norm("self_attn.k_norm", project("self_attn.k_proj", both).view(-1, groups, size))
            v = project("self_attn.v_proj", both).view(-1, groups, size)
            q, k = rotate(q, at, config.rope_theta), rotate(k, everywhere, config.rope_theta)
            seen = torch.tensor([[visible is None or visible(layer, int(i), int(j)) for j in everywhere] for i in at])
            attended = []
            for head in range(heads):
                group = head // (heads // groups)
                scores = (q[:, head] @ k[:, group].T / size**0.5).masked_fill(~seen, -torch.inf)
                attended.append(scores.softmax(-1) @ v[:, group])
            x = x + project("self_attn.o_proj", torch.cat(attended, -1))
            hidden = norm("post_attention_layernorm", x)
            gate = torch.nn.functional.silu(project("mlp.gate_proj", hidden))
            x = x + project("mlp.down_proj", gate * project("mlp.up_proj", hidden))
        results.append(rms_norm(x, w["norm.weight"], eps))
    return torch.stack(results)


@pytest.mark.parametrize(
    "changes",
    [
        {}, {"num_kv_heads": 4}, {"num_kv_heads": 1}, {"num_layers": 1}, {"num_layers": 5}, {"head_dim": 10},
        {"attention_bias": True}, {"target_layer_ids": (3,)}, {"rms_norm_eps": 0.1}, {"rope_theta": 1e6},
        {"block_size": 2}, {"block_size": 16}, {"input_embedding_scale": 8.0},
    ],
    ids=str,
)  # fmt: skip
def test_outputs_are_those_of_the_dense_implementation(changes: dict[str, object]) -> None:
    drafter = make_drafter(**changes)
    for context, batch, first in ((1, 1, 0), (9, 2, 0), (6, 1, 400), (7, 1, 1000)):
        inputs = make_inputs(drafter.config, context, batch, first)
        torch.testing.assert_close(run(drafter, inputs).double(), dense(drafter, inputs), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("layer_types", "is_causal", "visible"),
    [
        (("full_attention",) * 2, False, lambda layer, i, j: True),
        (("full_attention",) * 2, None, lambda layer, i, j: True),
        (("full_attention",) * 2, True, lambda layer, i, j: j <= i),
        (("sliding_attention",) * 2, None, lambda layer, i, j: j <= i and i - j < 3),
        (("sliding_attention",) * 2, False, lambda layer, i, j: abs(i - j) < 3),
        (("sliding_attention",) * 2, True, lambda layer, i, j: j <= i and i - j < 3),
        (("sliding_attention", "full_attention"), None, lambda layer, i, j: layer == 1 or 0 <= i - j < 3),
        (("full_attention", "sliding_attention"), False, lambda layer, i, j: layer == 0 or abs(i - j) < 3),
    ],
    ids=lambda value: "-".join(t.split("_")[0] for t in value) if isinstance(value, tuple) else str(value)[:5],
)
def test_visibility_follows_the_layer_type(
    layer_types: tuple[str, ...], is_causal: bool | None, visible: Visible
) -> None:
    drafter = make_drafter(layer_types=layer_types, is_causal=is_causal, sliding_window=3)
    inputs = make_inputs(drafter.config)
    torch.testing.assert_close(run(drafter, inputs).double(), dense(drafter, inputs, visible), rtol=1e-3, atol=1e-4)


# ---- context and positions -------------------------------------------------------------------------


@given(cuts=st.sets(st.integers(1, 11)))
@settings(max_examples=40, deadline=None, derandomize=True)
@pytest.mark.slow
def test_a_context_that_grows_piece_by_piece_equals_one_made_at_once(cuts: set[int]) -> None:
    drafter = make_drafter()
    features, positions, _, _ = make_inputs(drafter.config, context=12)
    edges = [0, *sorted(cuts), 12]
    with torch.no_grad():
        whole = drafter.context_kv(features, positions)
        pieces = [drafter.context_kv(features[:, a:b], positions[:, a:b]) for a, b in itertools.pairwise(edges)]
    grown = pieces[0]
    for piece in pieces[1:]:
        grown = grown.append(piece)
    assert grown.length == whole.length == 12
    assert torch.equal(grown.positions, whole.positions)
    for got, expected in zip(grown.keys + grown.values, whole.keys + whole.values, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.slow
def test_masked_blocks_attend_as_single_blocks_do() -> None:
    """Training runs many blocks at once; each gets what decoding gives it: what precedes its anchor."""
    drafter = make_drafter()
    size, anchors = drafter.config.block_size, [2, 5, 6, 9]  # they overlap
    features, before, _, _ = make_inputs(drafter.config, context=12)
    blocks = torch.randn(1, len(anchors) * size, drafter.config.hidden_size)
    at = torch.cat([torch.arange(a, a + size) for a in anchors])[None]

    owner = torch.arange(len(anchors)).repeat_interleave(size)
    sees_context = torch.arange(12)[None, :] < torch.tensor(anchors)[owner, None]
    mask = torch.cat([sees_context, owner[:, None] == owner[None, :]], dim=1)[None, None]
    flex = create_block_mask(
        lambda b, h, q, k: mask[0, 0, q, k], 1, None, len(owner), 12 + len(owner), device="cpu", BLOCK_SIZE=16
    )
    with torch.no_grad():
        context = drafter.context_kv(features, before)
        together = drafter(blocks, at, context, {"full_attention": mask})
        by_flex = drafter(blocks, at, context, {"full_attention": flex})
    torch.testing.assert_close(by_flex, together, rtol=1e-4, atol=1e-5)
    for i, anchor in enumerate(anchors):
        rows = slice(i * size, (i + 1) * size)
        alone = run(drafter, (features[:, :anchor], before[:, :anchor], blocks[:, rows], at[:, rows]))
        torch.testing.assert_close(together[:, rows], alone, rtol=1e-4, atol=1e-5)


# ---- precision -------------------------------------------------------------------------------------


@pytest.mark.parametrize("position", [100, 3000, 30000])
def test_a_cast_to_bfloat16_leaves_the_rope_frequencies_exact(position: int) -> None:
    # frequencies rounded to bf16 turn a far position by whole radians: the keys would share nothing
    exact, cast = make_drafter(), make_drafter().to(torch.bfloat16)
    features = make_inputs(exact.config, context=4)[0]
    at = torch.full((1, 4), position)
    with torch.no_grad():
        keys = exact.context_kv(features, at).keys
        cast_keys = cast.context_kv(features.bfloat16(), at).keys
    for key, cast_key in zip(keys, cast_keys, strict=True):
        assert cast_key.dtype == torch.bfloat16
        assert (cast_key.float() - key).norm() < 0.03 * key.norm()


def test_autocast_runs_near_full_precision() -> None:
    drafter = make_drafter()
    inputs = make_inputs(drafter.config)
    with torch.autocast("cpu", torch.bfloat16):
        context = drafter.context_kv(*inputs[:2])
        rough = run(drafter, inputs)
    assert {t.dtype for t in context.keys + context.values} == {torch.bfloat16}
    full = run(drafter, inputs)
    assert (rough.float() - full).norm() < 0.05 * full.norm()


# ---- parameters ------------------------------------------------------------------------------------


@pytest.mark.parametrize("taps", [(4,), (1, 4, 6)], ids=len)
def test_parameters_are_those_of_the_contract_by_name_and_shape(taps: tuple[int, ...]) -> None:
    expected = {"fc.weight": (24, len(taps) * 24), "hidden_norm.weight": (24,), "norm.weight": (24,)}
    shapes = dict.fromkeys(("input_layernorm", "post_attention_layernorm"), (24,))
    shapes |= dict.fromkeys(("self_attn.q_proj", "self_attn.o_proj"), (24, 24))  # N * H
    shapes |= dict.fromkeys(("self_attn.k_proj", "self_attn.v_proj"), (12, 24))  # G * H
    shapes |= dict.fromkeys(("self_attn.q_norm", "self_attn.k_norm"), (6,))
    shapes |= {"mlp.gate_proj": (20, 24), "mlp.up_proj": (20, 24), "mlp.down_proj": (24, 20)}
    expected |= {f"layers.{i}.{name}.weight": shape for i in range(2) for name, shape in shapes.items()}
    drafter = Drafter(make_config(target_layer_ids=taps))
    assert {name: tuple(p.shape) for name, p in drafter.named_parameters()} == expected
    assert not list(drafter.named_buffers()), "a buffer would be rounded by a cast and land in checkpoints"


def test_every_parameter_takes_part() -> None:
    drafter = make_drafter(attention_bias=True).train()
    features, before, block, at = make_inputs(drafter.config)
    drafter(block, at, drafter.context_kv(features, before)).square().sum().backward()
    idle = [name for name, p in drafter.named_parameters() if p.grad is None or not p.grad.abs().max() > 1e-6]
    assert idle == []


def test_norm_mlp_and_rotation_are_qwen3s_bit_for_bit() -> None:
    config = make_config(hidden_size=48, intermediate_size=40)
    qwen3 = Qwen3Config(hidden_size=48, intermediate_size=40, hidden_act="silu")
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(2, 7, 48, dtype=dtype)
        for ours, theirs in (
            (RMSNorm(48, 1e-6).to(dtype), modeling_qwen3.Qwen3RMSNorm(48, 1e-6).to(dtype)),
            (MLP(config).to(dtype), modeling_qwen3.Qwen3MLP(qwen3).to(dtype)),
        ):
            weights = {name: torch.randn_like(p) for name, p in theirs.named_parameters()}
            ours.load_state_dict(weights)
            theirs.load_state_dict(weights)
            assert torch.equal(ours(x), theirs(x))
        heads, rope = x.unflatten(-1, (-1, 6)).transpose(1, 2), tuple(torch.randn(2, 2, 7, 6, dtype=dtype))
        assert torch.equal(drafter.rotate(heads, rope), modeling_qwen3.apply_rotary_pos_emb(heads, heads, *rope)[0])


def test_a_drafter_of_tensors_does_not_initialise_weights() -> None:
    given_drafter = make_drafter()
    tensors = {name: p.detach() for name, p in given_drafter.named_parameters()}
    before = torch.get_rng_state()
    around = Drafter.of_tensors(given_drafter.config, tensors)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(p.data_ptr() == tensors[name].data_ptr() for name, p in around.named_parameters())
    with pytest.raises(RuntimeError, match=r"fc\.weight"):
        Drafter.of_tensors(given_drafter.config, {name: t for name, t in tensors.items() if name != "fc.weight"})


def test_fresh_weights_follow_from_the_seed_alone() -> None:
    config = make_drafter().config
    before = torch.get_rng_state()
    one, same, other = Drafter.fresh(config, 3), Drafter.fresh(config, 3), Drafter.fresh(config, 4)
    assert torch.equal(torch.get_rng_state(), before)
    assert drafter_digest(one) == drafter_digest(same) != drafter_digest(other)


def test_fresh_weights_are_normal_matrices_unit_norms_and_zero_biases() -> None:
    drafter = Drafter(make_config(attention_bias=True, hidden_size=96))
    drafter.init_weights(torch.Generator().manual_seed(0), std=0.02)
    for name, parameter in drafter.named_parameters():
        if name.endswith("bias"):
            assert not parameter.any()
        elif parameter.dim() == 1:
            assert (parameter == 1).all()
        else:
            assert 0.018 < parameter.std() < 0.022 and abs(parameter.mean()) < 0.002
