"""Time the GEMMs of a target in FP8, by our kernels and by cuBLAS, beside bf16: what is chosen above 128 rows.

    python scripts/bench/fp8_blocks.py --rows 128 256 512 2048 8192 --output fp8_blocks.json

The matrices of a few layers take turns in one CUDA graph, so that weights come from memory and not from L2; rows are
quantized, and SwiGLU computed, inside what is timed. Microseconds of a layer's GEMM, TFLOP/s, and how far cuBLAS's
product is from ours.
"""

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dflash_toolkit.benchmark import captured, setting
from dflash_toolkit.files import write_json
from dflash_toolkit.kernels.triton import fp8, fp8_blocks, linear
from dflash_toolkit.kernels.weight import BlockScaledFp8
from dflash_toolkit.models.spec import ModelSpec
from dflash_toolkit.runtime.shapes import named_shape
from dflash_toolkit.runtime.timing import median_seconds

REPEATS = 20
Multiply = Callable[[Tensor, Any], Tensor]


def with_swiglu(multiply: Multiply, x: Tensor, weight: Any, halves: bool = True) -> Tensor:
    return linear.swiglu(multiply(x, weight), halves)


def ways(swiglu: bool) -> dict[str, Multiply]:
    """What computes the product of rows and a matrix in blocks, by rows, and in bf16, whose gates and ups alternate."""
    blocks, rows, dense = fp8_blocks.scaled_linear, fp8.scaled_linear, F.linear
    ours = fp8_blocks.linear_swiglu if swiglu else fp8_blocks.linear
    behind: Callable[..., Multiply] = partial(partial, with_swiglu) if swiglu else lambda multiply, **_: multiply
    return {
        "blocks, ours": ours,
        "blocks, cuBLAS": behind(blocks),
        "by rows, ours": ours,
        "by rows, cuBLAS": behind(rows),
        "bf16, cuBLAS": behind(dense, halves=False),
    }


def each(multiply: Multiply, x: Tensor, weights: Sequence[Any]) -> None:
    for weight in weights:
        multiply(x, weight)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3-8b")
    parser.add_argument("--rows", type=int, nargs="+", default=[128, 256, 512, 2048, 8192])
    parser.add_argument("--layers", type=int, default=4, help="whose matrices take turns")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    spec = ModelSpec.of_target(named_shape(args.shape))
    mixer = spec.layers[0].mixer
    d, ffn, width = spec.hidden_size, spec.layers[0].ffn.intermediate_size, mixer.num_heads * mixer.head_dim
    shapes = {"qkv": (mixer.qkv_rows, d), "o": (d, width), "gate_up": (2 * ffn, d), "down": (d, ffn)}
    device, found = torch.device("cuda"), []
    for name, (n, k) in shapes.items():
        dense = [torch.randn(n, k, device=device, dtype=torch.bfloat16) / k**0.5 for _ in range(args.layers)]
        weights: dict[str, list[Any]] = {
            "blocks": [BlockScaledFp8.of(matrix) for matrix in dense],
            "by rows": [BlockScaledFp8.of(matrix, by_rows=True) for matrix in dense],
            "bf16": dense,
        }
        for rows in args.rows:
            x = torch.randn(rows, k, device=device, dtype=torch.bfloat16)
            row: dict[str, Any] = {"gemm": name, "n": n, "k": k, "rows": rows}
            results: dict[str, Tensor] = {}
            for way, multiply in ways(name == "gate_up").items():
                matrices = weights[way.split(",")[0]]
                results[way] = multiply(x, matrices[0])
                seconds = median_seconds(captured(each, multiply, x, matrices).replay, device, REPEATS) / args.layers
                row[way] = {"us": 1e6 * seconds, "tflops": 2e-12 * rows * n * k / seconds}
            for form in ("blocks", "by rows"):
                a, b = results[f"{form}, ours"].double(), results[f"{form}, cuBLAS"].double()
                row[form] = {"difference": float((a - b).norm() / a.norm())}
            found.append(row)
            taken = ", ".join(f"{way} {t['us']:.0f} us {t['tflops']:.0f}" for way, t in row.items() if "," in way)
            apart = ", ".join(f"{row[form]['difference']:.1e}" for form in ("blocks", "by rows"))
            print(f"{name} [{n}, {k}], {rows} rows: {taken} TFLOP/s; apart {apart}", flush=True)
    totals = {
        rows: {way: sum(row[way]["us"] for row in found if row["rows"] == rows) for way in ways(False)}
        for rows in args.rows
    }
    print(f"\n{'us of all four':>16} " + " ".join(f"{way:>16}" for way in ways(False)))
    for rows, us in totals.items():
        print(f"{rows:>16} " + " ".join(f"{us[way]:16.0f}" for way in us))
    if args.output:
        result = {**setting("bench/fp8_blocks.py"), "shape": args.shape, "layers": args.layers}
        write_json(args.output, {**result, "gemms": found, "layer_us": totals})


if __name__ == "__main__":
    main()
