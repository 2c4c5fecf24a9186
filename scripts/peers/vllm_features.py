"""Compares the hidden states that a vLLM server writes (`run.feature_endpoint`) with those of transformers.

    python scripts/peers/vllm_features.py --target MODEL --endpoint URL --taps 1 6 11 --prompts gsm8k=gsm8k_test.jsonl

Start the server as docs/scale.md shows, with layer ids one above `--taps`. For every tapped layer the result has
the relative error over all tokens (norm of the difference by the norm of transformers' states), and the same
between transformers in float32 and in the target's dtype, which is the error of rounding. `neighbour` is the
smallest error against another tapped layer; it is small if the server counts layers differently.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from dflash_toolkit import Target
from dflash_toolkit.command_line import run_command
from dflash_toolkit.data.prompts import encode_chat, read_prompt_sets
from dflash_toolkit.evaluation.report.markdown import render_table
from dflash_toolkit.evaluation.report.table import Table
from dflash_toolkit.files import write_json
from dflash_toolkit.train.features.served import ServedTarget

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository, for `scripts`

from scripts.measure import setting, without_folders


def layers(target: Target, texts: Sequence[Sequence[int]], taps: Sequence[int]) -> Tensor:
    """Features of all texts, float32 [taps, tokens, D] on the CPU."""
    rows = []
    for text in texts:
        ids = torch.tensor([text], device=target.device)
        features = target.forward(ids, taps=taps, lengths=[len(text)], final=False).features
        rows.append(features[0].float().cpu().unflatten(-1, (len(taps), -1)))
    return torch.cat(rows).transpose(0, 1)


def error(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


def run(args: argparse.Namespace) -> None:
    target = Target.load(args.target)
    sets = read_prompt_sets(args.prompts, args.limit)
    texts = [encode_chat(target.tokenizer, row.messages) for rows in sets.values() for row in rows]
    own = layers(target, texts, args.taps)
    exact = layers(Target.load(args.target, dtype="float32"), texts, args.taps)
    served = layers(ServedTarget(args.target, args.endpoint, args.taps), texts, args.taps)
    found = []
    for i, tap in enumerate(args.taps):
        others = [error(served[i], own[j]) for j in range(len(args.taps)) if j != i]
        row = {"tap": tap, "served": error(served[i], exact[i]), "rounding": error(own[i], exact[i])}
        found.append(row | {"neighbour": min(others, default=None)})
    if args.output:
        counts = {"texts": len(texts), "tokens": sum(map(len, texts))}
        words = [without_folders(word) for word in sys.argv[1:]]
        write_json(args.output, setting("peers/vllm_features.py", words) | counts | {"layers": found})
    shown = [
        (str(row["tap"]), *("" if (v := row[n]) is None else f"{v:.4f}" for n in ("served", "rounding", "neighbour")))
        for row in found
    ]
    print(render_table(Table("", ("layer", "server", "rounding", "nearest other layer"), tuple(shown))))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--endpoint", required=True)
    parser.add_argument("--taps", type=int, nargs="+", required=True, help="0-based layer ids")
    parser.add_argument("--prompts", nargs="+", required=True, metavar="NAME=SOURCE")
    parser.add_argument("--limit", type=int, default=16, help="prompts per set")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args(argv)
    return run_command(lambda: run(args))


if __name__ == "__main__":
    raise SystemExit(main())
