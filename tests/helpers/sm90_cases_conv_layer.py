"""The persistent layer kernel of DFlash 2 for Qwen3-8B and Qwen2.5-0.5B."""

from sm90 import Case
from sm90_cases_layer import COLUMNS, descriptor

from dflash_toolkit.kernels.hopper import conv_layer, ring


def case(rows: int, d: int, width: int, ffn: int, qkv: int, splits: tuple[int, ...], dtype: str = "bf16") -> Case:
    kernel = conv_layer.conv_layer_kernel
    matrices = ("o_d", "own_d", "gate_up_d", "down_d", "next_own_d", "qkv_d")
    kinds = {name: descriptor(ring.BLOCK_N, dtype) for name in matrices}
    kinds |= {name: descriptor(rows, dtype) for name in ("a_d", "h_d", "inside_d", "act_d")}
    kinds |= {name: "*bf16" for name in kernel.arg_names if name.endswith("_p")}
    kinds |= dict.fromkeys(("h_p", "inside_p", "act_p"), f"*{dtype}")
    if dtype != "bf16":
        kinds |= {name: "*fp32" for name in kinds if name.endswith("scale_p")}
    kinds |= dict.fromkeys(("part_p", "qkv_p", "behind_p", "own_p", "next_own_p"), "*fp32") | {"sync_p": "*i32"}
    kinds |= dict.fromkeys(("M", "block", "split_behind", "row_behind"), "i32") | {"eps": "fp32"}
    slots, groups = ring.slots_of(rows), d // 16
    constexprs = {
        "D": d, "A": width, "FFN": ffn, "QKV": qkv, "TAPS": 2, "GROUP": 16,
        "BLOCK_C": conv_layer.next_power_of_two(groups), "OWN_TILES": -(-4 * groups // ring.BLOCK_N),
        "BEHIND_SPLITS": splits[3], "OWN_SPLITS": splits[3], "O_SPLITS": splits[0], "DOWN_SPLITS": splits[1],
        "QKV_SPLITS": splits[2], "GATE_WIDE": ring.wide_of(2 * ffn // ring.BLOCK_N, 1, rows, 132),
        "QKV_WIDE": ring.wide_of(qkv // ring.BLOCK_N, splits[2], rows, 132) if qkv else 1, "T": rows,
        "BLOCK_N": ring.BLOCK_N, "BLOCK_K": COLUMNS[dtype], "SLOTS": slots.weights, "ROW_SLOTS": slots.rows,
        "SCALED": dtype != "bf16", "BARRIERS": conv_layer.BARRIERS,
    }  # fmt: skip
    return Case(kernel, kinds, constexprs, ring.WARPS, 3, ("M", "block", "row_behind", "split_behind"))


CASES = {
    "8B, 128 rows": case(128, 4096, 4096, 12288, 6144, (2, 2, 4, 8)),
    "0.5B, 16 rows": case(16, 896, 896, 4864, 1152, (7, 8, 7, 7)),
}
CASES |= {
    f"8B in fp8, {rows} rows{', last' if qkv == 0 else ''}": case(rows, 4096, 4096, 12288, qkv, (2, 2, 4, 8), "fp8e4nv")
    for rows, qkv in ((16, 6144), (128, 6144), (16, 0))
}
