"""The persistent layer kernel for Qwen3-8B and Qwen2.5-0.5B, in all its paddings."""

from sm90 import Case
from triton.experimental.gluon import language as gl

from dflash_toolkit.kernels import layer

BLOCKS = (layer.BLOCK_N, layer.BLOCK_K)


def descriptor(rows: int) -> str:
    layout = gl.NVMMASharedLayout.get_default_for([rows, layer.BLOCK_K], gl.bfloat16)
    return f"tensordesc<bf16[{rows}, {layer.BLOCK_K}],{layout!r}>"


def case(rows: int, d: int, width: int, ffn: int, qkv: int, splits: tuple[int, int, int]) -> Case:
    kinds = {name: descriptor(layer.BLOCK_N) for name in ("o_d", "gate_up_d", "down_d", "qkv_d")}
    kinds |= {name: descriptor(rows) for name in ("a_d", "h_d", "act_d")}
    kinds |= {name: "*bf16" for name in layer.layer_kernel.arg_names if name.endswith("_p")}
    kinds |= {"part_p": "*fp32", "qkv_p": "*fp32", "sync_p": "*i32", "M": "i32", "stride_tap": "i32", "eps": "fp32"}
    constexprs = {
        "D": d, "A": width, "FFN": ffn, "QKV": qkv, "O_SPLITS": splits[0], "DOWN_SPLITS": splits[1],
        "QKV_SPLITS": splits[2], "BLOCK_D": layer.next_power_of_two(d), "T": rows, "STAGES": layer.stages_of(rows),
        "BLOCK_N": layer.BLOCK_N, "BLOCK_K": layer.BLOCK_K, "TAP": True, "BARRIERS": layer.BARRIERS, "PHASES": 0,
    }  # fmt: skip
    return Case(layer.layer_kernel, kinds, constexprs, 4, 3, ("M",))


CASES = {
    f"8B, {rows} rows{', last' if qkv == 0 else ''}": case(rows, 4096, 4096, 12288, qkv, (2, 2, 4))
    for rows, qkv in ((16, 6144), (32, 6144), (64, 6144), (128, 6144), (128, 0))
} | {"0.5B, 16 rows": case(16, 896, 896, 4864, 1152, (7, 2, 7))}
