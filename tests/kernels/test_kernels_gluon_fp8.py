"""The layer kernel with matrices in fp8, on a CPU as in test_kernels_gluon.py."""

import pytest
import torch

pytest.importorskip("triton")

from test_kernels_gluon import SMALL, Mistake, broken, complaint, streamed
from test_kernels_layer import in_fp8

from dflash_toolkit.kernels.hopper import layer
from dflash_toolkit.kernels.weight import cast_fp8

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU runs the kernels themselves")


@pytest.mark.parametrize(
    ("shape", "rows", "programs", "cut"),
    [
        (SMALL, 1, 5, {"O_SPLITS": 2, "DOWN_SPLITS": 1}),  # a block of K and a half in two splits
        (SMALL, 3, 5, {"BLOCK_K": 256, "SCALED": True}),
        ((128, 640, 896, 64), 5, 9, {"O_SPLITS": 3, "DOWN_SPLITS": 4}),
        ((256, 128, 640, 448), 17, 18, {"DOWN_SPLITS": 3, "T": 32}),
        ((128, 128, 2176, 4352), 33, 34, {"GATE_WIDE": 2, "QKV_WIDE": 2}),
        ((128, 128, 3456, 6912), 36, 36, {"GATE_WIDE": 3, "QKV_WIDE": 3}),
    ],
    ids=str,
)
def test_a_layer_in_fp8_is_as_exact_as_torch(
    shape: tuple[int, int, int, int], rows: int, programs: int, cut: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = streamed(monkeypatch, shape, rows, programs)
    case.weights = in_fp8(case.weights)
    found, last = case.launch(), case.launch(qkv=None)
    assert cut.items() <= case.kernel.launches[0].items()
    assert found[1].dtype == torch.float8_e4m3fn and torch.equal(cast_fp8(last[1]).float(), found[1].float())
    assert torch.equal(last[0], found[0]) and last[2] is None
    case.check((found[0], last[1], found[2]))
    i = rows // 2
    alone = case.launch(slice(i, i + 1))
    for one, many in zip(alone, found, strict=True):
        assert torch.equal(one[..., 0, :].float(), many[..., i, :].float())


def test_activations_beyond_fp8_become_its_largest(monkeypatch: pytest.MonkeyPatch) -> None:
    case = streamed(monkeypatch, SMALL, 3, 5)
    case.weights["gate_up"] = case.weights["gate_up"] * 40
    case.weights = in_fp8(case.weights)
    found, last = case.launch(), case.launch(qkv=None)
    assert not any(bool(t.float().isnan().any()) for t in found)
    case.check((found[0], last[1], found[2]))


FP8_MISTAKES: dict[str, Mistake] = {
    "rows without the size that they had": (layer, "_norm", {"b_sum *= gl.load(scale_p + i_m)": "pass"}),
    "another row's size": (layer, "_norm", {"gl.load(scale_p + i_m)": "gl.load(scale_p)"}),
    "another tile's scales": (layer, "_gemm", {"scale_p + tile * BLOCK_N + o_n": "scale_p + o_n"}),
    "another product's scales": (layer, "_compute", {"scales[3]": "scales[1]"}),
    "no scales": (layer, "_gemm", {"b_0 * s_0[:, None]": "b_0"}),
    "the norm rounded for a product that is not there": (layer, "_norm", {"h_p.dtype.element_ty": "gl.float8e4nv"}),
}


@pytest.mark.parametrize("mistake", FP8_MISTAKES)
def test_a_mistake_in_fp8_is_found(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    broken(monkeypatch, *FP8_MISTAKES[mistake])
    case = streamed(monkeypatch, SMALL, 3, 5)
    case.weights = in_fp8(case.weights)
    last = {"qkv": None}

    def once() -> None:
        found = case.launch(**last)
        case.check((*found[:2], case.launch()[2]))

    assert complaint(case.kernel, once)
