"""Measure two drafters of one target on the same prompts, and print both.

python examples/evaluate_two_drafters.py --target Qwen/Qwen3-8B --drafters z-lab/Qwen3-8B-DFlash-b16 out/mine \\
    --prompts gsm8k=openai/gsm8k:main --limit 40

Options that it does not know go to dflash-eval. A full report of each is in OUTPUT/0 and OUTPUT/1.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from dflash_toolkit.evaluation.cli import main as evaluate
from dflash_toolkit.evaluation.schema import read_report


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--drafters", nargs=2, required=True, metavar="DRAFTER")
    parser.add_argument("--output", type=Path, default=Path("out/two-drafters"))
    args, more = parser.parse_known_args(argv)
    reports = []
    for place, drafter in enumerate(args.drafters):
        output = args.output / str(place)
        if code := evaluate(["--target", args.target, "--drafter", drafter, "--output", str(output), *more]):
            return code
        reports.append(read_report(output / "report.json")["sections"][0])
    print(f"\n{'acceptance length':<20} {'  '.join(args.drafters)}")
    for name in reports[0]["sets"]:
        found = [report["sets"][name]["tau_pooled"] for report in reports]
        print(f"{name:<20} {'  '.join(f'{tau:.2f}' for tau in found)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
