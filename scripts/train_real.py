"""Train a drafter on answers of a real target for some minutes, then measure its acceptance: one program, two numbers.

    python scripts/train_real.py --target DIR --answers FILE.jsonl.xz --minutes 4 \
        --prompts gsm8k=gsm8k.jsonl mbpp=mbpp.jsonl --output OUT

The answers are JSONL (also .gz, .xz) with `prompt_ids` and `output_ids`, the target's own tokens. Writes the drafter to
OUT/drafter, the report of dflash-eval to OUT/report and a summary with the training curve to OUT/result.json. Any
training knob may follow: `optim.learning_rate=1e-3`.
"""

import argparse
import json
import platform
import sys
import time
from pathlib import Path
from typing import Any

import torch

from dflash_toolkit import Drafter, Target, save_drafter
from dflash_toolkit.config import from_mapping
from dflash_toolkit.evaluation.cli import main as evaluate
from dflash_toolkit.prompts import open_text, template_hash
from train.answers import Row
from train.cli import drafter_config
from train.config import TrainConfig
from train.loop import train

CURVE = ("step", "loss", "estimated_acceptance_length", "sequences_per_second", "epoch")


def read_answers(path: Path, longest: int) -> list[Row]:
    """Rows whose prompt leaves room for an answer of two tokens."""
    with open_text(path) as lines:
        read = [json.loads(line) for line in lines]
    rows = [Row(i, len(r["prompt_ids"]), r["prompt_ids"] + r["output_ids"]) for i, r in enumerate(read)]
    return [row for row in rows if row.prompt_tokens + 2 <= min(longest, len(row.tokens))]


def settings(target: str, minutes: float, overrides: list[str]) -> TrainConfig:
    values: dict[str, Any] = {
        "target": target,
        "prompts": {"max_length": 1024},
        "loss": {"head_rows": 2048},
        "optim": {"minutes": minutes, "pack_tokens": 3072},
        "run": {"evaluate_every": 0, "log_every": 100, "save_every": 10**9},
    }
    for override in overrides:
        key, _, value = override.partition("=")
        group, _, name = key.partition(".")
        try:
            values.setdefault(group, {})[name] = json.loads(value)
        except json.JSONDecodeError:
            values[group][name] = value
    return from_mapping(TrainConfig, values)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--answers", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--prompts", nargs="+", default=[], help="NAME=FILE")
    parser.add_argument("--limit", type=int, default=80, help="prompts of each set")
    parser.add_argument("--baseline", action="store_true", help="also decode without the drafter")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("overrides", nargs="*", help="training knobs, key=value")
    args = parser.parse_args()
    config = settings(args.target, args.minutes, args.overrides)
    work = args.output / "work"
    work.mkdir(parents=True)  # a new run: an old one is not resumed by the clock
    target = Target.load(args.target, "auto", "auto")
    rows = read_answers(args.answers, config.prompts.max_length)
    shape = drafter_config(config, target.config, target.tokenizer)
    drafter = Drafter(shape)
    drafter.init_weights(torch.Generator().manual_seed(config.run.seed))
    drafter.to(target.device).train()
    note = {"template_hash": template_hash(target.tokenizer)}
    folder = args.output / "drafter"
    began = time.perf_counter()
    outcome = train(config, target, drafter, rows, [], work, {}, lambda d, _: save_drafter(d, folder, note))
    seconds = time.perf_counter() - began
    curve = [json.loads(line) for line in (work / "metrics.jsonl").read_text().splitlines()]
    result = {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "answers": len(rows),
        "parameters": sum(p.numel() for p in drafter.parameters()),
        "steps": outcome.steps,
        "training_seconds": seconds,
        "curve": [{key: line[key] for key in CURVE} for line in curve],
    }
    (args.output / "result.json").write_text(json.dumps(result, indent=1) + "\n")
    print(f"{outcome.steps} steps in {seconds:.0f} s", flush=True)
    del target, drafter
    torch.cuda.empty_cache()
    if args.prompts:
        command = ["--target", args.target, "--drafter", str(folder), "--prompts", *args.prompts]
        command += ["--limit", str(args.limit), "--output", str(args.output / "report")]
        sys.exit(evaluate([*command, "--baseline" if args.baseline else "--no-baseline"]))


if __name__ == "__main__":
    main()
