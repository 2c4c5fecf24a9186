"""The experts of Qwen3-30B-A3B, as they run on an H200."""

import triton.language as tl
from sm90 import Case

from dflash_toolkit.kernels.triton import experts

EXPERTS, TOP, HIDDEN, WIDTH = 128, 8, 2048, 768


def case(rows: int, swiglu: bool, fp8: bool, by_rows: bool = False) -> Case:
    tile, taken = experts.experts_tile(rows, TOP, EXPERTS, HIDDEN if swiglu else WIDTH, fp8=fp8)
    gathered, in_loop = experts.gathers(rows, fp8), rows <= experts.QUANTIZED_IN_LOOP and not by_rows
    pointers = {
        "x_p": "*fp8e4nv" if fp8 and not in_loop else "*bf16", "w_p": "*fp8e4nv" if fp8 else "*bf16",
        "x_scale_p": "*fp32", "w_scale_p": "*fp32", "expert_p": "*i32", "weight_p": "*fp32",
        "pair_p": "*i32", "count_p": "*i32",
        "out_p": "*bf16" if swiglu or rows > experts.MAX_ROWS else "*fp32",
    }  # fmt: skip
    constexprs = {
        "TOP": TOP, "SIDE": TOP, "T": taken, "BLOCK_N": tile.block_n, "BLOCK_K": tile.block_k, "EVEN_N": True,
        "EVEN_K": True, "GATHERED": gathered, "BY_PAIR": not gathered and rows * TOP <= EXPERTS, "SWIGLU": swiglu,
        "SCALED": fp8, "QUANTIZE": in_loop, "BY_ROWS": by_rows, "FP8_MAX": 448.0, "LEAST": 1e-12, "PDL": True,
    }  # fmt: skip
    sizes = dict.fromkeys(("M", "N", "K"), "i32")
    return Case(experts._experts_kernel, pointers | sizes, constexprs, tile.warps, tile.stages, ("M",))


CASES = {
    f"{'gates and ups' if swiglu else 'down'} of {rows} rows{', fp8' * fp8}": case(rows, swiglu, fp8)
    for rows in (16, 64, 128, 512, 8192)  # 32 and 256 are cut as 64 and 128
    for swiglu in (True, False)
    for fp8 in (False, True)
    if not fp8 or rows < 8192  # cut as 512
    if swiglu or rows not in (64, 128)  # the same with half the sums
} | {
    f"gates and ups of {rows} rows, fp8 by rows": case(rows, True, True, by_rows=True) for rows in (16,)
} | {
    "whose rows": Case(
        experts._group_rows_kernel,
        {"expert_p": "*i32", "pair_p": "*i32", "count_p": "*i32", "M": "i32"},
        {"TOP": TOP, "BLOCK": 1024, "PDL": True},
        ragged=("M",),
    ),
    "router": Case(
        experts._top_experts_kernel,
        {"part_p": "*fp32", "weight_p": "*fp32", "expert_p": "*i32", "M": "i32", "E": "i32"},
        {
            "PARTS": 4, "TOP": 10, "SIDE": 16, "BLOCK": 1024, "FORMAT": tl.bfloat16, "NORMALIZED": True, "SHARED": True,
            "PDL": True,
        },
        ragged=("M",),
    ),
}  # fmt: skip
