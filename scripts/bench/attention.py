"""Time the attention of a block over its pages: the Triton kernel, and the one for Hopper GPUs.

    python scripts/bench/attention.py --output attention.json

A CUDA graph of layers with caches of their own, merge of the splits included; microseconds a layer. A graph is made for
whatever context its requests may grow to: --limit, which the page table has room for. Where keys are split, the latter
kernel is also timed with every program taking one split, and two.
"""

import argparse
import itertools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dflash_toolkit.benchmark import setting
from dflash_toolkit.files import write_json
from dflash_toolkit.kernels import gpu
from dflash_toolkit.kernels.hopper import attention as attention_hopper
from dflash_toolkit.kernels.launch import keys_are_split
from dflash_toolkit.kernels.triton import attention
from dflash_toolkit.models.spec import AttentionSpec, ModelSpec
from dflash_toolkit.runtime.shapes import named_shape
from dflash_toolkit.runtime.timing import median_seconds

PAGE = 64  # tokens
LAYERS, REPEATS = 12, 30
CASES = (
    (1, 1, 512), (1, 16, 512), (1, 16, 16384), (2, 16, 512), (4, 16, 512), (8, 16, 512), (8, 1, 512), (8, 16, 4096),
    (16, 8, 700), (32, 8, 700), (64, 4, 700),
)  # fmt: skip
fits_hopper, FEW = attention_hopper.fits, attention.FEW
ALWAYS = 1 << 20  # as FEW: a program takes two splits however few there are


def measure(mixer: AttentionSpec, batch: int, block: int, context: int, limit: int, *, causal: bool) -> dict[str, Any]:
    """Microseconds a layer of each way, and how far the outputs of both kernels are apart."""
    device, dtype = torch.device("cuda"), torch.bfloat16
    pages = -(-(context + block) // PAGE)
    table = torch.zeros(batch, max(pages, -(-limit // PAGE)), device=device, dtype=torch.int32)
    table[:, :pages] = torch.randperm(batch * pages, device=device, dtype=torch.int32).view(batch, pages)
    lengths = torch.full((batch,), context, dtype=torch.int32, device=device)
    shape = (2, batch * pages * PAGE, mixer.num_kv_heads, mixer.head_dim)
    caches = [torch.randn(shape, device=device, dtype=dtype) for _ in range(LAYERS)]
    q = torch.randn(batch * block, mixer.num_heads, mixer.head_dim, device=device, dtype=dtype)
    read = 2 * batch * (context + block) * mixer.num_kv_heads * mixer.head_dim * dtype.itemsize

    def layers() -> list[Tensor]:
        return [gpu.block_attention(q, cache, lengths, table, PAGE, causal=causal) for cache in caches]

    row: dict[str, Any] = {"batch": batch, "block": block, "context": context, "limit": limit, "causal": causal}
    outputs = []
    ways = {"triton": (False, FEW), "hopper": (True, FEW)}
    if keys_are_split(batch * block, batch):
        ways |= {"hopper_split": (True, 0), "hopper_in_pairs": (True, ALWAYS)}
    for name, (hopper, few) in ways.items():
        attention_hopper.fits, attention.FEW = fits_hopper if hopper else lambda *_: False, few
        outputs.append(torch.stack(layers()))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            layers()
        us = 1e6 * median_seconds(graph.replay, device, REPEATS) / LAYERS
        row |= {f"{name}_us": us, f"{name}_tb_s": read / us / 1e6}
    return row | {"largest_difference": (outputs[0].float() - outputs[1].float()).abs().max().item()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3-8b")
    parser.add_argument("--limit", type=int, nargs="+", default=[8192], help="tokens that a request may grow to")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    mixer = ModelSpec.of_target(named_shape(args.shape)).layers[0].mixer
    rows = []
    for limit, causal, case in itertools.product(args.limit, (True, False), CASES):
        rows.append(measure(mixer, *case, limit, causal=causal))
        print(rows[-1], flush=True)
    if args.output:
        write_json(args.output, {**setting("bench/attention.py"), "shape": args.shape, "layers": LAYERS, "rows": rows})


if __name__ == "__main__":
    main()
