"""The gated delta nets of a Qwen3.6-27B step: 16 heads of keys, 48 of values, 128 wide; blocks of 8."""

from sm90 import Case

from dflash_toolkit.kernels.triton import delta, delta_chunk

SIZES = dict.fromkeys(
    ("S", "MOST", "C", "M", "N", "G", "H", "H_K", "H_V", "stride_qkv", "stride_ba", "stride_part", "stride_gate",
     "gates_stride", "blocks"), "i32",
)  # fmt: skip
FP32 = dict.fromkeys(
    ("ba_p", "scale_p", "a_log_p", "gates_p", "out_gates_p", "state_p", "decay_p"), "*fp32"
) | dict.fromkeys(("scale", "eps"), "fp32")
WHERE = dict.fromkeys(("slots_p", "stay_p", "starts_p", "counts_p"), "*i32")


def case(kernel: object, warps: int = 4, stages: int = 3, **constexprs: object) -> Case:
    constexprs["PDL"] = True
    names = [name for name in kernel.arg_names if name not in constexprs]
    kinds = {name: (FP32 | WHERE | SIZES | {"data_p": "*fp8e4nv"}).get(name, "*bf16") for name in names}
    return Case(kernel, kinds, constexprs, warps, stages, ragged=tuple(n for n in ("S", "M", "blocks") if n in names))


CASES = {
    f"gated norm{', quantized' * quantized}": case(
        delta._gated_rms_norm_kernel, HEADS=8, BLOCK=128, QUANTIZE=quantized, FP8_MAX=448.0, LEAST=1e-12
    ) for quantized in (False, True)
} | {
    "inputs of the rule": case(
        delta._delta_inputs_kernel, PARTS=8, TAPS=4, ROWS=16, BLOCK=delta.CHANNELS, HEADS=64, CHAINS=False
    ),
    "the rule": case(delta._delta_rule_kernel, 1, BLOCK_K=128, BLOCK_V=delta.COLUMNS, CHUNK=False, CHAINS=False),
    "inputs of the rule, of chains": case(
        delta._delta_inputs_kernel, PARTS=8, TAPS=4, ROWS=32, BLOCK=delta.CHANNELS, HEADS=64, CHAINS=True
    ),
    "the rule over chains": case(
        delta._delta_rule_kernel, 1, BLOCK_K=128, BLOCK_V=delta.COLUMNS, CHUNK=False, CHAINS=True
    ),
    "the rule over a prompt": case(
        delta._delta_rule_kernel, 2, BLOCK_K=128, BLOCK_V=delta.COLUMNS, CHUNK=True, CHAINS=False
    ),
    "inputs of a prompt": case(
        delta_chunk._chunk_inputs_kernel, PARTS=8, TAPS=4, ROWS=delta_chunk.ROWS, BLOCK=128, HEADS=64
    ),
    "triangles of a prompt": case(delta_chunk._chunk_solve_kernel, BLOCK_K=128, BLOCK_V=128),
    "the rule in chunks": case(delta_chunk._chunk_rule_kernel, 8, 2, BLOCK_K=128, BLOCK_V=delta_chunk.COLUMNS),
}  # fmt: skip
