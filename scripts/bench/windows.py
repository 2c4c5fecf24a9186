"""Measures attention of one layer with and without a sliding window, where contexts are long.

    python scripts/bench/windows.py --output windows.json

Times are microseconds on the device, the median of 20 graphs of eight calls over four caches. A step has rows of 8
tokens for each request; a prompt is a chunk of 2,048 tokens.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dflash_toolkit.command_line import run_command
from dflash_toolkit.config import UserError
from dflash_toolkit.files import write_json
from dflash_toolkit.kernels import gpu
from dflash_toolkit.kernels.paged import PagedKV
from dflash_toolkit.runtime.timing import median_seconds

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository, for `scripts`

from scripts.measure import setting

PAGE = 64  # tokens
CACHES, CALLS, REPEATS = 4, 8, 20  # a graph goes twice through caches that are larger than L2
LAYERS: dict[str, dict[str, Any]] = {  # heads, KV heads, width of a head, window
    "gpt-oss": {"heads": 64, "groups": 8, "width": 64, "window": 128, "sinks": True},
    "Gemma 3 27B": {"heads": 32, "groups": 16, "width": 128, "window": 1024},
    "Gemma 2 9B": {"heads": 16, "groups": 8, "width": 256, "window": 4096, "soft_cap": 50.0},
}
WORK = ((8, 32_000, 8), (1, 32_000, 8), (32, 8_000, 8), (1, 30_000, 2_048))  # requests, tokens before, rows of each


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def microseconds(layer: dict[str, Any], requests: int, before: int, rows: int, window: int) -> float:
    """Returns the time of one call."""
    pages = -(-(before + rows) // PAGE)
    q = random(requests * rows, layer["heads"], layer["width"])
    lengths = torch.full((requests,), before, device="cuda", dtype=torch.int32)
    sinks = random(layer["heads"]) if layer.get("sinks") else None
    kvs = [
        PagedKV(
            random(2, requests * pages * PAGE, layer["groups"], layer["width"]), lengths,
            torch.randperm(requests * pages, device="cuda", dtype=torch.int32).view(requests, pages), PAGE, window,
            soft_cap=layer.get("soft_cap", 0.0), sinks=sinks,
        )
        for _ in range(CACHES)
    ]  # fmt: skip

    def calls() -> None:
        for i in range(CALLS):
            gpu.block_attention(q, kvs[i % CACHES], causal=True)

    calls()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        calls()
    return median_seconds(graph.replay, torch.device("cuda"), REPEATS) / CALLS * 1e6


def run(names: Sequence[str], output: Path) -> None:
    if not torch.cuda.is_available():
        raise UserError("no CUDA GPU was found; these times need one")
    rows = []
    for name in names:
        layer = LAYERS[name]
        for work in WORK:
            times = {"full_us": microseconds(layer, *work, 0), "window_us": microseconds(layer, *work, layer["window"])}
            rows.append({"layer": name, **dict(zip(("requests", "before", "rows"), work, strict=True)), **times})
            print(rows[-1], flush=True)
    write_json(output, setting("bench/windows.py") | {"rows": rows})


def main(argv: Sequence[str] | None = None) -> int:
    """The program. Exit codes: 0 done, 2 a mistake (one line)."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", nargs="+", choices=list(LAYERS), default=list(LAYERS), help="(default: all)")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args(argv)
    return run_command(lambda: run(args.layers, args.output))


if __name__ == "__main__":
    raise SystemExit(main())
