"""Measures attention with the installed versions of FlashAttention, and without it.

    python scripts/bench/flash_attention.py --output flash_attention.json

Two uses: a chunk of a prompt over the pages of the cache (`prefill`), and a training row of packed documents
(`packed_row`). Times are microseconds of one layer on the device, the median of 20 graphs of ten. Prefill is
compared with this project's kernel and with PyTorch's `scaled_dot_product_attention`, which gathers the pages
first. Packed rows are compared with PyTorch's `varlen_attn` and, once, with a compiled `flex_attention`.
`difference` is the largest difference from the first implementation of the row.
"""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from dflash_toolkit.files import write_json
from dflash_toolkit.kernels import flash, gpu
from dflash_toolkit.kernels.paged import PagedKV
from dflash_toolkit.models import packed
from dflash_toolkit.models.spec import AttentionSpec, ModelSpec
from dflash_toolkit.runtime.timing import median_seconds

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository, for `scripts`

from scripts.measure import setting
from scripts.shapes import named_shape

SHAPES = ("qwen3-8b", "qwen2.5-0.5b")
PAGE = 64  # tokens
REPEATS = 20
TIMES = 10  # in a graph
CHUNKS = (
    (0, 128),
    (0, 512),
    (0, 1024),
    (0, 2048),
    (0, 8192),
    (2048, 512),
    (2048, 2048),
    (14336, 512),
    (14336, 2048),
    (24576, 8192),
)  # tokens before, tokens of the chunk
ROWS = ((32, 256), (16, 512), (8, 1024), (4, 2048))  # documents, tokens of each


def gathered(cache: Tensor, pages: Tensor, length: int) -> Tensor:
    """Keys and values of a request in one piece, [2, length, G, H]."""
    slots = (pages.long()[:, None] * PAGE + torch.arange(PAGE, device=pages.device)).flatten()[:length]
    return cache.index_select(1, slots)


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def prefill(mixer: AttentionSpec, before: int, chunk: int) -> dict[str, Any]:
    """One chunk of a prompt."""
    length = before + chunk
    count = -(-length // PAGE)
    cache = random(2, (count + 1) * PAGE, mixer.num_kv_heads, mixer.head_dim)
    table = 1 + torch.randperm(count, device="cuda", dtype=torch.int32)[None]
    q = random(chunk, mixer.num_heads, mixer.head_dim)
    kv = PagedKV(cache, torch.tensor([before], device="cuda", dtype=torch.int32), table, PAGE)

    def torchs() -> Tensor:
        k, v = gathered(cache, table[0], length).transpose(1, 2).unbind()
        mask = causal_lower_right(chunk, length)
        out = F.scaled_dot_product_attention(q.transpose(0, 1)[None], k[None], v[None], attn_mask=mask, enable_gqa=True)
        return out[0].transpose(0, 1).flatten(1)

    def ours() -> Tensor:
        return gpu.block_attention(q, kv, causal=True)

    def flashs() -> Tensor:
        return flash.launch(q, kv)

    ways = {"ours": with_version(None, ours), "torch": torchs}
    ways |= {name: with_version(version, flashs) for name, version in installed().items()}
    pairs = chunk * before + chunk * (chunk + 1) / 2
    return {"before": before, "chunk": chunk} | measure(ways, 4 * mixer.num_heads * mixer.head_dim * pairs)


def packed_row(mixer: AttentionSpec, documents: int, tokens: int) -> dict[str, Any]:
    """One row of equal documents."""
    total = documents * tokens
    q, k, v = (random(total, n, mixer.head_dim) for n in (mixer.num_heads, mixer.num_kv_heads, mixer.num_kv_heads))
    ends = torch.arange(0, total + 1, tokens, device="cuda", dtype=torch.int32)

    def attend() -> Tensor:
        return packed.flash(q, k, v, ends, tokens, None, None)

    mask = create_block_mask(
        lambda b, h, i, j: (i >= j) & (i // tokens == j // tokens), None, None, total, total, device="cuda"
    )
    compiled: Any = torch.compile(flex_attention, dynamic=False)

    def flex() -> Tensor:
        out = compiled(*(x.transpose(0, 1)[None] for x in (q, k, v)), block_mask=mask, enable_gqa=True)
        return out[0].transpose(0, 1)

    ways = {"torch": with_version(None, attend)}
    if tokens == 512:  # it is compiled for every shape
        ways["flex"] = flex
    ways |= {name: with_version(version, attend) for name, version in installed().items()}
    flops = 4 * mixer.num_heads * mixer.head_dim * documents * tokens * (tokens + 1) / 2
    return {"documents": documents, "tokens": tokens} | measure(ways, flops)


USES: dict[str, tuple[Callable[..., dict[str, Any]], Any]] = {
    "prefill": (prefill, CHUNKS),
    "packed_row": (packed_row, ROWS),
}


def installed() -> dict[str, flash.Flash]:
    found = {module: flash.load(module) for module in flash.VERSIONS}
    return {version.name: version for version in found.values() if version is not None}


def with_version(version: flash.Flash | None, way: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """`way` with this FlashAttention or none, whatever is installed."""

    def run() -> Tensor:
        with patch.object(flash, "installed", lambda _: version):
            return way()

    return run


def measure(ways: dict[str, Callable[[], Tensor]], flops: float) -> dict[str, Any]:
    """Microseconds of each way, and how far the others are from the first."""
    row: dict[str, Any] = {}
    first = next(iter(ways.values()))().float()
    for name, way in ways.items():
        row[f"{name} difference"] = (way().float() - first).abs().max().item()  # and warms up
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(TIMES):
                way()
        us = 1e6 * median_seconds(graph.replay, torch.device("cuda"), REPEATS) / TIMES
        row |= {f"{name} us": us, f"{name} tflops": flops / us / 1e6}
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES))
    parser.add_argument("--uses", nargs="+", choices=list(USES), default=list(USES))
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    torch.manual_seed(0)
    versions = {module: getattr(flash.load(module), "name", "not installed") for module in flash.VERSIONS}
    result: dict[str, Any] = {**setting("bench/flash_attention.py"), "flash_attention": versions, "rows": []}
    print(json.dumps(versions), flush=True)
    cases = [(kind, case) for kind, all_cases in (USES[use] for use in args.uses) for case in all_cases]
    with torch.inference_mode():
        for shape in args.shapes:
            mixer = ModelSpec.of_target(named_shape(shape)).layers[0].mixer
            for kind, case in cases:
                row = {"shape": shape, "use": kind.__name__} | kind(mixer, *case)
                result["rows"].append(row)
                print(json.dumps({k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}), flush=True)
    if args.output:
        write_json(args.output, result)


if __name__ == "__main__":
    main()
