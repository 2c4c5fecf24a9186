"""Documents packed into one row: each has the hidden states that it has alone."""

import inspect
import math
from functools import cache
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES, WINDOW, tiny
from conftest import make_target
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoModelForCausalLM, JambaConfig, MiniMaxConfig, PhimoeConfig  # type: ignore[attr-defined]
from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward as capped
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward as with_sinks

from dflash_toolkit import Target, UserError
from dflash_toolkit.config import UnsupportedModel
from dflash_toolkit.kernels import fla
from dflash_toolkit.models import packed
from dflash_toolkit.train.features.source import FeatureSource
from dflash_toolkit.train.responses.rows import Row

TAPS = (3, 1)


@cache
def exact(kind: str, window: int | None = None) -> Target:
    """A tiny target in float64; `window`: its upper layers see so many tokens."""
    extra = {} if window is None else {"use_sliding_window": True, "sliding_window": window, "max_window_layers": 2}
    tiny = make_target(kind, **extra)
    return Target(tiny.model.double(), tiny.tokenizer, tiny.name)


def documents(lengths: list[int], seed: int = 0) -> list[Tensor]:
    g = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 250, (n,), generator=g) for n in lengths]


@settings(max_examples=15, deadline=None)
@given(
    st.sampled_from([("llama", None), ("qwen2", None), ("qwen3", None), ("qwen2", 5)]),
    st.lists(st.integers(1, 40), min_size=1, max_size=6),
    st.integers(0, 1000),
)
def test_a_document_sees_itself_alone(kind: tuple[str, int | None], lengths: list[int], seed: int) -> None:
    target, texts = exact(*kind), documents(lengths, seed)
    out = target.forward(torch.cat(texts)[None], taps=TAPS, logits="all", final=True, lengths=lengths)
    for i, text in enumerate(texts):
        alone = target.forward(text[None], taps=TAPS, logits="all", final=True)
        for name in ("features", "logits", "final"):
            together = getattr(out, name)[0].split(lengths)[i]
            assert torch.allclose(together, getattr(alone, name)[0], rtol=1e-9, atol=1e-9), name


EACH = pytest.mark.parametrize("name", ARCHITECTURES)
# one token, longer than a window, than a chunk of the delta rule, first and last, in no order
ODD = [1, 2 * WINDOW + 3, 3, 70, 1, WINDOW, 2]


@EACH
def test_a_document_of_every_architecture_sees_itself_alone(name: str) -> None:
    target, texts = tiny(name), documents(ODD)
    out = target.forward(torch.cat(texts)[None], taps=TAPS, logits="all", final=True, lengths=ODD)
    for i, text in enumerate(texts):
        alone = target.forward(text[None], taps=TAPS, logits="all", final=True)
        for part in ("features", "logits", "final"):
            together, expected = getattr(out, part)[0].split(ODD)[i], getattr(alone, part)[0]
            assert (together - expected).abs().max() <= 2e-4 * expected.abs().max(), (part, i)


@EACH
@pytest.mark.parametrize("poisoned", [1, 3])
def test_nothing_of_a_document_reaches_another(name: str, poisoned: int) -> None:
    target, texts = tiny(name), documents(ODD)

    def poison(module: torch.nn.Module, args: object, output: Tensor) -> Tensor:
        return torch.cat([x.fill_(math.nan) if i == poisoned else x for i, x in enumerate(output.split(ODD, 1))], 1)

    clean = target.forward(torch.cat(texts)[None], taps=TAPS, final=True, lengths=ODD)
    handle = target.embedding.register_forward_hook(poison)
    try:
        out = target.forward(torch.cat(texts)[None], taps=TAPS, final=True, lengths=ODD)
    finally:
        handle.remove()
    for part in ("features", "final"):
        pairs = zip(getattr(out, part)[0].split(ODD), getattr(clean, part)[0].split(ODD), strict=True)
        for i, (found, expected) in enumerate(pairs):
            if i == poisoned:
                assert found.isnan().all()
            else:
                # NaN moves tokens to other experts; the products of these then have other numbers of rows
                assert (found - expected).abs().max() <= 1e-5 * expected.abs().max(), (part, i)


def test_a_soft_cap_is_applied_with_every_attention() -> None:
    model = ARCHITECTURES["Gemma 2"].model()
    model.config._attn_implementation = "sdpa"  # the choice of transformers 5.15 to 5.20
    target, text = Target(model, name="capped"), documents([20])[0][None]
    expected = tiny("Gemma 2").forward(text, taps=TAPS).features
    assert torch.equal(target.forward(text, taps=TAPS).features, expected)


def test_model_attention_is_restored_after_any_error() -> None:
    target, text = exact("llama"), torch.arange(12)[None]
    before = target.model.config._attn_implementation
    plain = target.forward(text, taps=TAPS).features
    target.forward(text, taps=TAPS, lengths=[5, 7])
    assert target.model.config._attn_implementation == before != packed.NAME
    with pytest.raises(IndexError):
        target.forward(text + 10**6, taps=TAPS, lengths=[5, 7])
    assert target.model.config._attn_implementation == before
    assert torch.equal(target.forward(text, taps=TAPS).features, plain)


SMALL = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "pad_token_id": 0}  # fmt: skip
OTHERS = {
    "a mixer of another kind": JambaConfig(**SMALL, attn_layer_period=2, attn_layer_offset=1),
    "recurrent attention": MiniMaxConfig(**SMALL, layer_types=["linear_attention", "full_attention"]),
    "windows that only a mask knows": PhimoeConfig(**SMALL, sliding_window=4),
}


@pytest.mark.parametrize("what", OTHERS)
def test_unknown_token_mixers_get_one_document_per_forward(what: str) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(OTHERS[what])
    assert not packed.separable(model)
    with pytest.raises(UnsupportedModel, match="mixes tokens in ways"), packed.alone(model, [5, 7]):
        pass


def test_gpu_rows_share_a_forward_only_if_documents_are_separate(monkeypatch: pytest.MonkeyPatch) -> None:
    mixing = Target(AutoModelForCausalLM.from_config(OTHERS["recurrent attention"]), name="mixing")
    rows = [Row(i, 0, text.tolist()) for i, text in enumerate(torch.arange(20).split([5, 8, 7]))]
    for target, forwards in ((tiny("Qwen3.5"), 1), (mixing, 3)):
        with monkeypatch.context() as patch:
            patch.setattr(Target, "device", torch.device("cuda"))
            source = FeatureSource(target, (0,), 40)
        ran: list[int] = []
        handle = target.layers[0].register_forward_hook(lambda *_, ran=ran: ran.append(1))
        found = source(rows).hidden
        handle.remove()
        assert len(ran) == forwards
        for row, features in zip(rows, found, strict=True):
            alone = target.forward(torch.tensor(row.tokens)[None], taps=(0,)).features[0]
            torch.testing.assert_close(features[: len(alone)], alone, rtol=1e-4, atol=1e-4)


def test_invalid_packed_documents_are_refused() -> None:
    target, text = exact("llama"), torch.arange(12)[None]
    for ids, lengths in ((text, [5, 6]), (text.view(2, 6), [6, 6]), (text, [12, 0])):
        with pytest.raises(ValueError, match="documents of"):
            target.forward(ids, taps=TAPS, lengths=lengths)
    with pytest.raises(ValueError, match="no cache"):
        target.forward(text, taps=TAPS, lengths=[5, 7], cache=target.new_cache())


def test_packed_rows_have_the_features_of_single_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU."""
    target = exact("qwen3")
    rows = [Row(i, 3, text.tolist()) for i, text in enumerate(documents([30, 7, 55, 12, 21]))]
    alone, together = (FeatureSource(target, TAPS, 40) for _ in range(2))
    monkeypatch.setattr(together, "_several", True)
    seen: list[int] = []
    target.layers[0].register_forward_hook(lambda *_: seen.append(1))
    found = together(rows).hidden
    assert len(seen) == 1
    assert torch.allclose(found, alone(rows).hidden, rtol=1e-9, atol=1e-9) and len(seen) == 6


def test_installed_flash_attention_accepts_our_arguments() -> None:
    q, kv, ends = (torch.empty(s, device="meta") for s in ((30, 14, 64), (30, 2, 64), (4,)))
    for window in (None, 8):
        for sinks in (None, q[0, :, 0]):
            assert packed.flash(q, kv, kv, ends.int(), 20, 0.125, window, sinks).shape == (30, 14, 64)


def test_only_arguments_without_effect_are_ignored() -> None:
    q, kv, ends = torch.randn(1, 4, 12, 8), torch.randn(1, 2, 12, 8), torch.tensor([0, 5, 12], dtype=torch.int32)

    def attend(mask: Tensor | None = None, **more: object) -> Tensor:
        lengths = {"cu_seq_lens_q": ends, "max_length_q": 7}
        return packed.attention(torch.nn.Module(), q, kv, kv, mask, **lengths, **more)[0]  # type: ignore[arg-type]

    plain = attend()
    without_effect: list[dict[str, object]] = [
        {"is_causal": True},
        {"is_causal": None},
        {"dropout": 0.0},
        {"s_aux": None},
        {"softcap": None},
    ]
    without_effect += [{"cu_seq_lens_k": ends, "max_length_k": 7, "use_cache": False, "output_attentions": False}]
    for passed in (*without_effect, {"position_ids": ends}):
        assert torch.equal(attend(**passed), plain)
    refused = {"dropout": 0.1, "is_causal": False, "position_bias": torch.zeros(4), "new_one": 0}
    for name, value in refused.items():
        with pytest.raises(UserError, match=rf"Module asks for attention with {name}"):
            attend(**{name: value})
    with pytest.raises(UserError, match="attention_mask"):
        attend(torch.ones(1, 1, 12, 12))


HEADS, LENGTHS = 4, [5, 1, 9]
ENDS = torch.tensor([0, 5, 6, 15], dtype=torch.int32)


@pytest.mark.parametrize("window", [None, 4])
def test_soft_caps_and_sinks_are_those_of_the_models_that_have_them(window: int | None) -> None:
    q, kv, sinks = torch.randn(1, HEADS, 15, 8), torch.randn(1, 2, 15, 8), torch.randn(HEADS)
    module = torch.nn.Module().eval()
    module.num_key_value_groups, module.sinks = 2, sinks
    place, document = torch.arange(15), torch.arange(3).repeat_interleave(torch.tensor(LENGTHS))
    distance = place[:, None] - place
    visible = (document[:, None] == document) & (distance >= 0) & (distance < (window or 15))
    mask = torch.zeros(15, 15).masked_fill(~visible, -torch.inf)[None, None]
    own = {"cu_seq_lens_q": ENDS, "max_length_q": 9, "sliding_window": window, "scaling": 0.7}
    expected = capped(module, q, kv, kv, mask, scaling=0.7, softcap=1.5)[0]
    torch.testing.assert_close(packed.attention(module, q, kv, kv, None, softcap=1.5, **own)[0], expected)
    expected = with_sinks(module, q, kv, kv, mask, scaling=0.7)[0]
    torch.testing.assert_close(packed.attention(module, q, kv, kv, None, s_aux=sinks, **own)[0], expected)


def test_flash_attention_sinks_rescale_by_the_softmax_sums() -> None:
    q, kv, sinks = torch.randn(15, HEADS, 8), torch.randn(15, 2, 8), torch.randn(HEADS)
    out, expected = (packed.one_by_one(q, kv, kv, ENDS, 0.7, None, sinks=each) for each in (None, sinks))
    keys = kv.repeat_interleave(2, 1)
    sums = torch.cat(
        [
            (0.7 * torch.einsum("tnh,snh->tns", one, key)).masked_fill(~tri[:, None], -torch.inf).logsumexp(-1)
            for one, key in zip(q.split(LENGTHS), keys.split(LENGTHS), strict=True)
            for tri in [torch.ones(len(one), len(one)).tril().bool()]
        ]
    )
    torch.testing.assert_close(packed.with_sinks(out, sums.T, sinks), expected)


# ---- on a GPU --------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("window", [None, 33])
@pytest.mark.parametrize(
    ("heads", "groups", "width"), [(14, 2, 64), (8, 8, 128), (32, 8, 128), (4, 2, 16), (16, 4, 256)]
)
def test_flash_attention_is_as_exact_as_bf16_allows(
    heads: int, groups: int, width: int, window: int | None, sinks: bool
) -> None:
    lengths = [1, 130, 64, 517, 3]
    g = torch.Generator("cuda").manual_seed(heads)
    how: dict[str, Any] = {"generator": g, "device": "cuda", "dtype": torch.bfloat16}
    q, k, v = (torch.randn(sum(lengths), n, width, **how) for n in (heads, groups, groups))
    ends = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device="cuda")
    aside = torch.randn(heads, **how) if sinks else None
    asked = ends, max(lengths), width**-0.5, window, aside
    exactly = packed.one_by_one(
        q.double(), k.double(), v.double(), ends, width**-0.5, window, sinks=None if aside is None else aside.double()
    )
    # probabilities are rounded to bf16 before they multiply the values, and so is the result
    error = (packed.flash(q, k, v, *asked).double() - exactly).abs()
    assert (error <= 2**-8 * (exactly.abs() + v.abs().max().double())).all()
    other = torch.cat([q[:195], torch.randn_like(q[195:])])
    assert torch.equal(packed.flash(other, k, v, *asked)[:195], packed.flash(q, k, v, *asked)[:195])


@pytest.mark.gpu
@EACH
def test_packed_gpu_features_are_as_exact_as_single_rows(name: str) -> None:
    reference, target = tiny(name), ARCHITECTURES[name].target()
    target.model.to("cuda", torch.bfloat16)
    lengths = [97, 130, 61, 1, 200]
    texts = documents(lengths)
    together = target.forward(torch.cat(texts)[None].cuda(), taps=TAPS, lengths=lengths).features[0]
    alone = torch.cat([target.forward(text[None].cuda(), taps=TAPS).features[0] for text in texts])
    # on the GPU, too: where flash-linear-attention is installed, transformers takes it on every device
    reference.model.to("cuda")
    exactly = torch.cat([reference.forward(text[None].cuda(), taps=TAPS).features[0] for text in texts])
    distance, usual = ((x.float() - exactly).norm() for x in (together, alone))
    assert distance <= 1.25 * usual


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", [[1, 130, 3, 64, 200, 1], [400]])
def test_the_delta_rule_restarts_at_every_document(lengths: list[int]) -> None:
    if fla.delta_rule() is None:
        pytest.skip("flash-linear-attention is not installed")
    from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule as rule

    how: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    tokens = sum(lengths)
    q, k = (torch.randn(1, tokens, 4, 64, **how) for _ in range(2))
    v, beta = torch.randn(1, tokens, 8, 64, **how), torch.rand(1, tokens, 8, **how)
    g = -torch.rand(1, tokens, 8, device="cuda")
    ends = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], device="cuda")
    given = {"g": g, "beta": beta, "use_qk_l2norm_in_kernel": True}
    found, _ = packed.delta_rule(rule, lengths, ends, q, k, v, **given)
    wide = (x.repeat_interleave(2, dim=2) for x in (q, k))  # that of transformers 5.17 wants as many as values
    exactly = [x.cpu().double() for x in (*wide, v)], {**given, "g": g.cpu().double(), "beta": beta.cpu().double()}
    expected, _ = packed.delta_rule(inspect.unwrap(rule), lengths, ends.cpu(), *exactly[0], **exactly[1])
    assert (found.cpu().double() - expected).norm() <= 0.02 * expected.norm()
