"""Time the target's share of a training step that keeps no features: rows of different lengths, tokens a second.

    python scripts/bench/features.py --shape qwen2.5-0.5b --output features.json

The rows' lengths are drawn from a log-normal distribution, about as those of short answers with their questions. A
step's rows go through the target as the trainer sends them, and for comparison padded to the longest, padded in groups
of which no row is twice as long as another, and each alone. Every time is the median of several steps of other rows.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from dflash_toolkit.benchmark import setting
from dflash_toolkit.files import write_json
from dflash_toolkit.models.dflash.shape import default_target_layer_ids
from dflash_toolkit.models.target import Target, resolve_device
from dflash_toolkit.runtime.shapes import named_shape
from dflash_toolkit.train.features.source import FeatureSource
from dflash_toolkit.train.responses.rows import Row

SPREAD = 0.6  # of the logarithm of a length


def steps_of(count: int, tokens: int, typical: int, vocab: int) -> list[list[Row]]:
    """Rows of `count` steps of at most `tokens` tokens each."""
    g = torch.Generator().manual_seed(0)
    steps = []
    for _ in range(count):
        rows: list[Row] = []
        left = tokens
        while True:
            n = max(16, int(typical * torch.randn((), generator=g).mul(SPREAD).exp()))
            if n > left:
                break
            rows.append(Row(len(rows), 0, torch.randint(0, vocab, (n,), generator=g).tolist()))
            left -= n
        steps.append(rows)
    return steps


def padded(target: Target, taps: tuple[int, ...], groups: Iterable[list[Row]]) -> None:
    """A forward of each group, as long as its longest row."""
    for rows in groups:
        ids = torch.zeros(len(rows), max(len(row.tokens) for row in rows), dtype=torch.long)
        for i, row in enumerate(rows):
            ids[i, : len(row.tokens)] = torch.tensor(row.tokens)
        target.forward(ids.to(target.device), taps=taps)


def alike(rows: list[Row]) -> Iterator[list[Row]]:
    """Groups of which no row is twice as long as another."""
    group: list[Row] = []
    for row in sorted(rows, key=lambda row: len(row.tokens)):
        if group and len(row.tokens) > 2 * len(group[0].tokens):
            yield group
            group = []
        group.append(row)
    yield group


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen2.5-0.5b")
    parser.add_argument("--tokens", type=int, default=12288, help="of a step")
    parser.add_argument("--typical", type=int, default=300, help="median length of a row")
    parser.add_argument("--taps", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    device, config = resolve_device(args.device), named_shape(args.shape)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with device:
        target = Target(AutoModelForCausalLM.from_config(config, dtype=dtype), name=args.shape)
    taps = default_target_layer_ids(config.num_hidden_layers, args.taps)
    steps = steps_of(args.steps + 2, args.tokens, args.typical, config.vocab_size)
    source = FeatureSource(target, taps, args.tokens, packed=args.tokens)  # keeps nothing

    def synchronize() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    ways: dict[str, Callable[[list[Row]], object]] = {
        "trainer": source,
        "padded": lambda rows: padded(target, taps, [rows]),
        "padded in groups": lambda rows: padded(target, taps, alike(rows)),
        "alone": lambda rows: padded(target, taps, ([row] for row in rows)),
    }
    result: dict[str, Any] = {**setting("bench/features.py"), "shape": args.shape, "ways": {}}
    for name, way in ways.items():
        seconds = []
        for rows in steps:
            synchronize()
            began = time.perf_counter()
            way(rows)
            synchronize()
            seconds.append(time.perf_counter() - began)
        median = statistics.median(seconds[2:])  # the first ones warm up
        tokens = statistics.mean(sum(len(row.tokens) for row in rows) for rows in steps[2:])
        result["ways"][name] = {"step_ms": round(1e3 * median, 2), "tokens_per_second": round(tokens / median)}
        print(f"{name}: {1e3 * median:.1f} ms a step, {tokens / median:.0f} tokens/s", flush=True)
    if args.output:
        write_json(args.output, result)


if __name__ == "__main__":
    main()
