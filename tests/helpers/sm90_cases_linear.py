"""The products of a Qwen3-8B step, as they run on an H200."""

from sm90 import Case

from dflash_toolkit.kernels.triton import argmax, fp8, fp8_blocks, linear

SHAPES = {"linear": (6144, 4096), "split_k": (4096, 12288), "swiglu": (24576, 4096), "argmax": (151936, 4096)}


def case(kind: str, rows: int, scaled: bool, rounded: bool = False) -> Case:
    n, k = SHAPES[kind]
    tile = linear.tile_of_quantized(rows) if rounded else linear.tile_for(kind, n, k, rows, scaled)
    constexprs = {
        "T": rows,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
        "EVEN_N": True,
        "EVEN_K": True,
        "SCALED": scaled,
        "PDL": True,
    }
    sizes = dict.fromkeys(("M", "N", "K"), "i32")
    inputs = {"x_p": "*fp8e4nv" if rounded else "*bf16", "w_p": "*fp8e4nv" if scaled else "*bf16", "scale_p": "*fp32"}
    if kind == "argmax":
        pointers = inputs | {"best_p": "*fp32", "index_p": "*i32"}
        constexprs["ROUNDED"] = rounded
        return Case(linear._argmax_kernel, pointers | sizes, constexprs, tile.warps, tile.stages, ("M",))
    pointers = inputs | {"bias_p": "*bf16", "out_p": "*fp32" if kind == "split_k" else "*bf16"}
    constexprs |= {"BIAS": kind == "linear", "SWIGLU": kind == "swiglu"}
    return Case(linear._linear_kernel, pointers | sizes | {"SPAN": "i32"}, constexprs, tile.warps, tile.stages, ("M",))


def blocks(kind: str, rows: int, by_rows: bool = False, after_a_norm: bool = False) -> Case:
    n, k = SHAPES[kind]
    tile = fp8_blocks.tile_for(n, k, rows, split=kind == "split_k")
    in_loop = rows <= fp8_blocks.QUANTIZED_IN_LOOP and not by_rows and not after_a_norm
    inputs = {"x_p": "*bf16" if in_loop else "*fp8e4nv", "x_scale_p": "*fp32", "w_p": "*fp8e4nv", "w_scale_p": "*fp32"}
    outputs = {"bias_p": "*bf16", "out_p": "*fp32" if kind == "split_k" else "*bf16"}
    constexprs = {
        "T": min(rows, 128),
        "BLOCK_N": tile.block_n,
        "BLOCK_K": 128,
        "QUANTIZE": in_loop,
        "BY_ROWS": by_rows,
        "FP8_MAX": 448.0,
        "LEAST": 1e-12,
        "BIAS": kind == "linear",
        "SWIGLU": kind == "swiglu",
        "PDL": True,
    }
    sizes = dict.fromkeys(("M", "N", "K", "SPAN"), "i32")
    signature = inputs | outputs | sizes
    return Case(fp8_blocks._block_linear_kernel, signature, constexprs, tile.warps, tile.stages, ("M",))


CASES = (
    {
        f"{kind} {rows}{' fp8' * scaled}": case(kind, rows, scaled)
        for kind in SHAPES
        for rows, scaled in ((16, False), (32, True), (128, False))  # registers grow with the rows
    }
    | {f"argmax {rows} rounded": case("argmax", rows, True, True) for rows in (16, 128, 256)}
    | {
        f"{kind} {rows} in blocks": blocks(kind, rows)
        for kind, rows in [
            ("linear", 16),
            ("linear", 256),
            *((k, m) for k in SHAPES if "s" in k for m in (16, 64, 128)),
        ]
    }
    | {f"{kind} 16 in blocks, after a norm": blocks(kind, 16, after_a_norm=True) for kind in ("split_k", "swiglu")}
    | {"swiglu 256 in blocks": blocks("swiglu", 256), "split_k 16 by rows": blocks("split_k", 16, by_rows=True)}
    | {
        "rows in fp8 by groups": Case(
            fp8_blocks._group_round_kernel,
            {"x_p": "*bf16", "data_p": "*fp8e4nv", "scale_p": "*fp32"}
            | dict.fromkeys(("M", "K", "SCALE_M", "SCALE_K"), "i32"),
            {"GROUPS": 8, "BLOCK_K": 128, "FP8_MAX": 448.0, "LEAST": 1e-12, "PDL": True},
            ragged=("M",),
        ),
        **{
            f"swiglu of a prefill{', all gates first' * halves}": Case(
                linear._swiglu_kernel,
                {"x_p": "*bf16", "out_p": "*bf16", "width": "i32"},
                {"HALVES": halves, "BLOCK": linear.SWIGLU_BLOCK, "PDL": True},
            )
            for halves in (False, True)
        },
        "rows in fp8": Case(
            fp8._round_kernel,
            {"x_p": "*bf16", "data_p": "*fp8e4nv", "scale_p": "*fp32", "M": "i32", "K": "i32"},
            {"FP8_MAX": 448.0, "BLOCK": 16384, "PDL": True},
            num_warps=8,
            ragged=("M",),
        ),
        "best of the tiles": Case(
            argmax._reduce_kernel,
            {"best_p": "*fp32", "index_p": "*i32", "out_p": "*i64", "M": "i32", "tiles": "i32"},
            {"BLOCK": 2048, "PDL": True},
            ragged=("M", "tiles"),
        ),
    }
)
