"""The experts of Qwen3-30B-A3B, as they run on an H200."""

import triton.language as tl
from sm90 import Case, case

from dflash_toolkit.kernels.triton import experts

EXPERTS, TOP, HIDDEN, WIDTH = 128, 8, 2048, 768


def products(rows: int, swiglu: bool, fp8: bool, by_rows: bool = False) -> Case:
    tile, taken = experts.experts_tile(rows, TOP, EXPERTS, HIDDEN if swiglu else WIDTH, fp8=fp8)
    gathered, in_loop = experts.gathers(rows, fp8), rows <= experts.QUANTIZED_IN_LOOP and not by_rows
    kinds = {"out_p": "*bf16" if swiglu or rows > experts.MAX_ROWS else "*fp32"}
    if fp8:
        kinds |= {"w_p": "*fp8e4nv", "x_p": "*bf16" if in_loop else "*fp8e4nv"}
    return case(
        experts._experts_kernel, tile.warps, tile.stages, kinds=kinds, TOP=TOP, SIDE=TOP, T=taken, GATHERED=gathered,
        BLOCK_N=tile.block_n, BLOCK_K=tile.block_k, BY_PAIR=not gathered and rows * TOP <= EXPERTS, SWIGLU=swiglu,
        SCALED=fp8, QUANTIZE=in_loop, BY_ROWS=by_rows,
    )  # fmt: skip


CASES = {
    f"{'gates and ups' if swiglu else 'down'} of {rows} rows{', fp8' * fp8}": products(rows, swiglu, fp8)
    for rows in (16, 64, 128, 512, 8192)  # 32 and 256 are cut as 64 and 128
    for swiglu in (True, False)
    for fp8 in (False, True)
    if not fp8 or rows < 8192  # cut as 512
    if swiglu or rows not in (64, 128)  # the same with half the sums
} | {
    "gates and ups of 16 rows, fp8 by rows": products(16, True, True, by_rows=True),
    "rows by expert": case(experts._group_rows_kernel, TOP=TOP, BLOCK=1024),
    "router": case(
        experts._top_experts_kernel, PARTS=4, TOP=10, SIDE=16, BLOCK=1024, FORMAT=tl.bfloat16, NORMALIZED=True,
        SHARED=True,
    ),
}  # fmt: skip
