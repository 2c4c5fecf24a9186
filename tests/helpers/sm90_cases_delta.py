"""The gated delta nets of a Qwen3.6-27B step: 16 heads of keys, 48 of values, 128 wide; blocks of 8."""

from typing import Any

from sm90 import Case, case

from dflash_toolkit.kernels.triton import delta, delta_chunk


def gated_norm(quantized: bool) -> Case:
    return case(delta._gated_rms_norm_kernel, HEADS=8, BLOCK=128, QUANTIZE=quantized)


def inputs(rows: int, chains: bool) -> Case:
    sizes: dict[str, Any] = {"PARTS": 8, "TAPS": 4, "ROWS": rows, "BLOCK": delta.CHANNELS, "HEADS": 64}
    return case(delta._delta_inputs_kernel, CHAINS=chains, **sizes)


def rule(warps: int = 1, **how: bool) -> Case:
    sizes: dict[str, Any] = {"BLOCK_K": 128, "BLOCK_V": delta.COLUMNS, "CHUNK": False, "CHAINS": False}
    return case(delta._delta_rule_kernel, warps, kinds=STATE, **(sizes | how))


STATE = {"state_p": "*fp32"}
CASES = {
    "gated norm": gated_norm(False),
    "gated norm, quantized": gated_norm(True),
    "inputs of the rule": inputs(16, False),
    "the rule": rule(),
    "inputs of the rule, of chains": inputs(32, True),
    "the rule over chains": rule(CHAINS=True),
    "the rule over a prompt": rule(2, CHUNK=True),
    "inputs of a prompt": case(
        delta_chunk._chunk_inputs_kernel, PARTS=8, TAPS=4, ROWS=delta_chunk.ROWS, BLOCK=128, HEADS=64
    ),
    "triangles of a prompt": case(delta_chunk._chunk_solve_kernel, BLOCK_K=128, BLOCK_V=128),
    "the rule in chunks": case(
        delta_chunk._chunk_rule_kernel, 8, 2, kinds=STATE, BLOCK_K=128, BLOCK_V=delta_chunk.COLUMNS
    ),
}
