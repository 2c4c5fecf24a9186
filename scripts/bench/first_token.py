"""Measures prefill by prompt length: captured graphs, and kernels launched one by one.

    python scripts/bench/first_token.py --shape qwen3-8b --output first_token.json

For each length: the median of the milliseconds from a request to its first token on an idle engine, and prompts per
second with many waiting prompts; short ones are then prefilled in batches. Weights are random, the drafter has the
usual size, nothing is cached. With `--prefix-cache` the engine keeps prefixes, and cuts prompts of a recurrent
target at their last page; `again_ms` is the time of a repeated prompt.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from dflash_toolkit import SamplingParams
from dflash_toolkit.files import write_json
from dflash_toolkit.models.dflash.shape import drafter_shape
from dflash_toolkit.models.spec import ModelSpec
from dflash_toolkit.runtime import Engine, EngineOptions
from dflash_toolkit.runtime.prefill_job import PrefillLimits

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository, for `scripts`

from scripts.measure import setting
from scripts.shapes import named_shape, random_drafter, random_target

LENGTHS = (16, 64, 100, 128, 200, 300, 400, 512, 600, 1024, 2048)
REPEATS, MANY = 15, 64
ONE = SamplingParams(max_tokens=1, ignore_eos=True)


def seconds(engine: Engine, prompts: Sequence[list[int]]) -> float:
    began = time.perf_counter()
    engine.generate(prompts, ONE)
    return time.perf_counter() - began


def measure(engine: Engine, length: int) -> dict[str, float]:
    """Milliseconds to the first token of a lone prompt, and prompts a second of many."""
    dice = torch.Generator().manual_seed(length)
    prompts = torch.randint(0, engine.vocabulary, (2 + REPEATS + MANY, length), generator=dice).tolist()
    engine.generate(prompts[:2], ONE)  # compiles and captures
    lone, many = prompts[2 : 2 + REPEATS], prompts[2 + REPEATS :]

    def alone() -> float:
        return 1e3 * statistics.median(seconds(engine, [prompt]) for prompt in lone)

    found = {"ms": alone()}
    if engine.options.prefix_cache:
        found["again_ms"] = alone()
    return found | {"prompts_per_second": MANY / seconds(engine, many)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3-8b")
    parser.add_argument("--length", type=int, nargs="+", default=LENGTHS, help="prompt lengths in tokens")
    parser.add_argument("--prefix-cache", action="store_true", help="use a prefix cache; measures captured graphs only")
    parser.add_argument("--one-by-one", action="store_true", help="do not prefill prompts in batches")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    device, dtype, config = torch.device("cuda"), torch.bfloat16, named_shape(args.shape)
    target = random_target(ModelSpec.of_target(config), device, dtype)
    drafter = random_drafter(drafter_shape(config), device, dtype)
    engine = Engine(target, drafter, (), EngineOptions(num_speculative_tokens=15, prefix_cache=args.prefix_cache))
    if args.one_by_one:
        engine.runner.prefill_limits = PrefillLimits()
    result: dict[str, Any] = {**setting("bench/first_token.py"), "shape": args.shape, "rows": []}
    for length in args.length:
        row: dict[str, Any] = {"length": length}
        if not args.prefix_cache:
            runner = engine.runner
            with patch.multiple(
                runner,
                start_prefill=lambda jobs, prefills=runner.prefills: prefills.unpadded(jobs[0]),
                prefill_limits=PrefillLimits(),
            ):
                row["launched"] = measure(engine, length)
        row["captured"] = measure(engine, length)
        result["rows"].append(row)
        print(json.dumps(row), flush=True)
    if args.output:
        write_json(args.output, result)


if __name__ == "__main__":
    main()
