"""Time a draft layer's GEMMs and the draft's head in fp8 beside bf16: what `--draft-dtype fp8` is made of.

    python scripts/bench/fp8.py --rows 16 64 128 192 224 256 --output fp8.json

Chains of layers run as one CUDA graph, so that weights come from memory and not from L2. Microseconds, of a layer
behind its attention (GEMMs, norms, SwiGLU) and of the head with its argmax.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dflash_toolkit.benchmark import captured, setting
from dflash_toolkit.files import write_json
from dflash_toolkit.kernels import gpu
from dflash_toolkit.kernels.launch import MAX_ROWS
from dflash_toolkit.kernels.triton import linear
from dflash_toolkit.kernels.triton.fp8 import scaled_linear
from dflash_toolkit.kernels.weight import RowScaledFp8, Weight
from dflash_toolkit.models.spec import ModelSpec
from dflash_toolkit.runtime.shapes import named_shape
from dflash_toolkit.runtime.timing import median_seconds

EPS = 1e-6
REPEATS = 20


def chain(layers: list[list[Weight]], norm: Tensor, x: Tensor, a: Tensor) -> None:
    for o, gate_up, down, qkv in layers:
        if gpu.fuses_post_attention(x, [o, gate_up, down, qkv]):
            x, _, _ = gpu.fused_post_attention(x, a, o, norm, gate_up, down, norm, qkv, EPS)
            continue
        x, h = gpu.add_rms_norm(x, gpu.linear_split_k(a, o), norm, EPS)
        x, h = gpu.add_rms_norm(x, gpu.linear_split_k(gpu.linear_swiglu(h, gate_up), down), norm, EPS)
        gpu.linear_split_k(h, qkv)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3-8b")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 32, 64, 128, 160, 192, 224, 256])
    parser.add_argument("--layers", type=int, default=5, help="of the chain")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    spec = ModelSpec.of_target(named_shape(args.shape))
    mixer = spec.layers[0].mixer
    d, ffn, width = spec.hidden_size, spec.layers[0].ffn.intermediate_size, mixer.num_heads * mixer.head_dim
    device, dtype = torch.device("cuda"), torch.bfloat16

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, dtype=dtype)

    shapes = ((d, width), (2 * ffn, d), (d, ffn), (mixer.qkv_rows, d))
    layers: list[list[Weight]] = [[0.02 * random(*shape) for shape in shapes] for _ in range(args.layers)]
    quantized: list[list[Weight]] = [[RowScaledFp8.of(w) for w in layer if isinstance(w, Tensor)] for layer in layers]
    head, norm = 0.02 * random(spec.vocab_size, d), torch.ones(d, device=device, dtype=dtype)
    rounded_head = RowScaledFp8.of(head)

    def us_of(work: Callable[..., Any], *args: Any) -> float:
        return 1e6 * median_seconds(captured(work, *args).replay, device, REPEATS)

    found: list[dict[str, Any]] = []
    for rows in args.rows:
        x, a = random(rows, d), random(rows, width)
        row: dict[str, Any] = {
            "rows": rows,
            "layer_bf16_us": us_of(chain, layers, norm, x, a) / args.layers,
            "layer_fp8_us": us_of(chain, quantized, norm, x, a) / args.layers,
            "head_bf16_us": us_of(gpu.linear_argmax, x, head),
            "head_fp8_us": us_of(gpu.linear_argmax, x, rounded_head),
        }
        if rows <= MAX_ROWS:
            tile = linear.tile_for("argmax", len(head), d, rows, eight_bits=True)
            row["head_fp8_widened_us"] = us_of(linear.launch_argmax, x, rounded_head, tile)
        row["head_fp8_cublas_us"] = us_of(lambda x: scaled_linear(x, rounded_head).argmax(-1), x)
        found.append(row)
        print(", ".join(f"{name} {value:.0f}" for name, value in row.items()), flush=True)
    if args.output:
        write_json(args.output, {**setting("bench/fp8.py"), "shape": args.shape, "layers": args.layers, "rows": found})


if __name__ == "__main__":
    main()
