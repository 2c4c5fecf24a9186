"""Time the attention of a prompt over pages: this project's kernel, PyTorch's, and FlashAttention-3 if there is one.

    python scripts/bench/prefill.py --output prefill.json

Device time, each captured as a graph. PyTorch's wants keys and values in one piece, so its time includes gathering the
pages; FlashAttention-3 (`flash_attn_interface`) reads them itself.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from dflash_toolkit.benchmark import setting
from dflash_toolkit.files import write_json
from dflash_toolkit.kernels import flash
from dflash_toolkit.kernels.triton.attention import block_attention
from dflash_toolkit.runtime.shapes import named_shape
from dflash_toolkit.runtime.timing import median_seconds
from dflash_toolkit.runtime.weights import ModelSpec

PAGE = 64  # tokens
REPEATS = 20
TIMES = 10  # in a graph
CHUNKS = (
    (0, 128),
    (0, 512),
    (0, 1024),
    (0, 2048),
    (2048, 512),
    (2048, 2048),
    (14336, 512),
    (14336, 2048),
)  # tokens before, tokens of the chunk


def gathered(cache: Tensor, pages: Tensor, length: int) -> Tensor:
    """Keys and values of a request in one piece, [2, length, G, H]."""
    slots = (pages.long()[:, None] * PAGE + torch.arange(PAGE, device=pages.device)).flatten()[:length]
    return cache.index_select(1, slots)


def measure(spec: ModelSpec, before: int, chunk: int) -> dict[str, Any]:
    """Microseconds of each way, and how far the others are from this project's."""
    device, dtype = torch.device("cuda"), torch.bfloat16
    length = before + chunk
    count = -(-length // PAGE)
    cache = torch.randn(2, (count + 1) * PAGE, spec.num_kv_heads, spec.head_dim, device=device, dtype=dtype)
    table = 1 + torch.randperm(count, device=device, dtype=torch.int32)[None]
    q = torch.randn(chunk, spec.num_heads, spec.head_dim, device=device, dtype=dtype)
    lengths = torch.tensor([before], device=device, dtype=torch.int32)

    def ours() -> Tensor:
        return block_attention(q, cache, lengths, table, PAGE, causal=True)

    def torchs() -> Tensor:
        k, v = gathered(cache, table[0], length).transpose(1, 2).unbind()
        mask = causal_lower_right(chunk, length)
        out = F.scaled_dot_product_attention(q.transpose(0, 1)[None], k[None], v[None], attn_mask=mask, enable_gqa=True)
        return out[0].transpose(0, 1).flatten(1)

    ways = {"ours": ours, "torch": torchs}
    if flash.with_pages():
        ways["flash_attn_3"] = lambda: flash.launch(q, cache, lengths, table, PAGE)
    flops = 4 * spec.num_heads * spec.head_dim * (chunk * before + chunk * (chunk + 1) / 2)
    row: dict[str, Any] = {"before": before, "chunk": chunk}
    for name, way in ways.items():
        row[f"{name}_difference"] = (way().float() - ours().float()).abs().max().item()  # and warms up
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(TIMES):
                way()
        us = 1e6 * median_seconds(graph.replay, device, REPEATS) / TIMES
        row |= {f"{name}_us": us, f"{name}_tflops": flops / us / 1e6}
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3-8b")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    spec = ModelSpec.of_target(named_shape(args.shape))
    torch.manual_seed(0)
    result: dict[str, Any] = {
        **setting("bench/prefill.py"),
        "shape": args.shape,
        "rows": [],
    }
    with torch.inference_mode():
        for before, chunk in CHUNKS:
            row = measure(spec, before, chunk)
            result["rows"].append(row)
            print(json.dumps({k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}), flush=True)
    if args.output:
        write_json(args.output, result)


if __name__ == "__main__":
    main()
