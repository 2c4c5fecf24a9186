"""The layer kernel of DFlash 2, interpreted on a CPU as test_kernels_gluon.py has the plain one, and on a GPU."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from gluon_interpreter import Interpreted
from gluon_mistakes import Mistake, broken, complaint
from kernel_layers import EPS, assert_close, matrices
from torch import Tensor

from dflash_toolkit.kernels import gpu, reference
from dflash_toolkit.kernels.formats import RowScaledFp8
from dflash_toolkit.kernels.hopper import conv_layer

BF16 = torch.bfloat16
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU runs the kernel itself")


def changed(value: Any, change: Any) -> Any:
    """Returns an operand with a function applied to its tensors."""
    return tuple(changed(part, change) for part in value) if isinstance(value, tuple) else change(value)


def double(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def narrow(name: str, value: Any) -> Any:
    """Quantizes matrices and the projections of convolutions to fp8, but not the base of convolutions."""
    if isinstance(value, tuple):
        return value[0], RowScaledFp8.of(value[1])
    return RowScaledFp8.of(value) if name in ("o", "gate_up", "down", "qkv") else value


@dataclass
class Case:
    """Operands of a layer, of blocks of `block` rows."""

    weights: dict[str, Any]
    x: Tensor
    a: Tensor
    after: Tensor
    block: int

    @classmethod
    def of(
        cls, shape: tuple[int, ...], taps: int, group: int, block: int, rows: int, quantized: bool, device: str = "cpu"
    ) -> "Case":
        d, width = shape[:2]
        side = taps * d // group
        weights: dict[str, Any] = matrices(shape[:4], device, BF16)  # type: ignore[arg-type]
        for name in ("ffn", "following"):
            base, projection = torch.randn(2, taps, d), torch.randn(2 * side, d) / d**0.5
            weights[name] = (base.to(device, BF16), projection.to(device, BF16))
        if quantized:
            weights = {name: narrow(name, value) for name, value in weights.items()}
        weights["base"] = torch.randn(taps, d).to(device, BF16)
        x, a = (torch.randn(rows, n).to(device, BF16) for n in (d, width))
        after = torch.randn(3, rows, 2 * side + 7, device=device)[:, :, side : 2 * side]
        return cls(weights, x, a, after, block)

    def launch(self, rows: slice = slice(None), **others: Any) -> tuple[Any, ...]:
        given = self.weights | {"after": self.after[:, rows], "eps": EPS, "block": self.block} | others
        return gpu.fused_conv_post_attention(self.x[rows], self.a[rows], **given)

    def check(self, found: tuple[Any, ...]) -> None:
        """Checks every part against the error of torch."""
        given = self.weights | {"x": self.x, "a": self.a, "after": self.after}
        torchs, exact = (
            reference.fused_conv_post_attention(**operands, eps=EPS, block=self.block)
            for operands in (given, {name: changed(value, double) for name, value in given.items()})
        )
        for last in (2, 3):
            assert_close(*((*parts[:2], parts[last]) for parts in (found, torchs, exact)))  # type: ignore[arg-type]


def streamed(patch: pytest.MonkeyPatch, programs: int) -> Interpreted:
    """Replaces the kernel by its interpreter, for a device of so many multiprocessors."""
    kernel, counters = Interpreted(conv_layer.conv_layer_kernel), torch.zeros(conv_layer.BARRIERS, dtype=torch.int32)
    patch.setattr(conv_layer, "conv_layer_kernel", kernel)
    patch.setattr(conv_layer, "programs_of", lambda _: programs)
    patch.setattr(conv_layer, "_barriers", lambda _: counters)
    patch.setattr(conv_layer, "quantize_rows", RowScaledFp8.of)
    return kernel


SMALL = ((128, 384, 256, 192), 2, 16, 3, 6)  # D, attention width, FFN, qkv; taps, channels of a group, block, rows
CUTS: list[tuple[Any, int, dict[str, int]]] = [  # operands, programs, what is launched
    (SMALL, 7, {"OWN_TILES": 1, "OWN_SPLITS": 1, "AFTER_SPLITS": 3, "GROUP": 16, "BLOCK_C": 8}),
    (((128, 128, 128, 64), 1, 8, 1, 2), 5, {"TAPS": 1, "GROUP": 8}),
    (((384, 128, 640, 448), 3, 4, 4, 16), 18, {"OWN_TILES": 9, "OWN_SPLITS": 2, "BLOCK_C": 128}),  # 96 groups
    (((128, 128, 256, 64), 2, 64, 17, 17), 18, {"T": 32, "OWN_TILES": 1}),  # eight columns of coefficients
]
FP8_CUTS = [(((128, 384, 256, 192), 2, 8, 3, 6), 7, {"SCALED": True, "OWN_TILES": 1})]


@interpreted
@pytest.mark.parametrize(("cut", "quantized"), [*((c, False) for c in CUTS), *((c, True) for c in FP8_CUTS)], ids=str)
def test_a_layer_is_as_exact_as_torch(cut: Any, quantized: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    operands, programs, launched = cut
    kernel, case = streamed(monkeypatch, programs), Case.of(*operands, quantized=quantized)
    found, last = case.launch(), case.launch(following=None, qkv=None)
    assert launched.items() <= kernel.launches[0].items()
    assert torch.equal(last[0], found[0]) and torch.equal(last[1], found[1]) and last[2:] == (None, None)
    case.check(found)
    second = slice(case.block, 2 * case.block) if len(case.x) > case.block else slice(0, case.block)
    for one, many in zip(case.launch(second), found, strict=True):
        assert torch.equal(one, many[..., second, :]), "other blocks do not matter"


@interpreted
def test_layer_bits_do_not_depend_on_load_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit, launch after launch on the same counters."""
    kernel, case = streamed(monkeypatch, 7), Case.of(*SMALL, quantized=False)
    first = case.launch()
    for seed in range(8):
        kernel.seed = seed
        assert all(torch.equal(one, other) for one, other in zip(case.launch(), first, strict=True))


MISTAKES: dict[str, Mistake] = {
    "a convolution that crosses blocks": (
        conv_layer, "_leave", {"there = mask & (i_m % block >= tau)": "there = mask & (i_m >= tau)"}
    ),
    "one before a sub-layer that crosses blocks": (
        conv_layer, "_enter", {"(o_d < D) & (i_m % block >= tau)": "(o_d < D) & (i_m >= tau)"}
    ),
    "the other side's coefficients": (conv_layer, "_compute", {"own_p + side": "own_p"}),
    "the other side's base": (conv_layer, "_compute", {"ffn_base_p + TAPS * D": "ffn_base_p"}),
    "the FFN's base around the next attention": (conv_layer, "_compute", {"wide_p, next_base_p": "wide_p, ffn_base_p"}),
    "a GEMM of what no convolution has passed": (conv_layer, "_stream_rows", {
        "done = stream(inside_d": "done = stream(h_d"
    }),
    "counters not reset": (conv_layer, "_compute", {"gl.store(sync_p + i, 0)": "pass"}),
    "the first counter not reset": (conv_layer, "_compute", {"gl.store(sync_p, 0)": "pass"}),
    "no barrier after o": (conv_layer, "_compute", {"join(sync_p, False)": "pass"}),
    **{f"no barrier {i}": (conv_layer, "_compute", {f"join(sync_p + {i}, {i not in (2, 5, 7)})": "pass"})
       for i in range(1, conv_layer.BARRIERS)},
    **{f"rows {i} loaded before they are there": (
        conv_layer, "_stream_rows", {f"mbarrier.wait(ready.index({i}), 0)": "pass"}
    ) for i in range(5)},
}  # fmt: skip
FP8_MISTAKES: dict[str, Mistake] = {
    "rows without the size that they had": (
        conv_layer, "_leave", {"b_sum *= gl.load(scale_p + gl.maximum(i_m - tau, 0))": "pass"}
    ),
    "the size of the row for the one before it": (conv_layer, "_leave", {"gl.maximum(i_m - tau, 0)": "i_m"}),
    "another product's scales": (conv_layer, "_compute", {"scales[5]": "scales[2]"}),
}  # fmt: skip


@interpreted
@pytest.mark.parametrize("mistake", [*MISTAKES, *FP8_MISTAKES])
@pytest.mark.sampled
def test_a_mistake_in_the_layer_is_found(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    broken(monkeypatch, *(MISTAKES | FP8_MISTAKES)[mistake])
    cut = FP8_CUTS[0][0] if mistake in FP8_MISTAKES else SMALL
    kernel, case = streamed(monkeypatch, 7), Case.of(*cut, quantized=mistake in FP8_MISTAKES)

    def twice() -> None:
        for _ in range(2):
            case.check(case.launch())

    assert complaint(kernel, twice)


@pytest.mark.gpu
@pytest.mark.hopper
@pytest.mark.parametrize("quantized", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("shape", [(4096, 4096, 12288, 6144), (896, 896, 4864, 1152)], ids=str)
def test_conv_layer_is_exact_and_batch_invariant_on_a_gpu(shape: tuple[int, ...], quantized: bool) -> None:
    if quantized and shape[0] == 896:
        pytest.skip("three and a half tiles of coefficients, which have no scales to fill up with")
    for block, rows in ((16, 16), (8, 40), (4, 4), (16, 128), (1, 3)):
        case = Case.of(shape, 2, 16, block, rows, quantized, "cuda")
        weights = [case.weights[name] for name in ("o", "gate_up", "down", "qkv")]
        assert gpu.fuses_conv_post_attention(case.x, weights, [case.weights["ffn"], case.weights["following"]])
        found, last = case.launch(), case.launch(following=None, qkv=None)
        assert torch.equal(last[0], found[0]) and torch.equal(last[1], found[1])
        case.check(found)
        for _ in range(20):
            assert all(torch.equal(one, other) for one, other in zip(case.launch(), found, strict=True))
        end = slice(rows - block, rows)
        for one, many in zip(case.launch(end), found, strict=True):
            assert torch.equal(one, many[..., end, :])
