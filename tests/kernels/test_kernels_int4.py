"""GEMMs and experts with weights in INT4, on the interpreter where there is no GPU."""

import itertools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from kernel_inputs import DEVICE, in_turn
from torch import Tensor

from dflash_toolkit.kernels import gpu, reference
from dflash_toolkit.kernels.formats import GroupedInt4, Int4
from dflash_toolkit.kernels.formats.int4 import pack, quarter_of, unpack
from dflash_toolkit.kernels.triton import int4

pytestmark = [pytest.mark.gpu] * (DEVICE == "cuda")  # `make test-gpu` runs them there
LAYOUTS = [(256, 32), (192, 64), (512, 128), (384, 128), (384, 0)]  # K, and columns of a group; 0: all


def weight_of(*shape: int, group: int) -> GroupedInt4:
    """Numbers, scales in 16 bits and zero points of every value, with matrices of order one."""
    new = torch.empty(0, device=DEVICE).new_empty
    weight = Int4(group=group).empty(*shape, new=new)
    weight.data.copy_(torch.randint(-(1 << 15), 1 << 15, weight.data.shape))
    scale = (torch.rand(weight.scale.shape) * 0.3 / shape[-1] ** 0.5).half().float().view(torch.int32)
    weight.scale.copy_(scale | torch.randint(0, 16, scale.shape, dtype=torch.int32))
    return weight


def exact(x: Tensor, weight: GroupedInt4) -> tuple[Tensor, Tensor]:
    """Returns the product in float64, and the sum of its terms' absolute values."""
    values = weight.dense(torch.float64)
    return x.double() @ values.mT, x.double().abs() @ values.mT.abs()


def close(found: Tensor, expected: Tensor, terms: Tensor, dtype: torch.dtype) -> bool:
    """Within the rounding of the result, of a reference's weights, and of sums in fp32."""
    eps = torch.finfo(dtype).eps
    return bool(((found.double() - expected).abs() <= eps * expected.abs() + eps * terms / 2 + 1e-6 * terms).all())


def test_packed_numbers_scales_and_zeros_are_views() -> None:
    weight = weight_of(96, 384, group=128)
    parts = Int4(group=128).tensors("w", weight)
    numbers, zeros = torch.randint(0, 16, (96, 384)), torch.randint(0, 16, (96, 3))
    scales = torch.rand(96, 3).bfloat16().float()
    parts["w"].copy_(pack(numbers, weight.quarter))
    parts["w_scale"].copy_(scales.view(torch.uint8).view(96, 3, 4)[..., 1:])
    parts["w_zero"].copy_(zeros)
    expected = (numbers - zeros.repeat_interleave(128, 1)) * scales.repeat_interleave(128, 1)
    assert torch.equal(weight.dense(torch.float32).cpu(), expected)
    first, second = weight.split([32, 64])
    assert torch.equal(torch.cat([first.dense(torch.float32), second.dense(torch.float32)]).cpu(), expected)
    assert second.data.untyped_storage().data_ptr() == weight.data.untyped_storage().data_ptr()
    assert weight.nbytes == 96 * 384 // 2 + 4 * 96 * 3 and weight.shape == (96, 384)


@pytest.mark.parametrize(("k", "group", "quarter"), [(256, 32, 32), (192, 64, 16), (512, 128, 64), (896, 896, 32)])
def test_numbers_of_a_block_are_packed_by_quarters(k: int, group: int, quarter: int) -> None:
    assert quarter_of(k, group) == quarter
    numbers = torch.randint(0, 16, (3, k), dtype=torch.int16)
    packed = pack(numbers, quarter)
    assert torch.equal(unpack(packed, quarter), numbers)
    at = k // 4 - quarter  # the first number of the last block
    assert [int(packed[1, at]) >> shift & 15 for shift in (0, 4, 8, 12)] == numbers[1, 4 * at :: quarter].tolist()
    assert quarter_of(k + 8, group) == 0


@pytest.mark.parametrize(("layout", "m", "dtype"), in_turn([*itertools.product(LAYOUTS, (1, 17, 130))]))
def test_int4_gemms_equal_their_definitions(
    layout: tuple[int, int], m: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    k, group = layout
    monkeypatch.setattr(int4, "SLICE", 40)
    monkeypatch.setattr(int4, "TILED_ROWS", 128 + group)  # 130 rows in tiles, or with three slices if group is 0
    x, weight = torch.randn(m, k, device=DEVICE).to(dtype), weight_of(96, k, group=group)
    bias = torch.randn(96, device=DEVICE).to(dtype)
    expected, terms = exact(x, weight)
    gate, up = expected.chunk(2, 1)
    active = F.silu(gate) * up
    spread = 1.1 * terms[:, :48] * up.abs() + gate.abs() * terms[:, 48:]  # silu has slope at most 1.1
    for operations in (gpu, reference):
        assert close(operations.linear(x, weight), expected, terms, dtype)
        assert close(operations.linear(x, weight, bias), expected + bias, terms + bias.abs(), dtype)
        sums = operations.linear_split_k(x, weight, bias)
        assert close(sums.double().sum(0), expected + bias, terms + bias.abs(), dtype)
        assert close(operations.linear_swiglu(x, weight), active, 4 * spread, dtype)


def test_dequantized_weights_have_the_bits_of_the_definition() -> None:
    for k, group in LAYOUTS:
        weight = weight_of(40, k, group=group)
        for dtype in (torch.float32, torch.float16):
            out = torch.empty(40, k, dtype=dtype, device=DEVICE)
            assert torch.equal(int4.dequantize(weight, out), weight.dense(dtype))


@pytest.mark.parametrize(
    ("kind", "n", "k"), [("linear", 96, 256), ("linear_split_k", 64, 2048), ("linear_swiglu", 128, 256)]
)
def test_int4_row_bits_do_not_depend_on_batch_size(kind: str, n: int, k: int) -> None:
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float16
    x, weight = torch.randn(128, k, device=DEVICE).to(dtype), weight_of(n, k, group=128)
    function: Callable[[Tensor, GroupedInt4], Tensor] = getattr(gpu, kind)
    whole, dim = function(x, weight), 1 if kind == "linear_split_k" else 0
    assert kind != "linear_split_k" or len(whole) > 1
    for rows in (1, 16, 40):
        assert torch.equal(function(x[-rows:], weight), whole.narrow(dim, 128 - rows, rows))


@pytest.mark.parametrize(
    ("group", "m", "dtype"), in_turn([*itertools.product((32, 128, 0), (1, 3, 17, 65, 130))])
)  # a program by pair and by expert, one more row than are padded to 16, gathered, rounded
def test_int4_experts_equal_their_definition(group: int, m: int, dtype: torch.dtype) -> None:
    x = torch.randn(m, 256, device=DEVICE).to(dtype)
    width = 64 if group == 32 else 128
    gate_up, down = weight_of(5, 2 * width, 256, group=group), weight_of(5, 256, width, group=group)
    routing = reference.top_experts(torch.randn(1, m, 5, device=DEVICE), dtype, 2, normalized=True, shared=m == 17)
    found = gpu.experts_mlp(x, gate_up, down, *routing)
    expected = reference.experts_mlp(x, gate_up, down, *routing)
    assert found.dtype == (torch.float32 if m <= 128 else dtype)
    assert (found.double() - expected.double()).norm() <= 8 * torch.finfo(dtype).eps * expected.double().norm()
    if 3 <= m <= 128:
        last = gpu.experts_mlp(x[-2:], gate_up, down, *(part[-2:] for part in routing))
        assert torch.equal(last, found[:, -2:])
