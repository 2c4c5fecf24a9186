"""The Gluon kernels on a CPU: their own Python in `gluon_interpreter.py`, launched by their own host functions.

Compares them in float64 with their definitions, with loads, products and programs in several orders. Checks that it
finds mistakes that a GPU usually hides. test_kernels_layer.py runs on a GPU; test_kernels_gluon_attention.py tests the
attention kernel.
"""

import re
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from gluon_interpreter import Interpreted
from gluon_mistakes import Mistake, broken, complaint
from kernel_layers import EPS, assert_close, double, in_fp8, matrices
from torch import Tensor

from dflash_toolkit.kernels import reference
from dflash_toolkit.kernels.formats import RowScaledFp8, cast_fp8
from dflash_toolkit.kernels.hopper import head, layer, pipeline

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU runs the kernels themselves")

BF16 = torch.bfloat16


# ---- the layer -------------------------------------------------------------------------------------


@dataclass
class Streamed:
    """The layer kernel with its operands; the barriers' counters stay from launch to launch."""

    kernel: Interpreted
    counters: Tensor
    weights: dict[str, Any]
    x: Tensor
    a: Tensor

    def launch(self, rows: slice = slice(None), **others: Any) -> tuple[Any, ...]:
        """Returns the case for some of the rows, or with other operands."""
        return layer.launch_layer(self.x[rows], self.a[rows], eps=EPS, **(self.weights | others))

    def check(self, found: tuple[Any, ...]) -> None:
        """Checks the error against that of torch; NaN of unwritten memory fails."""
        wide: dict[str, Any] = double(self.weights)
        torchs: tuple[Any, ...] = reference.fused_post_attention(self.x, self.a, eps=EPS, **self.weights)
        exact: tuple[Any, ...] = reference.fused_post_attention(self.x.double(), self.a.double(), eps=EPS, **wide)
        assert_close(found, torchs, exact)


def streamed(
    patch: pytest.MonkeyPatch,
    shape: tuple[int, int, int, int],
    rows: int,
    programs: int,
    *,
    quantized: bool = False,
    slots: tuple[int, int] | None = None,
) -> Streamed:
    """Makes the host's choices for a device of so many multiprocessors; `slots` overrides the pipeline depths."""
    kernel, counters = Interpreted(layer.layer_kernel), torch.zeros(layer.BARRIERS, dtype=torch.int32)
    patch.setattr(layer, "layer_kernel", kernel)
    patch.setattr(layer, "programs_of", lambda _: programs)
    patch.setattr(layer, "_barriers", lambda _: counters)
    patch.setattr(layer, "quantize_rows", RowScaledFp8.of)
    if slots is not None:
        patch.setattr(layer, "slots_of", lambda _: pipeline.Slots(*slots))
    x, a = (torch.randn(rows, width).bfloat16() for width in shape[:2])
    weights = matrices(shape, "cpu", BF16)
    return Streamed(kernel, counters, in_fp8(weights) if quantized else weights, x, a)


SMALL = (128, 384, 256, 192)  # D, attention width, FFN, qkv


CUTS: list[tuple[tuple[int, int, int, int], int, int, dict[str, int]]] = [  # shape, rows, programs, what is launched
    (SMALL, 1, 5, {"O_SPLITS": 2, "DOWN_SPLITS": 2, "QKV_SPLITS": 1}),  # three blocks of K in two splits
    (SMALL, 3, 5, {"O_SPLITS": 2, "DOWN_SPLITS": 2, "QKV_SPLITS": 1}),
    ((128, 640, 896, 64), 5, 9, {"O_SPLITS": 3, "DOWN_SPLITS": 4}),  # five in three, seven in four
    ((256, 128, 640, 448), 16, 18, {"DOWN_SPLITS": 3, "QKV_SPLITS": 2}),
    ((256, 128, 640, 448), 17, 18, {"DOWN_SPLITS": 3, "T": 32}),
    ((128, 128, 2176, 4352), 33, 34, {"GATE_WIDE": 2, "QKV_WIDE": 2}),  # a program's tiles side by side
    ((128, 128, 3456, 6912), 36, 36, {"GATE_WIDE": 3, "QKV_WIDE": 3}),
    ((128, 256, 128, 64), 65, 66, {"T": 128}),
]
FP8_CUTS = [
    (SMALL, 1, 5, {"O_SPLITS": 2, "DOWN_SPLITS": 1}),  # a block of K and a half in two splits
    (SMALL, 3, 5, {"BLOCK_K": 256, "SCALED": True}),
    *(CUTS[i] for i in (2, 4, 6)),
]


@pytest.mark.parametrize(("cut", "quantized"), [*((c, False) for c in CUTS), *((c, True) for c in FP8_CUTS)], ids=str)
@pytest.mark.sampled
def test_a_layer_is_as_exact_as_torch(cut: Any, quantized: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    shape, rows, programs, launched = cut
    case = streamed(monkeypatch, shape, rows, programs, quantized=quantized)
    tap = torch.full((rows, 3, shape[0]), torch.nan, dtype=BF16)
    found, last = case.launch(tap=tap.flatten(1)[:, shape[0] : 2 * shape[0]]), case.launch(qkv=None)
    assert launched.items() <= case.kernel.launches[0].items()
    assert torch.equal(tap[:, 1], found[0]) and int(tap.isnan().sum()) == 2 * rows * shape[0]
    assert found[1].dtype == (torch.float8_e4m3fn if quantized else BF16)
    assert torch.equal((cast_fp8(last[1]) if quantized else last[1]).float(), found[1].float())
    assert torch.equal(last[0], found[0]) and last[2] is None
    case.check((found[0], last[1], found[2]))
    i = rows // 2
    for one, many in zip(case.launch(slice(i, i + 1)), found, strict=True):
        assert torch.equal(one[..., 0, :].float(), many[..., i, :].float())


def test_activations_beyond_fp8_become_its_largest(monkeypatch: pytest.MonkeyPatch) -> None:
    case = streamed(monkeypatch, SMALL, 3, 5)
    case.weights["gate_up"] = case.weights["gate_up"] * 40
    case.weights = in_fp8(case.weights)
    found, last = case.launch(), case.launch(qkv=None)
    assert not any(bool(t.float().isnan().any()) for t in found)
    case.check((found[0], last[1], found[2]))


@pytest.mark.parametrize("slots", [None, (1, 1), (2, 3), (5, 2)])
def test_layer_bits_do_not_depend_on_load_order_or_pipeline_depth(
    slots: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit, launch after launch on the same counters."""
    case = streamed(monkeypatch, SMALL, 3, 5)
    first = case.launch()
    case = replace(streamed(monkeypatch, SMALL, 3, 5, slots=slots), weights=case.weights, x=case.x, a=case.a)
    for seed in range(8):
        case.kernel.seed = seed
        assert all(torch.equal(one, other) for one, other in zip(case.launch(), first, strict=True))
        assert int(case.counters[0]) == 0  # the others are reset when no program can use them: by the next launch


def test_a_program_without_tiles_sees_every_arrival_at_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rows' warp may be slow, and nothing else keeps its warps that compute from going on.

    One barrier for all products, waited for with parities 0, 1, 0, hung: the second arrival hid the first.
    """
    case = streamed(monkeypatch, (128, 128, 128, 64), 3, 7)
    for seed in range(30):
        case.kernel.seed = seed
        case.check(case.launch())


def test_a_trace_has_every_programs_phases_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    case = streamed(monkeypatch, SMALL, 3, 5)
    trace = torch.full((5, len(layer.PHASES)), -1)
    case.check(case.launch(trace=trace))
    assert bool((trace[:, 0] >= 0).all()) and bool((trace.diff(dim=1) >= 0).all())
    for phase, name in enumerate(layer.PHASES):
        if name == "barrier":
            assert trace[:, phase].min() >= trace[:, phase - 1].max()


# ---- the head --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("columns", "k", "rows", "wide"),
    [(64, 128, 1, 1), (448, 256, 17, 1), (640, 256, 64, 2), (960, 384, 70, 3)],
    ids=str,
)
def test_head_finds_the_argmax_and_the_lowest_tied_column(
    columns: int, k: int, rows: int, wide: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = Interpreted(head.head_kernel)
    monkeypatch.setattr(head, "head_kernel", kernel)
    monkeypatch.setattr(head, "programs_of", lambda _: 5)
    x, weight = torch.randn(rows, k).bfloat16(), torch.randn(columns, k).bfloat16()
    weight[columns // 2] = weight[columns // 3]
    x[rows // 2] = 4 * weight[columns // 3]
    expected = (x.double() @ weight.double().T).float().bfloat16().argmax(-1)
    assert int(expected[rows // 2]) == columns // 3
    for seed in range(3):
        kernel.seed = seed
        assert torch.equal(head.launch_head(x, weight), expected)
    assert kernel.launches[0]["WIDE"] == wide
    pairs = weight[:64].repeat_interleave(2, 0)[:64].repeat(columns // 64, 1)
    assert torch.equal(head.launch_head(x, pairs), (x.double() @ pairs[:64:2].double().T).bfloat16().argmax(-1) * 2)


# ---- mistakes --------------------------------------------------------------------------------------


FREE_W, FREE_X = (f"mbarrier.arrive({ring}_free.index(slot), count=1)" for ring in "wx")
LAYER_MISTAKES: dict[str, Mistake] = {
    "weights given back before their product has ended": (
        pipeline, "_multiply", {FREE_W: "pass", "b_acc = warpgroup_mma_wait": f"{FREE_W}; b_acc = warpgroup_mma_wait"}
    ),
    "rows given back before their product has ended": (
        layer, "accumulate", {FREE_X: "pass", "b_0 = _multiply": f"{FREE_X}; b_0 = _multiply"}
    ),
    "weights used before they have come": (pipeline, "_multiply", {"mbarrier.wait(w_full.index(slot), ": "("}),
    "rows used before they have come": (layer, "accumulate", {"mbarrier.wait(x_full.index(slot), ": "("}),
    "a slot loaded before it is free": (layer, "stream", {"mbarrier.wait(free.index(slot), ": "("}),
    "full in the wrong phase": (pipeline, "_multiply", {"at // SLOTS % 2": "(at // SLOTS + 1) % 2"}),
    "free in the wrong phase": (layer, "stream", {"(done // SLOTS + 1) % 2": "done // SLOTS % 2"}),
    "half the bytes expected": (layer, "stream", {"BLOCK * BLOCK_BYTES": "BLOCK * BLOCK_BYTES // 2"}),
    "the norm loaded before it is there": (layer, "_stream_rows", {"mbarrier.wait(ready.index(0), 0)": "pass"}),
    "the activation loaded before it is there": (layer, "_stream_rows", {"mbarrier.wait(ready.index(1), 0)": "pass"}),
    "the last norm loaded before it is there": (layer, "_stream_rows", {"mbarrier.wait(ready.index(2), 0)": "pass"}),
    "no barrier after o": (layer, "_compute", {"join(sync_p, False)": "pass"}),
    "no barrier after the norm": (layer, "_compute", {"join(sync_p + 1, True)": "pass"}),
    "no barrier after gate and up": (layer, "_compute", {"join(sync_p + 2, True)": "pass"}),
    "no barrier after down": (layer, "_compute", {"join(sync_p + 3, False)": "pass"}),
    "no barrier after the last norm": (layer, "_compute", {"join(sync_p + 4, True)": "pass"}),
    "counters not reset": (layer, "_compute", {"gl.store(sync_p + i, 0)": "pass"}),
    "the first counter not reset": (layer, "_compute", {"gl.store(sync_p, 0)": "pass"}),
    "the first counter reset too early": (layer, "_compute", {"stamp(trace_p, 2, PHASES)": "gl.store(sync_p, 0)"}),
    "rows written that are not there": (layer, "_store", {"mask=(o_m < M)[None, :] & (o_n": "mask=(o_n"}),
    "rows read that are not there": (layer, "_row", {"(o_d < D) & (i_m < M)": "o_d < D"}),
}  # fmt: skip


FP8_MISTAKES: dict[str, Mistake] = {
    "rows without the size that they had": (layer, "_norm", {"b_sum *= gl.load(scale_p + i_m)": "pass"}),
    "another row's size": (layer, "_norm", {"gl.load(scale_p + i_m)": "gl.load(scale_p)"}),
    "another tile's scales": (layer, "_gemm", {"scale_p + tile * BLOCK_N + o_n": "scale_p + o_n"}),
    "another product's scales": (layer, "_compute", {"scales[3]": "scales[1]"}),
    "no scales": (layer, "_gemm", {"b_0 * s_0[:, None]": "b_0"}),
    "the norm rounded for a product that is not there": (layer, "_norm", {"h_p.dtype.element_ty": "gl.float8e4nv"}),
}


@pytest.mark.parametrize("mistake", [*LAYER_MISTAKES, *FP8_MISTAKES])
@pytest.mark.sampled
def test_a_mistake_in_the_layer_is_found(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    quantized = mistake in FP8_MISTAKES
    broken(monkeypatch, *(LAYER_MISTAKES | FP8_MISTAKES)[mistake])
    case = streamed(monkeypatch, SMALL, 3, 5, quantized=quantized, slots=None if quantized else (2, 1))

    def twice() -> None:
        for _ in range(2):
            found = case.launch(qkv=None) if quantized else case.launch()
            case.check((*found[:2], case.launch()[2] if quantized else found[2]))

    assert complaint(case.kernel, twice)


def test_a_deadlock_names_the_waiting_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    broken(monkeypatch, *LAYER_MISTAKES["free in the wrong phase"])
    case = streamed(monkeypatch, SMALL, 3, 5)
    said = complaint(case.kernel, lambda: case.check(case.launch()))
    assert said.startswith("Fault: deadlock:")
    barrier = r"waits for Barrier\(count=1, phase=0, missing=1, bytes=0\)"
    assert re.search(rf"program \(3,\), _compute, at pipeline.py:\d+, {barrier}", said)
    assert re.search(rf"program \(3,\), _stream_weights, at broken stream:\d+, {barrier}", said)
    assert re.search(r"program \(4,\), _compute, at grid.py:\d+, waits for 5 programs at counter 0", said)  # no tile
