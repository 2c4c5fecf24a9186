"""Time the gated delta nets of a step by shape: convolution, rule with its replay, and norm; and those of a prompt.

    python scripts/bench/delta.py --batch 1 8 32 --block 1 8 --output delta.json
    python scripts/bench/delta.py --batch --prompt 512 2048 8192 --output delta_prompt.json

A step's shape is that of one layer of Qwen3.6-27B. Every call has memory of its own layer, so that states come from
memory and not from L2, and replays as many rows as it has new ones. `state_us` is what reading and writing the states
takes at the device's bandwidth. A prompt's rows go one after another (`rows`) or in chunks: by our kernels
(`triton`), and by flash-linear-attention where it is installed (`fla`). `inputs` is what is common to both of these.
Microseconds a layer.
"""

import argparse
from pathlib import Path
from typing import Any

import torch

from dflash_toolkit.benchmark import captured, setting
from dflash_toolkit.files import write_json
from dflash_toolkit.kernels import fla, gpu
from dflash_toolkit.kernels.delta import DeltaMemory
from dflash_toolkit.kernels.triton import delta, delta_chunk
from dflash_toolkit.runtime.timing import median_seconds

GROUPS, HEADS, WIDTH, TAPS, LAYERS = 16, 48, 128, 4, 48
CHANNELS = (2 * GROUPS + HEADS) * WIDTH
REPEATS = 10
DEVICE, DTYPE = torch.device("cuda"), torch.bfloat16
HEADS_OF = {"qwen3.8-27b": 48, "qwen3.6-35b-a3b": 32}


def layer_times(batch: int, block: int, read_tb_s: float) -> dict[str, float]:
    """Of a layer's kernels, each run for all layers in one CUDA graph."""
    memories = [
        DeltaMemory.empty(batch, block, TAPS, CHANNELS, HEADS, (WIDTH, WIDTH), DTYPE, DEVICE) for _ in range(LAYERS)
    ]
    for memory in memories:
        for part in (memory.state, memory.window, memory.inputs):
            part.normal_()
        memory.gates.uniform_(0, 1)
    wide = torch.randn(batch * block, CHANNELS + HEADS * WIDTH, device=DEVICE, dtype=DTYPE)
    qkv, gate = wide.split([CHANNELS, HEADS * WIDTH], dim=1)
    ba = torch.randn(8, batch * block, 2 * HEADS, device=DEVICE)
    weight = torch.randn(CHANNELS, TAPS, device=DEVICE, dtype=DTYPE)
    a_log, dt_bias = torch.randn(2, HEADS, device=DEVICE)
    norm = torch.randn(WIDTH, device=DEVICE, dtype=DTYPE)
    slots = torch.arange(batch, dtype=torch.int32, device=DEVICE)
    rows = torch.full((batch,), block, dtype=torch.int32, device=DEVICE)
    where = slots, rows, rows
    parts = gpu.delta_inputs(qkv, ba, weight, a_log, dt_bias, memories[0], *where)
    out = gpu.delta_rule(*parts, memories[0], *where)

    def inputs() -> None:
        for memory in memories:
            gpu.delta_inputs(qkv, ba, weight, a_log, dt_bias, memory, *where)

    def rule() -> None:
        for memory in memories:
            gpu.delta_rule(*parts, memory, *where)

    def normed() -> None:
        for _ in memories:
            gpu.gated_rms_norm(out, gate, norm, 1e-6)

    def whole() -> None:
        for memory in memories:
            mixed = gpu.delta_inputs(qkv, ba, weight, a_log, dt_bias, memory, *where)
            gpu.gated_rms_norm(gpu.delta_rule(*mixed, memory, *where), gate, norm, 1e-6)

    ways = {"inputs": inputs, "rule": rule, "norm": normed, "whole": whole}
    found = {
        f"{name}_us": 1e6 * median_seconds(captured(way).replay, DEVICE, REPEATS) / LAYERS for name, way in ways.items()
    }
    return found | {"state_us": 2 * memories[0].state.nbytes / read_tb_s / 1e6}


def prompt_times(shape: str, tokens: int) -> dict[str, float]:
    """Of the kernels of a layer over one prompt that is computed at once."""
    heads = HEADS_OF[shape]
    channels = (2 * GROUPS + heads) * WIDTH
    memory = DeltaMemory.empty(1, 1, TAPS, channels, heads, (WIDTH, WIDTH), DTYPE, DEVICE)
    qkv = torch.randn(tokens, channels, device=DEVICE, dtype=DTYPE)
    ba = torch.randn(1, tokens, 2 * heads, device=DEVICE, dtype=DTYPE)
    weight = torch.randn(channels, TAPS, device=DEVICE, dtype=DTYPE)
    a_log, dt_bias = torch.randn(2, heads, device=DEVICE)
    where = tuple(torch.tensor([each], dtype=torch.int32, device=DEVICE) for each in (0, 0, tokens))
    given = (qkv, ba, weight, a_log, dt_bias, memory, *where)
    parts = delta_chunk.chunk_inputs(*given)
    ways = {
        "rows": lambda: delta.delta_chunk(*given),
        "inputs": lambda: delta_chunk.chunk_inputs(*given),
        "triton": lambda: delta_chunk.delta_chunk(*given),
    }
    if fla.delta_rule() is not None:
        ways["fla"] = lambda: fla.chunk_rule(*delta_chunk.chunk_inputs(*given), memory.state, *where)
        ours, theirs = (rule(*parts, memory.state, *where) for rule in (delta_chunk.chunk_rule, fla.chunk_rule))
        assert (ours - theirs).float().norm() <= 0.02 * ours.float().norm(), "the ways differ"
    return {f"{name}_us": 1e6 * median_seconds(captured(way).replay, DEVICE, REPEATS) for name, way in ways.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 8, 32], help="of a step; none: no steps")
    parser.add_argument("--block", type=int, nargs="+", default=[1, 8], help="rows of a request, new ones and old ones")
    parser.add_argument("--prompt", type=int, nargs="*", default=[], help="tokens of a prompt")
    parser.add_argument("--read-tb-s", type=float, default=4.53, help="bandwidth; the default was measured on an H200")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    found: list[dict[str, Any]] = []
    for batch in args.batch:
        for block in args.block:
            found.append({"batch": batch, "block": block} | layer_times(batch, block, args.read_tb_s))
            print(", ".join(f"{name} {value:.1f}" for name, value in found[-1].items()), flush=True)
    prompts: list[dict[str, Any]] = []
    for shape in HEADS_OF:
        for tokens in args.prompt:
            prompts.append({"shape": shape, "tokens": tokens} | prompt_times(shape, tokens))
            print(", ".join(f"{k} {v:.1f}" if k.endswith("us") else f"{v}" for k, v in prompts[-1].items()), flush=True)
    if args.output:
        write_json(args.output, {**setting("bench/delta.py"), "layers": found, "prompts": prompts})


if __name__ == "__main__":
    main()
