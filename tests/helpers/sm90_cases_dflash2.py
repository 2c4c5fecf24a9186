"""The kernels of a DFlash 2 drafter for Qwen3-8B: convolutions, the head's top 16 and the walk."""

from typing import Any

from sm90 import Case, case

from dflash_toolkit.kernels.triton import argmax, convolution, linear, row_top, walk


def conv_case(kernel: Any, warps: int, x: str = "*bf16", dynamic: str = "*fp32", **constexprs: Any) -> Case:
    kinds = {"x_p": x, "dynamic_p": dynamic}
    return case(kernel, warps, odd="stride_tap", kinds=kinds, TAPS=2, GROUP=16, WIDTH=16, **constexprs)


def top_case(rows: int, kind: str, lse: bool = False) -> Case:
    scaled, rounded = kind != "bf16", kind == "rounded"
    tile = linear.tile_of_quantized(rows) if rounded else linear.tile_for("argmax", 151936, 4096, rows, scaled)
    kinds = {"x_p": "*fp8e4nv" if rounded else "*bf16", "w_p": "*fp8e4nv" if scaled else "*bf16"}
    warps = max(tile.warps, linear.LSE_WARPS) if lse and rows == 128 else tile.warps
    return case(
        linear._top_kernel, warps, tile.stages, kinds=kinds, T=rows, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k,
        COUNT=16, SLOTS=16, SCALED=scaled, ROUNDED=rounded, LOGIT=linear.tl.bfloat16, LSE=lse, CAPPED=lse,
    )  # fmt: skip


def tile_top_case(wide: bool, lse: bool, capped: bool = False) -> Case:
    kinds = {"logits_p": "*fp32", "keys_p": "*i64"} if wide else {}
    return case(
        row_top._tile_top_kernel, kinds=kinds, COUNT=16, C_BLOCK=16, TILE=row_top.TILE, LANES=row_top.TILE_LANES,
        WIDE=wide, LSE=lse, CAPPED=capped,
    )  # fmt: skip


def walk_case(sampled: bool) -> Case:
    kinds = {"q_p": "*fp32", "out_p": "*i64"}
    return case(walk._walk_kernel, odd="K C", kinds=kinds, C_BLOCK=16, R_BLOCK=256, SAMPLED=sampled)


CASES = {f"top of {rows} {kind}": top_case(rows, kind) for rows in (16, 128) for kind in ("bf16", "rounded")} | {
    "top of 16 widened": top_case(16, "widened"),
    "top of 128 and log-sum-exp": top_case(128, "bf16", lse=True),
    "top of 128 in fp8 and log-sum-exp": top_case(128, "rounded", lse=True),
    "top of a part's tiles": tile_top_case(False, False),
    "top of a part's tiles and log-sum-exp": tile_top_case(False, True),
    "top of a part's tiles and capped log-sum-exp": tile_top_case(False, True, True),
    "top of a part's tiles in fp32 and log-sum-exp": tile_top_case(True, True),
    "merge of the log-sum-exps": case(argmax._merge_lse_kernel, kinds={"out_p": "*fp32"}, BLOCK=2048),
    "merge of the tops": case(argmax._merge_top_kernel, 8, BLOCK=2048, BLOCK_N=128, COUNT=16, SLOTS=16, WIDE=False),
    "walk": walk_case(False),
    "sampled walk": walk_case(True),
    "convolution": conv_case(convolution._block_conv_kernel, 2, "*fp32", ROWS=1, GROUPS=32),
    "convolution of many rows": conv_case(convolution._block_conv_kernel, 4, dynamic="*bf16", ROWS=8, GROUPS=32),
    "convolution, add and norm": conv_case(convolution._conv_add_rms_norm_kernel, 8, GROUPS=256, TAP=True),
    "backward of the convolution": conv_case(
        convolution._block_conv_backward_kernel, 4, dynamic="*bf16", ROWS=64, GROUPS=4
    ),
}
