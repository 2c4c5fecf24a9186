"""The products of a Qwen3-8B step, as they run on an H200."""

from sm90 import Case

from dflash_toolkit.kernels import linear

SHAPES = {"linear": (6144, 4096), "partials": (4096, 12288), "swiglu": (24576, 4096), "argmax": (151936, 4096)}


def case(kind: str, rows: int) -> Case:
    n, k = SHAPES[kind]
    tile = linear.tile_for(kind, n, k, rows)
    constexprs = {
        "T": rows,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
        "EVEN_N": True,
        "EVEN_K": True,
        "PDL": True,
    }
    sizes = dict.fromkeys(("M", "N", "K"), "i32")
    if kind == "argmax":
        pointers = {"x_p": "*bf16", "w_p": "*bf16", "best_p": "*fp32", "index_p": "*i32"}
        return Case(linear._argmax_kernel, pointers | sizes, constexprs, tile.warps, tile.stages, ("M",))
    out = "*fp32" if kind == "partials" else "*bf16"
    pointers = {"x_p": "*bf16", "w_p": "*bf16", "bias_p": "*bf16", "out_p": out}
    constexprs |= {"BIAS": kind == "linear", "SWIGLU": kind == "swiglu"}
    return Case(linear._linear_kernel, pointers | sizes | {"SPAN": "i32"}, constexprs, tile.warps, tile.stages, ("M",))


CASES = {f"{kind} {rows}": case(kind, rows) for kind in SHAPES for rows in (16, 32, 64, 128)}
