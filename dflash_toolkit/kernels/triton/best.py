"""The best of what the programs of a head found."""

# mypy: disable-error-code="no-untyped-def"
import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch import next_power_of_two, pdl


@triton.jit(do_not_specialize=["M", "tiles"])
def _reduce_kernel(best_p, index_p, out_p, M, tiles, BLOCK: tl.constexpr, PDL: tl.constexpr):
    i_m = tl.program_id(0)
    o_t = tl.arange(0, BLOCK)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    b_best = tl.load(best_p + o_t * M + i_m, mask=o_t < tiles, other=-float("inf"))
    b_index = tl.load(index_p + o_t * M + i_m, mask=o_t < tiles, other=2**31 - 1)
    top = tl.max(b_best, axis=0)
    # rows that stand for no request may hold NaN and so no largest value; what they get must still be a column
    found = tl.min(tl.where(b_best == top, b_index, 2**31 - 1), axis=0)
    tl.store(out_p + i_m, tl.where(found == 2**31 - 1, 0, found).to(tl.int64))


def reduce_best(best: Tensor, index: Tensor) -> Tensor:
    """The column of the largest of `best`, the lowest of tied ones: int64 [M] of best, index [tiles, M]."""
    tiles, m = best.shape
    out = torch.empty(m, dtype=torch.int64, device=best.device)
    _reduce_kernel[(m,)](best, index, out, m, tiles, BLOCK=next_power_of_two(tiles), **pdl(best))
    return out
