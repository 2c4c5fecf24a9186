"""Measures two drafters of one target on the same prompts, and compares them.

python examples/evaluate_two_drafters.py --target Qwen/Qwen3-8B --drafters z-lab/Qwen3-8B-DFlash-b16 out/mine \\
    --prompts gsm8k=openai/gsm8k:main --limit 40

Other options are passed to dflash-eval. OUTPUT/0 and OUTPUT/1 have the full report of each drafter, OUTPUT has the
comparison.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from dflash_toolkit.evaluation.cli import main as evaluate


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--drafters", nargs=2, required=True, metavar="DRAFTER")
    parser.add_argument("--output", type=Path, default=Path("out/two-drafters"))
    args, more = parser.parse_known_args(argv)
    outputs = [str(args.output / str(place)) for place in range(2)]
    for output, drafter in zip(outputs, args.drafters, strict=True):
        if code := evaluate(["--target", args.target, "--drafter", drafter, "--output", output, *more]):
            return code
    return evaluate(["compare", *outputs, "--output", str(args.output)])


if __name__ == "__main__":
    raise SystemExit(main())
