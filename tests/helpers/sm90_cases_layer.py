"""The persistent layer kernel and head for Qwen3-8B and Qwen2.5-0.5B, with few and the most rows."""

from sm90 import Case
from triton.experimental.gluon import language as gl

from dflash_toolkit.kernels.hopper import head, layer, ring

COLUMNS = {"bf16": ring.BLOCK_BYTES.value // 2, "fp8e4nv": ring.BLOCK_BYTES.value}  # of a block
TYPES = {"bf16": gl.bfloat16, "fp8e4nv": gl.float8e4nv}


def descriptor(rows: int, dtype: str) -> str:
    layout = gl.NVMMASharedLayout.get_default_for([rows, COLUMNS[dtype]], TYPES[dtype])
    return f"tensordesc<{dtype}[{rows}, {COLUMNS[dtype]}],{layout!r}>"


def case(rows: int, d: int, width: int, ffn: int, qkv: int, splits: tuple[int, int, int], dtype: str = "bf16") -> Case:
    kinds = {name: descriptor(ring.BLOCK_N, dtype) for name in ("o_d", "gate_up_d", "down_d", "qkv_d")}
    kinds |= {name: descriptor(rows, dtype) for name in ("a_d", "h_d", "act_d")}
    kinds |= {name: "*bf16" for name in layer.layer_kernel.arg_names if name.endswith("_p")}
    kinds |= {"h_p": f"*{dtype}", "act_p": f"*{dtype}", "next_h_p": f"*{dtype if qkv else 'bf16'}"}
    if dtype != "bf16":
        kinds |= {name: "*fp32" for name in kinds if name.endswith("scale_p")}
    kinds |= {"part_p": "*fp32", "qkv_p": "*fp32", "sync_p": "*i32", "M": "i32", "stride_tap": "i32", "eps": "fp32"}
    slots = ring.slots_of(rows)
    constexprs = {
        "D": d, "A": width, "FFN": ffn, "QKV": qkv, "O_SPLITS": splits[0], "DOWN_SPLITS": splits[1],
        "QKV_SPLITS": splits[2], "BLOCK_D": layer.next_power_of_two(d), "T": rows, "BLOCK_N": ring.BLOCK_N,
        "GATE_WIDE": ring.wide_of(2 * ffn // ring.BLOCK_N, 1, rows, 132),
        "QKV_WIDE": ring.wide_of(qkv // ring.BLOCK_N, splits[2], rows, 132) if qkv else 1,
        "BLOCK_K": COLUMNS[dtype], "SCALED": dtype != "bf16", "TAP": True, "BARRIERS": layer.BARRIERS, "PHASES": 0,
        "SLOTS": slots.weights, "ROW_SLOTS": slots.rows,
    }  # fmt: skip
    return Case(layer.layer_kernel, kinds, constexprs, ring.WARPS, 3, ("M",))


CASES = {
    "8B, 128 rows": case(128, 4096, 4096, 12288, 6144, (2, 2, 4)),
    "0.5B, 16 rows": case(16, 896, 896, 4864, 1152, (7, 8, 7)),
}
CASES |= {
    f"8B in fp8, {rows} rows{', last' if qkv == 0 else ''}": case(rows, 4096, 4096, 12288, qkv, (2, 2, 4), "fp8e4nv")
    for rows, qkv in ((16, 6144), (128, 6144), (128, 0))
}


def head_case(rows: int, d: int, vocabulary: int) -> Case:
    kinds = {"w_d": descriptor(ring.BLOCK_N, "bf16"), "x_d": descriptor(rows, "bf16"), "M": "i32"}
    kinds |= {"best_p": "*fp32", "index_p": "*i32"}
    tiles, slots = vocabulary // ring.BLOCK_N, ring.slots_of(rows)
    constexprs = {
        "TILES": tiles, "K": d, "WIDE": ring.wide_of(tiles, 1, rows, 132), "T": rows,
        "SLOTS": slots.weights, "ROW_SLOTS": slots.rows, "BLOCK_N": ring.BLOCK_N, "BLOCK_K": COLUMNS["bf16"],
    }  # fmt: skip
    return Case(head.head_kernel, kinds, constexprs, ring.WARPS, 3, ("M",))


CASES |= {f"head, {rows} rows": head_case(rows, 4096, 151_936) for rows in (16, 128)}
