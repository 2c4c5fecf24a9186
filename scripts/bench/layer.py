"""Time the persistent layer kernel by itself, and show where its time goes: what each phase takes and who waits.

    python scripts/bench/layer.py --rows 1 16 64 128 --output layer.json

A chain of layers runs as one CUDA graph, so that weights come from memory and not from L2. Microseconds a layer are
measured without stamps, and beside them those of the same layer with cuBLAS's GEMMs between the runtime's norms; so
too the head and its argmax. `cublas_padded_us` is cuBLAS with as many rows as kernels here take at most, so that sums
do not depend on the rows; `separate_us` is a launch for every GEMM and norm, which the runtime takes where the kernel
does not fit (--dtype float16 or float32, shapes like smollm2). The trace has the time at which every program (one a
multiprocessor) ended each phase: `took` is shown as the mean and the most over programs, `idle` is how long the mean
one waited at the barrier behind. More rows than the kernels take have cuBLAS's time alone, but for the head of up to
256, which is timed by tiles too.
"""

import argparse
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

from dflash_toolkit.benchmark import captured, setting
from dflash_toolkit.files import write_json
from dflash_toolkit.kernels import gpu
from dflash_toolkit.kernels.hopper.layer import PHASES, launch_layer
from dflash_toolkit.kernels.launch import MAX_ROWS
from dflash_toolkit.kernels.triton import linear
from dflash_toolkit.models.spec import ModelSpec
from dflash_toolkit.runtime.shapes import named_shape
from dflash_toolkit.runtime.timing import median_seconds

EPS = 1e-6
REPEATS = 20
WIDE_TILE = linear.Tile(128, 64, 4, 8)  # of a head for up to 256 rows: of a sweep the fastest


def chain(layers: list[list[Tensor]], norm: Tensor, x: Tensor, a: Tensor, traces: list[Tensor | None]) -> None:
    for (o, gate_up, down, qkv), trace in zip(layers, traces, strict=True):
        x, _, _ = launch_layer(x, a, o, norm, gate_up, down, norm, qkv, EPS, trace=trace)


def separate(layers: list[list[Tensor]], norm: Tensor, x: Tensor, a: Tensor) -> None:
    """A launch for every GEMM and norm, as the runtime has it where the persistent kernel does not fit."""
    for o, gate_up, down, qkv in layers:
        x, h = gpu.add_rms_norm(x, gpu.linear_split_k(a, o), norm, EPS)
        x, h = gpu.add_rms_norm(x, gpu.linear_split_k(gpu.linear_swiglu(h, gate_up), down), norm, EPS)
        gpu.linear_split_k(h, qkv)


def by_cublas(layers: list[list[Tensor]], norm: Tensor, x: Tensor, a: Tensor, least_rows: int = 0) -> None:
    def padded(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        missing = least_rows - len(x)
        return F.linear(F.pad(x, (0, 0, 0, missing)) if missing > 0 else x, weight, bias)[: len(x)]

    with patch.object(gpu, "MAX_ROWS", 0), patch.object(gpu, "_cublas_linear", padded):
        separate(layers, norm, x, a)


def head_of_cublas(x: Tensor, head: Tensor) -> None:
    F.linear(x, head).argmax(-1)


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
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 16, 32, 64, 96, 128, 160, 256])
    parser.add_argument("--layers", type=int, default=12, help="of the chain")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    spec = ModelSpec.of_target(named_shape(args.shape))
    mixer = spec.layers[0].mixer
    d, ffn, width = spec.hidden_size, spec.layers[0].ffn.intermediate_size, mixer.num_heads * mixer.head_dim
    qkv = mixer.qkv_rows
    device, dtype = torch.device("cuda"), getattr(torch, args.dtype)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, dtype=dtype)

    layers = [[0.02 * random(*s) for s in ((d, width), (2 * ffn, d), (d, ffn), (qkv, d))] for _ in range(args.layers)]
    read = sum(w.nbytes for w in layers[0])
    head = 0.02 * random(spec.vocab_size, d)
    norm = torch.ones(d, device=device, dtype=dtype)
    programs = torch.cuda.get_device_properties(device).multi_processor_count
    result: dict[str, Any] = {
        **setting("bench/layer.py"),
        "shape": args.shape,
        "dtype": args.dtype,
        "rows": [],
    }

    def us_of(graph: torch.cuda.CUDAGraph) -> float:
        return 1e6 * median_seconds(graph.replay, device, REPEATS)

    for rows in args.rows:
        x, a = random(rows, d), random(rows, width)
        row: dict[str, Any] = {
            "rows": rows,
            "cublas_us": us_of(captured(by_cublas, layers, norm, x, a)) / args.layers,
            "cublas_padded_us": us_of(captured(by_cublas, layers, norm, x, a, MAX_ROWS)) / args.layers,
            "head_cublas_us": us_of(captured(head_of_cublas, x, head)),
        }
        result["rows"].append(row)
        print(f"{rows} rows: cuBLAS {row['cublas_us']:.1f} us a layer and {row['head_cublas_us']:.1f} the head")
        if rows > MAX_ROWS:
            if rows <= 2 * MAX_ROWS:
                row["head_tiles_us"] = us_of(captured(linear.launch_argmax, x, head, WIDE_TILE))
                print(f"    the head by tiles {row['head_tiles_us']:.1f} us")
            continue
        row["separate_us"] = us_of(captured(separate, layers, norm, x, a)) / args.layers
        row["head_us"] = us_of(captured(gpu.linear_argmax, x, head))
        if not gpu.fuses_post_attention(x, layers[0]):
            print(f"    here, separate launches: {row['separate_us']:.1f} us a layer and {row['head_us']:.1f} the head")
            continue
        us = us_of(captured(chain, layers, norm, x, a, [None] * args.layers)) / args.layers
        traces = torch.zeros(args.layers, programs, len(PHASES), device=device, dtype=torch.int64)
        graph = captured(chain, layers, norm, x, a, list(traces))
        for _ in range(3):
            graph.replay()
        torch.cuda.synchronize()
        found = phases(traces)
        row |= {"us": us, "tb_s": read / us / 1e6, "phases": found}
        print(f"    here {us:.1f} us a layer, {read / us / 1e6:.2f} TB/s of weights, and {row['head_us']:.1f} the head")
        for phase in found:
            values = ", ".join(
                f"{name.removesuffix('_us')} {value:.1f}" for name, value in phase.items() if name != "phase"
            )
            print(f"    {phase['phase']}: {values}")
    if args.output:
        write_json(args.output, result)


if __name__ == "__main__":
    main()
