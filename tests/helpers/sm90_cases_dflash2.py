"""The kernels of a DFlash 2 drafter for Qwen3-8B: convolutions, the head's top 16 and the walk."""

from sm90 import Case

from dflash_toolkit.kernels.triton import argmax, convolution, linear, row_top, walk

SIZES = dict.fromkeys(
    ("M", "D", "groups", "S", "parts", "dynamic_parts", "stride_dynamic", "stride_part", "stride_tap"), "i32"
)
ODD = ("M", "S", "parts", "dynamic_parts", "stride_tap")


def conv_case(kernel: object, warps: int, *, wide: str = "*fp32", **constexprs: object) -> Case:
    narrow = ("base_p", "w_p", "out_p", "sum_p", "h_p", "tap_p")
    pointers = dict.fromkeys(narrow, "*bf16") | dict.fromkeys(("x_p", "part_p", "dynamic_p"), wide)
    pointers |= dict.fromkeys(("d_out_p", "d_x_p", "d_dynamic_p"), "*bf16") | {"d_base_p": "*fp32", "eps": "fp32"}
    if "part_p" in kernel.arg_names or "d_out_p" in kernel.arg_names:
        pointers["x_p"] = "*bf16"
    given = {name: kind for name, kind in (pointers | SIZES).items() if name in kernel.arg_names}
    ragged = tuple(name for name in ODD if name in given)
    return Case(kernel, given, {"TAPS": 2, "GROUP": 16, "WIDTH": 16} | constexprs, warps, ragged=ragged)


def top_case(rows: int, kind: str, lse: bool = False) -> Case:
    scaled, rounded = kind != "bf16", kind == "rounded"
    tile = linear.tile_of_quantized(rows) if rounded else linear.tile_for("argmax", 151936, 4096, rows, scaled)
    constexprs = {
        "T": rows, "BLOCK_N": tile.block_n, "BLOCK_K": tile.block_k, "COUNT": 16, "SLOTS": 16,
        "EVEN_N": True, "EVEN_K": True, "SCALED": scaled, "ROUNDED": rounded, "LOGIT": linear.tl.bfloat16, "LSE": lse,
        "CAPPED": lse, "PDL": True,
    }  # fmt: skip
    pointers = {"x_p": "*fp8e4nv" if rounded else "*bf16", "w_p": "*fp8e4nv" if scaled else "*bf16"}
    pointers |= {
        "scale_p": "*fp32",
        "row_scale_p": "*fp32",
        "keys_p": "*i32",
        "counts_p": "*i32",
        "bounds_p": "*i32",
        "tops_p": "*fp32",
        "sums_p": "*fp32",
        "multiplier": "fp32",
        "cap": "fp32",
    } | dict.fromkeys("MNK", "i32")
    warps = max(tile.warps, linear.LSE_WARPS) if lse and rows == 128 else tile.warps
    return Case(linear._top_kernel, pointers, constexprs, warps, tile.stages, ("M",))


def tile_top_case(wide: bool, lse: bool, capped: bool = False) -> Case:
    constexprs = {
        "COUNT": 16, "C_BLOCK": 16, "TILE": row_top.TILE, "LANES": row_top.TILE_LANES, "WIDE": wide, "LSE": lse,
        "CAPPED": capped, "PDL": True,
    }  # fmt: skip
    pointers = {"logits_p": "*fp32" if wide else "*bf16", "keys_p": "*i64" if wide else "*i32", "counts_p": "*i32"}
    pointers |= dict.fromkeys(("tops_p", "sums_p"), "*fp32") | dict.fromkeys(("multiplier", "cap"), "fp32")
    sizes = dict.fromkeys(("M", "V", "stride", "first"), "i32")
    return Case(row_top._tile_top_kernel, pointers | sizes, constexprs, ragged=("M", "first"))


def walk_case(sampled: bool) -> Case:
    kinds = dict.fromkeys(("state_p", "predecessors_p", "successors_p"), "*bf16")
    kinds |= dict.fromkeys(("unary_p", "temperature_p", "q_p"), "*fp32") | {"uniform_p": "*fp64"}
    kinds |= dict.fromkeys(("candidates_p", "anchors_p", "out_p"), "*i64") | dict.fromkeys(("K", "C", "R"), "i32")
    kinds |= {name: "i32" for name in walk._walk_kernel.arg_names if name.startswith("stride")}
    constexprs = {"C_BLOCK": 16, "R_BLOCK": 256, "SAMPLED": sampled, "PDL": True}
    return Case(walk._walk_kernel, kinds, constexprs, ragged=("K", "C", "stride_uniform"))


CASES = {f"top of {rows} {kind}": top_case(rows, kind) for rows in (16, 128) for kind in ("bf16", "rounded")} | {
    "top of 16 widened": top_case(16, "widened"),
    "top of 128 and log-sum-exp": top_case(128, "bf16", lse=True),
    "top of 128 in fp8 and log-sum-exp": top_case(128, "rounded", lse=True),
    "top of a part's tiles": tile_top_case(False, False),
    "top of a part's tiles and log-sum-exp": tile_top_case(False, True),
    "top of a part's tiles and capped log-sum-exp": tile_top_case(False, True, True),
    "top of a part's tiles in fp32 and log-sum-exp": tile_top_case(True, True),
    "merge of the log-sum-exps": Case(
        argmax._merge_lse_kernel,
        {"tops_p": "*fp32", "sums_p": "*fp32", "out_p": "*fp32", "M": "i32", "tiles": "i32"},
        {"BLOCK": 2048, "PDL": True},
        4,
        ragged=("M", "tiles"),
    ),
    "merge of the tops": Case(
        argmax._merge_top_kernel,
        {"keys_p": "*i32", "counts_p": "*i32", "values_p": "*fp32", "ids_p": "*i64", "M": "i32", "tiles": "i32"},
        {"BLOCK": 2048, "BLOCK_N": 128, "COUNT": 16, "SLOTS": 16, "WIDE": False, "PDL": True},
        8,
        ragged=("M", "tiles"),
    ),
    "walk": walk_case(False),
    "sampled walk": walk_case(True),
    "convolution": conv_case(convolution._block_conv_kernel, 2, ROWS=1, GROUPS=32, PDL=True),
    "convolution of many rows": conv_case(convolution._block_conv_kernel, 4, wide="*bf16", ROWS=8, GROUPS=32, PDL=True),
    "convolution, add and norm": conv_case(convolution._conv_add_rms_norm_kernel, 8, GROUPS=256, TAP=True, PDL=True),
    "backward of the convolution": conv_case(
        convolution._block_conv_backward_kernel, 4, wide="*bf16", ROWS=64, GROUPS=4
    ),
}
