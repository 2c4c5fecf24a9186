"""Time the persistent layer kernel by itself, and show where its time goes: what each phase takes and who waits.

    python scripts/bench_layer.py --rows 1 16 64 128 --output layer.json

A chain of layers runs as one CUDA graph, so that weights come from memory and not from L2. Microseconds a layer are
measured without stamps. The trace has the time at which every program (one a multiprocessor) ended each phase: `took`
is shown as the mean and the most over programs, `idle` is how long the mean program waited at the barrier behind it.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dflash_toolkit.benchmark import setting
from dflash_toolkit.files import write_json
from dflash_toolkit.kernels.layer import PHASES, launch_layer
from dflash_toolkit.runtime.model import ModelSpec
from dflash_toolkit.runtime.shapes import named_shape
from dflash_toolkit.runtime.speed import median_seconds

EPS = 1e-6
REPEATS = 20


def chain(layers: list[list[Tensor]], norm: Tensor, x: Tensor, a: Tensor, traces: list[Tensor | None]) -> None:
    for (o, gate_up, down, qkv), trace in zip(layers, traces, strict=True):
        x, _, _ = launch_layer(x, a, o, norm, gate_up, down, norm, qkv, EPS, trace=trace)


def captured(layers: list[list[Tensor]], norm: Tensor, x: Tensor, a: Tensor, traces: list[Tensor | None]) -> Any:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        chain(layers, norm, x, a, traces)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain(layers, norm, x, a, traces)
    return graph


def phases(traces: Tensor) -> list[dict[str, Any]]:
    """What each phase took, from stamps [layers, programs, PHASES] in ns; the first layers are a warm-up."""
    stamps = traces[2:].double() / 1e3
    rows = []
    for i, name in enumerate(PHASES):
        if name == "barrier":
            continue
        began = stamps[:, :, i - 1] if i else stamps[:, :, 0].amin(1, keepdim=True).expand(-1, stamps.shape[1])
        took = stamps[:, :, i] - began
        last = stamps[:, :, i].amax(1, keepdim=True)
        rows.append(
            {
                "phase": name,
                "took_mean_us": took.mean().item(),
                "took_max_us": took.amax(1).mean().item(),
                "idle_mean_us": (last - stamps[:, :, i]).mean().item(),  # until the last program is there
            }
        )
        if i + 1 < len(PHASES) and PHASES[i + 1] == "barrier":
            rows[-1]["barrier_us"] = (stamps[:, :, i + 1].amin(1, keepdim=True) - last).mean().item()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3-8b")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64, 128])
    parser.add_argument("--layers", type=int, default=12, help="of the chain")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    spec = ModelSpec.of_target(named_shape(args.shape))
    d, ffn, width = spec.hidden_size, spec.intermediate_size, spec.num_heads * spec.head_dim
    qkv = width + 2 * spec.num_kv_heads * spec.head_dim
    device, dtype = torch.device("cuda"), torch.bfloat16

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, dtype=dtype)

    layers = [[0.02 * random(*s) for s in ((d, width), (2 * ffn, d), (d, ffn), (qkv, d))] for _ in range(args.layers)]
    read = sum(w.nbytes for w in layers[0])
    norm = torch.ones(d, device=device, dtype=dtype)
    programs = torch.cuda.get_device_properties(device).multi_processor_count
    result: dict[str, Any] = {
        **setting("bench_layer.py"),
        "shape": args.shape,
        "rows": [],
    }
    for rows in args.rows:
        x, a = random(rows, d), random(rows, width)
        chained = captured(layers, norm, x, a, [None] * args.layers)
        chained.replay()
        us = 1e6 * median_seconds(chained.replay, device, REPEATS) / args.layers
        traces = torch.zeros(args.layers, programs, len(PHASES), device=device, dtype=torch.int64)
        graph = captured(layers, norm, x, a, list(traces))
        for _ in range(3):
            graph.replay()
        torch.cuda.synchronize()
        found = phases(traces)
        result["rows"].append({"rows": rows, "us": us, "tb_s": read / us / 1e6, "phases": found})
        print(f"{rows} rows: {us:.1f} us a layer, {read / us / 1e6:.2f} TB/s of weights")
        for row in found:
            values = ", ".join(
                f"{name.removesuffix('_us')} {value:.1f}" for name, value in row.items() if name != "phase"
            )
            print(f"    {row['phase']}: {values}")
    if args.output:
        write_json(args.output, result)


if __name__ == "__main__":
    main()
