"""The products of a Qwen3-8B step, as they run on an H200."""

from sm90 import Case, case

from dflash_toolkit.kernels.triton import argmax, fp8, fp8_blocks, linear

SHAPES = {"linear": (6144, 4096), "split_k": (4096, 12288), "swiglu": (24576, 4096), "argmax": (151936, 4096)}


def product(kind: str, rows: int, scaled: bool, rounded: bool = False) -> Case:
    n, k = SHAPES[kind]
    tile = linear.tile_of_quantized(rows) if rounded else linear.tile_for(kind, n, k, rows, scaled)
    kinds = {"x_p": "*fp8e4nv" if rounded else "*bf16", "w_p": "*fp8e4nv" if scaled else "*bf16"}
    kinds["out_p"] = "*fp32" if kind == "split_k" else "*bf16"
    return case(
        linear._argmax_kernel if kind == "argmax" else linear._linear_kernel, tile.warps, tile.stages, kinds=kinds,
        T=rows, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k, SCALED=scaled, ROUNDED=rounded, BIAS=kind == "linear",
        SWIGLU=kind == "swiglu",
    )  # fmt: skip


def blocks(kind: str, rows: int, by_rows: bool = False, after_a_norm: bool = False) -> Case:
    tile = fp8_blocks.tile_for(*SHAPES[kind], rows, split=kind == "split_k")
    in_loop = rows <= fp8_blocks.QUANTIZED_IN_LOOP and not by_rows and not after_a_norm
    kinds = {"x_p": "*bf16" if in_loop else "*fp8e4nv", "w_p": "*fp8e4nv"}
    kinds["out_p"] = "*fp32" if kind == "split_k" else "*bf16"
    return case(
        fp8_blocks._block_linear_kernel, tile.warps, tile.stages, kinds=kinds, T=min(rows, 128), BLOCK_N=tile.block_n,
        BLOCK_K=128, QUANTIZE=in_loop, BY_ROWS=by_rows, BIAS=kind == "linear", SWIGLU=kind == "swiglu",
    )  # fmt: skip


CASES = (
    {
        f"{kind} {rows}{' fp8' * scaled}": product(kind, rows, scaled)
        for kind in SHAPES
        for rows, scaled in ((16, False), (32, True), (128, False))  # registers grow with the rows
    }
    | {f"argmax {rows} rounded": product("argmax", rows, True, True) for rows in (16, 128, 256)}
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
        f"swiglu of a prefill{', all gates first' * halves}": case(
            linear._swiglu_kernel, odd="", HALVES=halves, BLOCK=linear.SWIGLU_BLOCK
        )
        for halves in (False, True)
    }
    | {
        "rows in fp8 by groups": case(fp8_blocks._group_round_kernel, GROUPS=8, BLOCK_K=128),
        "rows in fp8": case(fp8._round_kernel, 8, BLOCK=16384),
        "best of the tiles": case(argmax._reduce_kernel, kinds={"out_p": "*i64"}, BLOCK=2048),
    }
)
