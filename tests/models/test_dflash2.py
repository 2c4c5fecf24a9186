"""DFlash 2: its two parts, each alone and both, against the contract in float64, and its form on disk."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import VOCAB, check_same, make_dflash2, make_drafter
from damage import damage
from known_drafts import PROMPT, SAMPLINGS
from refusals import drafter_refusal
from safetensors.torch import load_file, save_file
from torch import Tensor

from dflash_toolkit import Drafter, DrafterConfig, SamplingParams, Target, UserError, decode, generate, load_drafter
from dflash_toolkit.decode import propose
from dflash_toolkit.models.dflash.checkpoint import config_json, read_config, save_drafter, tensor_shapes
from dflash_toolkit.models.dflash.network import ContextKV, DraftLayer
from dflash_toolkit.models.dflash.speculators import check_form
from dflash_toolkit.models.dflash2.architecture import ARCHITECTURE
from dflash_toolkit.models.dflash2.convolution import DynamicConvolution
from dflash_toolkit.models.dflash2.selector import CandidateSelector

NO_CONVOLUTION = {"conv_kernel_size": 0, "conv_group_size": 0}
NO_SELECTOR = {"selector_rank": 0, "selector_top_k": 0}
EITHER = [{}, NO_CONVOLUTION, NO_SELECTOR]
PARTS = tuple(ARCHITECTURE.sizes)
Changes = dict[str, Any]


@pytest.fixture
def copy(dflash2_dir: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(dflash2_dir, tmp_path / "drafter"))


def drafts(target: Target, drafter: Drafter) -> list[tuple[int, ...]]:
    """Returns the drafts of decoding at every step of an answer."""
    found = []

    def kept(*arguments: Any) -> list[int]:
        found.append(tuple(propose(*arguments)))
        return list(found[-1])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode, "propose", kept)
        generate(target, drafter, PROMPT, SamplingParams(max_tokens=30))
    assert len(found) > 3
    return found


# ---- the convolution -------------------------------------------------------------------------------------------


def convolved(x: Tensor, u: Tensor, conv: DynamicConvolution, side: int) -> Tensor:
    """The contract's sum for one block x [S, D], element by element, in float64."""
    _, taps, width = conv.base_kernel.shape
    groups = width // conv.group_size
    projected = conv.kernel_projection.weight.double() @ u.double().T  # [2 T D / g, S]
    out = torch.zeros(x.shape, dtype=torch.float64)
    for t in range(len(x)):
        for c in range(width):
            for tau in range(min(taps, t + 1)):
                row = side * taps * groups + tau * groups + c // conv.group_size
                weight = conv.base_kernel[side, tau, c].double() + projected[row, t]
                out[t, c] += weight * x[t - tau, c].double()
    return out


@pytest.mark.parametrize("taps", [1, 2, 3])
def test_convolutions_take_coefficients_from_their_input(taps: int) -> None:
    conv, u = DynamicConvolution(12, taps, 4), torch.randn(1, 5, 12)
    with torch.no_grad():
        conv.base_kernel.normal_()
        conv.kernel_projection.weight.normal_(std=0.5)
        mixed = torch.randn(12, 12)
        found = conv(u, lambda x: torch.tanh(x @ mixed), None)[0]
        inside = torch.tanh(convolved(u[0], u[0], conv, 0) @ mixed.double())
        expected = convolved(inside, u[0], conv, 1)
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)


def test_a_layer_adds_the_rows_after_the_second_convolution(target: Target) -> None:
    layer = make_dflash2(target).layers[0]
    assert isinstance(layer, DraftLayer) and layer.attention_conv is not None and layer.mlp_conv is not None
    drafter, positions = make_drafter(target), torch.arange(11)[None]
    context = drafter.context_kv(torch.randn(1, 3, drafter.config.feature_size), positions[:, :3])
    rope, pair, x = drafter.rope(positions[:, 3:]), (context.keys[0], context.values[0]), torch.randn(1, 8, 32)
    with torch.no_grad():
        u = layer.input_layernorm(x)
        before = convolved(u[0], u[0], layer.attention_conv, 0).float()[None]
        h = x + convolved(layer.self_attn(before, rope, pair, None)[0], u[0], layer.attention_conv, 1).float()
        u = layer.post_attention_layernorm(h)
        before = convolved(u[0], u[0], layer.mlp_conv, 0).float()[None]
        expected = h + convolved(layer.mlp(before)[0], u[0], layer.mlp_conv, 1).float()
        torch.testing.assert_close(layer(x, rope, pair, None), expected, rtol=1e-4, atol=1e-4)


def two_blocks(drafter: Drafter, x: Tensor) -> Tensor:
    """Hidden states of two blocks in one row [1, 2 S, D], which do not see each other, by masks as in training."""
    size = drafter.config.block_size
    place = torch.arange(4)[None]
    with torch.no_grad():
        context = drafter.context_kv(torch.ones(1, 4, drafter.config.feature_size), place)
        own = torch.block_diag(*[torch.ones(size, size)] * 2).bool()
        mask = torch.cat([torch.ones(2 * size, 4, dtype=torch.bool), own], dim=1)[None, None]
        return drafter(x, 4 + torch.arange(size).repeat(2)[None], context, {"full_attention": mask})


def test_a_convolution_never_crosses_a_block(target: Target) -> None:
    drafter = make_dflash2(target)
    size = drafter.config.block_size
    x = torch.randn(1, 2 * size, 32)
    both = two_blocks(drafter, x)
    changed = x.clone()
    changed[:, :size] = torch.randn(1, size, 32)
    assert torch.equal(two_blocks(drafter, changed)[:, size:], both[:, size:])
    with torch.no_grad():
        positions = torch.arange(4 + size)[None]
        context = drafter.context_kv(torch.ones(1, 4, drafter.config.feature_size), positions[:, :4])
        alone = drafter(x[:, size:], positions[:, 4:], context)
    torch.testing.assert_close(both[:, size:], alone, rtol=1e-5, atol=1e-5)


def test_block_size_may_differ_from_training(target: Target) -> None:
    drafter = make_dflash2(target)
    drafter.config = drafter.config.with_block_size(4)
    x = torch.randn(1, 8, 32)
    changed = x.clone()
    changed[:, :4] += 1
    assert torch.equal(two_blocks(drafter, changed)[:, 4:], two_blocks(drafter, x)[:, 4:])


def test_context_passes_no_convolution(target: Target) -> None:
    drafter, plain = make_dflash2(target), make_drafter(target)
    plain.load_state_dict({name: drafter.state_dict()[name] for name in plain.state_dict()})
    features, place = torch.randn(1, 6, plain.config.feature_size), torch.arange(6)[None]
    ours, theirs = (each.context_kv(features, place) for each in (drafter, plain))
    assert all(torch.equal(a, b) for a, b in zip(ours.keys + ours.values, theirs.keys + theirs.values, strict=True))


# ---- the selector ----------------------------------------------------------------------------------------------


def walked(drafter: Drafter, hidden: Tensor, logits: Tensor, anchor: int) -> list[int]:
    """The contract's walk in float64: over lists, one pair at a time."""
    config, selector = drafter.config, drafter.candidate_selector
    assert isinstance(selector, CandidateSelector)
    state = hidden.double() @ selector.hidden_projection.weight.double().T
    chosen, last = [], anchor
    for h, row in zip(state, logits.double(), strict=True):
        best = sorted(range(len(row)), key=lambda token: (-float(row[token]), token))[: config.selector_top_k]
        scores = []
        for token in best:
            unary = row[token] * config.output_multiplier
            if cap := config.final_logit_softcapping:
                unary = cap * torch.tanh(unary / cap)
            pair = (selector.predecessor_codebook[last].double() * h) @ selector.successor_codebook[token].double()
            scores.append((unary + pair).item())
        last = best[scores.index(max(scores))]
        chosen.append(last)
    return chosen


@pytest.mark.parametrize("scale", [{}, {"output_multiplier": 0.2, "final_logit_softcapping": 2.0}], ids=str)
def test_a_draft_is_the_contracts_walk_over_the_best_of_every_slot(target: Target, scale: Changes) -> None:
    drafter = make_dflash2(target, **scale)
    generator = torch.Generator().manual_seed(3)
    differ = 0
    for anchor in range(20):
        hidden, logits = (torch.randn(7, n, generator=generator) for n in (32, VOCAB))
        expected = walked(drafter, hidden, logits, anchor)
        before = logits.clone()
        with torch.no_grad():
            assert drafter.choose(hidden, logits, anchor).tolist() == expected
        assert torch.equal(logits, before), "the caller's logits stay"
        differ += expected != logits.argmax(-1).tolist()
    assert differ == 20, "a selector that changes nothing shows nothing"


def test_the_multiplier_weighs_logits_against_pairs(target: Target) -> None:
    drafter, hidden, logits = make_dflash2(target), torch.randn(7, 32), torch.randn(7, VOCAB)
    with torch.no_grad():
        plain = drafter.choose(hidden, logits, 5).tolist()
        drafter.config = replace(drafter.config, output_multiplier=1e3)
        assert drafter.choose(hidden, logits, 5).tolist() == logits.argmax(-1).tolist() != plain


def test_candidates_are_the_best_with_ties_by_lowest_id(target: Target) -> None:
    drafter, logits = make_dflash2(target), torch.zeros(7, VOCAB)
    logits[:, 200] = 1.0
    with torch.no_grad():
        for seed in range(10):
            hidden = 9 * torch.randn(7, 32, generator=torch.Generator().manual_seed(seed))
            assert set(drafter.choose(hidden, logits, 5).tolist()) <= {*range(15), 200}
        drafter.candidate_selector.init_weights()  # type: ignore[union-attr, operator]
        assert drafter.choose(hidden, torch.zeros(7, VOCAB), 5).tolist() == [0] * 7


@pytest.mark.parametrize("changes", [{"output_multiplier": 0.3}, NO_SELECTOR, NO_SELECTOR | NO_CONVOLUTION], ids=str)
def test_sampled_drafts_use_scores_after_the_previous_token(target: Target, changes: Changes) -> None:
    drafter, temperature = make_dflash2(target, **changes), 1.7
    config, selector = drafter.config, drafter.candidate_selector
    differ = 0
    for anchor in range(8):
        generator = torch.Generator().manual_seed(anchor)
        hidden, logits = (torch.randn(7, n, generator=generator) for n in (32, VOCAB))
        uniform = torch.rand(7, generator=generator, dtype=torch.float64)
        with torch.no_grad():
            draft = drafter.sample(hidden, logits, anchor, temperature, uniform)
        last = anchor
        for k, row in enumerate(logits.double()):
            best = sorted(range(VOCAB), key=lambda token: (-float(row[token]), token))[:16]
            scores = config.output_multiplier * row[best]
            if selector is not None:
                state = selector.hidden_projection.weight.double() @ hidden[k].double()
                query = selector.predecessor_codebook[last].double() * state
                scores = scores + selector.successor_codebook[best].double() @ query
            q = (scores / temperature).softmax(-1)
            torch.testing.assert_close(draft.q[k].double(), q, rtol=1e-4, atol=1e-6)
            assert draft.candidates[k].tolist() == best
            last = best[int((q.cumsum(0) <= uniform[k]).sum())]
            assert int(draft.tokens[k]) == last
        differ += draft.tokens.tolist() != drafter.choose(hidden, logits, anchor).tolist()
    assert differ == 8


# ---- decoding --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", EITHER, ids=["both", "selector", "convolution"])
def test_dflash2_drafts_do_not_change_answers(target: Target, changes: Changes) -> None:
    drafter = make_dflash2(target, **changes)
    for sampling in ({}, *SAMPLINGS[:2]):
        params = SamplingParams(max_tokens=20, seed=7, **sampling)
        assert generate(target, drafter, PROMPT, params).tokens == generate(target, None, PROMPT, params).tokens


def test_initial_dflash2_weights_draft_as_plain_dflash(target: Target) -> None:
    drafter, plain = make_dflash2(target), make_drafter(target)
    plain.load_state_dict({name: drafter.state_dict()[name] for name in plain.state_dict()})
    expected = drafts(target, plain)
    assert drafts(target, drafter) != expected
    for part in drafter.modules():
        if isinstance(part, DynamicConvolution | CandidateSelector):
            part.init_weights()
    assert drafts(target, drafter) == expected
    positions, block = torch.arange(11)[None], torch.randn(1, 8, 32)
    features = torch.randn(1, 3, plain.config.feature_size)

    def hidden(each: Drafter) -> Tensor:
        context: ContextKV = each.context_kv(features, positions[:, :3])
        return each(block, positions[:, 3:], context)

    assert torch.equal(hidden(drafter), hidden(plain)), "bit for bit"


def test_fresh_dflash2_parts_have_no_effect(target: Target) -> None:
    config = make_dflash2(target).config
    fresh = dict(Drafter.fresh(config, 0).named_parameters())
    kernel = fresh["layers.1.mlp_conv.base_kernel"]
    assert (kernel[:, 0] == 1).all() and (kernel[:, 1:] == 0).all()
    assert not fresh["layers.0.attention_conv.kernel_projection.weight"].any()
    assert not fresh["candidate_selector.successor_codebook"].any()
    for name in ("predecessor_codebook", "hidden_projection.weight"):
        assert 0.01 < float(fresh[f"candidate_selector.{name}"].std()) < 0.03


# ---- on disk ---------------------------------------------------------------------------------------------------


def test_the_published_shape_has_the_published_tensors() -> None:
    # z-lab/Muse-Glimmer-30B-DFlash2
    config = DrafterConfig(
        hidden_size=6656, num_layers=5, num_heads=32, num_kv_heads=8, head_dim=128, intermediate_size=19968,
        vocab_size=202048, num_target_layers=52, target_layer_ids=(1, 13, 25, 37, 49), mask_token_id=201818,
        conv_kernel_size=2, conv_group_size=16, selector_rank=256, selector_top_k=16,
    )  # fmt: skip
    shapes = tensor_shapes(config)
    assert len(shapes) == 81 and len(tensor_shapes(replace(config, **NO_CONVOLUTION, **NO_SELECTOR))) == 58
    for i in range(5):
        for place in ("attention_conv", "mlp_conv"):
            assert shapes[f"layers.{i}.{place}.base_kernel"] == (2, 2, 6656)
            assert shapes[f"layers.{i}.{place}.kernel_projection.weight"] == (1664, 6656)
    assert shapes["candidate_selector.hidden_projection.weight"] == (256, 6656)
    for name in ("predecessor_codebook", "successor_codebook"):
        assert shapes[f"candidate_selector.{name}"] == (202048, 256)
    written = config_json(config)
    assert written["architectures"] == ["DFlash2DraftModel"]
    sizes = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 256, "selector_top_k": 16}
    assert written["dflash_config"].items() >= sizes.items()


@pytest.mark.parametrize(
    "changes",
    [
        *EITHER,
        {"output_multiplier": 0.2, "final_logit_softcapping": 20.0, "input_embedding_scale": 5.5},
        {"layer_types": ("sliding_attention",) * 2, "sliding_window": 9},
    ],
    ids=str,
)
def test_a_drafter_is_read_back_as_it_was_written(target: Target, tmp_path: Path, changes: Changes) -> None:
    drafter = make_dflash2(target, **changes)
    save_drafter(drafter, tmp_path)
    check_same(load_drafter(str(tmp_path)), drafter)
    assert set(load_file(tmp_path / "model.safetensors")) == set(tensor_shapes(drafter.config))


def test_a_published_form_is_read(copy: Path) -> None:
    """No block_size, rope_theta or head_dim's pair at the top; all layers have windows, and see both ways."""
    sliding = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 20, "use_sliding_window": True}
    damage(copy / "config.json", dict.fromkeys(("block_size", "rope_theta", "attention_dropout")) | sliding)
    config = load_drafter(str(copy)).config
    assert (config.block_size, config.rope_theta, config.is_causal) == (8, 1e4, False)
    assert [config.window(i) for i in range(2)] == [20, 20] and not config.causal_inside_block(0)
    assert [getattr(config, name) for name in PARTS] == [2, 8, 6, 16]


@pytest.mark.parametrize("name", ["DFlashDraftModel", "Qwen3DFlashDraftModel", "DFlashSpeculator", None])
def test_plain_drafters_of_every_name_are_read(drafter_dir: Path, tmp_path: Path, name: str | None) -> None:
    shutil.copytree(drafter_dir, tmp_path / "drafter")
    damage(tmp_path / "drafter/config.json", {"architectures": name and [name]})
    assert not load_drafter(str(tmp_path / "drafter")).config.is_dflash2


def nested(**changes: Any) -> Changes:
    return {"dflash_config": changes}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"architectures": ["DFlash2BeamDraftModel"]},
            "DSpineDraftModel); start vllm 0.33.0 or sglang 0.5.23 directly",
        ),
        ({"architectures": "DFlash2DraftModel"}, "'architectures' is 'DFlash2DraftModel', not a list"),
        ({"architectures": ["DFlashDraftModel"]}, "'conv_kernel_size' is of DFlash2DraftModel, but 'architectures' is"),
        ({"speculators_model_type": "dflash2"}, "speculators form of DFlash 2"),
        (
            {"speculators_model_type": "dflash", "architectures": ["DFlashSpeculator"]},
            "the speculators form of DFlash 2 is not supported",
        ),
        (nested(conv_group_size=None), "conv_kernel_size is 2 and conv_group_size 0; give both"),
        (nested(selector_top_k=None), "selector_rank is 6 and selector_top_k 0; give both"),
        (nested(**dict.fromkeys(PARTS)), "'conv_kernel_size' and 'selector_rank' are missing, but 'architectures' is"),
        (nested(conv_group_size=5), "hidden_size 32 is not a multiple of conv_group_size 5"),
        (nested(conv_kernel_size=9), "conv_kernel_size is 9, more than a block of 8"),
        (nested(selector_top_k=VOCAB + 1), f"selector_top_k is {VOCAB + 1}; the vocabulary has {VOCAB}"),
        (nested(selector_rank=-6), "selector_rank is -6"),
        (nested(selector_rank="6"), "'selector_rank' is '6', which"),
        (nested(selector_rank=7), "has shape"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_a_malformed_dflash2_config_is_one_line(copy: Path, change: Changes, said: str) -> None:
    values = json.loads((copy / "config.json").read_text())
    group = values["dflash_config"] | change.pop("dflash_config", {})
    values |= change | {"dflash_config": {key: value for key, value in group.items() if value is not None}}
    (copy / "config.json").write_text(json.dumps(values))
    assert said in drafter_refusal(copy)


def test_parameters_may_be_stored_as_modules(copy: Path) -> None:
    """Some trainers write the codebooks as embeddings, and `model.` before all names."""
    expected = load_drafter(str(copy))
    tensors = load_file(copy / "model.safetensors")
    bare = ("codebook", "base_kernel")
    for prefix in ("", "model."):
        renamed = {f"{prefix}{name}{'.weight' * name.endswith(bare)}": tensor for name, tensor in tensors.items()}
        assert len(renamed.keys() - tensors.keys()) >= 2 + 2 * 2
        save_file(renamed, copy / "model.safetensors")
        check_same(load_drafter(str(copy)), expected)
    save_file(renamed | {"candidate_selector.successor_codebook": torch.ones(1)}, copy / "model.safetensors")
    assert "'candidate_selector.successor_codebook' is stored twice, once as 'model.cand" in drafter_refusal(copy)


def test_plain_configurations_and_records_have_no_dflash2_keys(target: Target, dflash2_dir: Path) -> None:
    from dflash_toolkit.record import configuration

    plain = make_drafter(target).config
    assert not set(PARTS) & {*configuration(plain), *config_json(plain)["dflash_config"]}
    config = read_config(dflash2_dir)
    assert configuration(config).items() >= {"conv_kernel_size": 2, "selector_top_k": 16}.items()


def test_the_speculators_form_refuses_dflash2(dflash2_dir: Path) -> None:
    with pytest.raises(UserError, match="speculators form of DFlash 2"):
        check_form(read_config(dflash2_dir), "OUT")
