"""The persistent kernel of experts in FP8 and the sort before it, on a CPU: see `gluon_interpreter.py`."""

import pytest
import torch
from gluon_interpreter import Interpreted
from kernel_inputs import DEVICE, randn
from torch import Tensor

from dflash_toolkit.kernels import reference
from dflash_toolkit.kernels.formats import BlockScaledFp8, QuantizedRows, quantize_groups
from dflash_toolkit.kernels.hopper import experts as hopper
from dflash_toolkit.kernels.hopper.sort_rows import sort_rows

pytestmark = pytest.mark.skipif(DEVICE == "cuda", reason="interprets kernels on a CPU")


def random_experts(rows: int, top: int, count: int) -> Tensor:
    """Returns experts [rows, top], all different in a row; the last one in every row, expert 1 in none."""
    chosen = torch.stack([torch.randperm(count - 2)[: top - 1] for _ in range(rows)])
    return torch.cat([chosen + (chosen > 0), torch.full((rows, 1), count - 1)], dim=1).int()


@pytest.mark.parametrize("rows", [1, 37])
def test_rows_are_sorted_by_expert_then_by_row(rows: int) -> None:
    experts, top, tile = random_experts(rows, 3, 9), 3, 16
    data, scale = quantize_groups(randn(rows, 256))
    found = sort_rows(data, scale, experts, 9, tile)
    order = experts.flatten().argsort(stable=True)
    assert found.pairs.tolist() == order.tolist()
    assert torch.equal(found.data.float(), data[order // top].float()) and torch.equal(found.scale, scale[order // top])
    tiles = [(e, at, n) for e, at, n in found.tiles[: int(found.total)].tolist()]
    covered = [(e, pair) for e, at, n in tiles for pair in range(at, at + n)]
    assert covered == [(int(experts.flatten()[pair]), at) for at, pair in enumerate(order)]
    assert all(0 < n <= tile for _, _, n in tiles) and len(tiles) <= len(found.tiles)


def experts_in_fp8(count: int, n: int, k: int) -> BlockScaledFp8:
    each = [BlockScaledFp8.of(randn(n, k) / k**0.5) for _ in range(count)]
    return BlockScaledFp8(torch.stack([w.data for w in each]), torch.stack([w.scale for w in each]))


@pytest.mark.parametrize(("rows", "tile", "slots"), [(5, 16, 1), (23, 16, 3), (140, 32, 4)])
def test_experts_equal_their_definition(rows: int, tile: int, slots: int, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Interpreted(hopper.hopper_experts_kernel, seed=rows)
    monkeypatch.setattr(hopper, "hopper_experts_kernel", kernel)
    count, top, d, width = 4, 3, 256, 256
    x, experts = randn(rows, d, dtype=torch.bfloat16), random_experts(rows, top, count)
    x *= torch.logspace(-1, 1, rows)[:, None].to(torch.bfloat16)
    weights, gate_up, down = torch.rand(rows, top), experts_in_fp8(count, 2 * width, d), experts_in_fp8(count, d, width)
    operand = QuantizedRows(x, *quantize_groups(x))
    found = hopper.launch_experts(operand, gate_up, down, weights, experts, hopper.Cut(tile, slots))
    assert found.shape == (top, rows, d) and found.dtype == (torch.float32 if rows <= 128 else torch.bfloat16)
    expected = reference.experts_mlp(operand, gate_up, down, weights, experts)
    error = (found.float() - expected.float()).norm() / expected.float().norm()
    assert error < 0.005  # both are rounded to bf16
