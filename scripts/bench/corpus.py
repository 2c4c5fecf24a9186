"""Measures the cost of reading a large file of responses into a corpus, and of mapping the corpus in every process.

    python scripts/bench/corpus.py --tokens 100000000 --output corpus.json

Writes rows of 2000 tokens as `dflash-data` does (a pool of 200 distinct rows, repeated), reads them into a corpus
as `dflash-train --responses` does, and maps the corpus in a new process. That process asks what a run asks at its
start: lengths, cuts, rows with anchors, supervised tokens. Then it reads every token once.
"""

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from dflash_toolkit.files import write_json
from dflash_toolkit.train.config import DataOptions, TrainConfig
from dflash_toolkit.train.prompts.split import Reading
from dflash_toolkit.train.responses.build_corpus import write_given
from dflash_toolkit.train.responses.corpus import Corpus
from dflash_toolkit.train.responses.file import Match

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository, for `scripts`

from scripts.measure import setting, without_folders

LENGTH, PROMPT, WORDS, POOL = 2000, 200, 151_936, 200


def write_answers(path: Path, rows: int) -> None:
    """An answers file of so many rows."""
    draw, numbers = random.Random(0), np.random.default_rng(0)
    common = {"finish_reason": "stop", "target": "t", "target_digest": "d", "vocab_size": WORDS, "template_hash": "h",
              "sampler": {"temperature": 0.0, "thinking": None}}  # fmt: skip
    pool = []
    for _ in range(POOL):
        said = [" ".join(f"word{draw.randrange(5000)}" for _ in range(n)) for n in (150, 1200)]
        messages = [{"role": role, "content": text} for role, text in zip(("user", "assistant"), said, strict=True)]
        tokens = numbers.integers(0, WORDS, LENGTH).tolist()
        row = {"messages": messages, "prompt_tokens": PROMPT, "tokens": tokens, "spans": [[PROMPT, LENGTH]]}
        pool.append(json.dumps(row | common)[1:])
    with open(path, "w") as handle:
        for i in range(rows):
            handle.write(f'{{"index": {i}, "sample": 0, "part": 0, "parts": 1, "id": "{i}", {pool[i % POOL]}\n')


def resident() -> int:
    """Bytes of this process's own; pages of files are shared by all that map them."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Anonymous:")) * 1024


def load(folder: Path) -> dict[str, Any]:
    """Measures the time and memory of opening a corpus."""
    before, began = resident(), time.perf_counter()
    rows = Corpus.open(folder).cut(1500).with_anchors()
    counted = {"rows": len(rows), "tokens": int(rows.lengths.sum()), "answer_tokens": rows.response_tokens}
    started = time.perf_counter() - began
    total = sum(int(row.tokens.sum(dtype=np.int64)) for row in rows)
    return counted | {
        "seconds": round(started, 3),
        "seconds_with_every_row_read": round(time.perf_counter() - began, 2),
        "own_mib": round((resident() - before) / 2**20, 1),
        "sum": total,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=100_000_000)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--load", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.load:
        print(json.dumps(load(args.load)))
        return
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as name:
        answers, folder = Path(name) / "a.jsonl", Path(name) / "corpus"
        write_answers(answers, args.tokens // LENGTH)
        # every prompt of the pool occurs many times, so none is held out
        config = TrainConfig(target="t", response_files=(str(answers),), prompts=DataOptions(held_out=0, max_prompts=0))
        began, cpu = time.perf_counter(), time.process_time()
        write_given(Reading(config, None, ""), "", Match("t", "d", WORDS, "h"), folder, {})
        made = {"seconds": round(time.perf_counter() - began, 1), "cpu_seconds": round(time.process_time() - cpu, 1)}
        made |= {"answers_mib": answers.stat().st_size >> 20, "peak_rss_mib": peak()}
        found = subprocess.run(
            [sys.executable, __file__, "--load", str(folder)], check=True, capture_output=True, text=True
        )
        loaded = json.loads(found.stdout)
    scale = 1.6e9 / args.tokens
    result = setting("bench/corpus.py", [without_folders(word) for word in sys.argv[1:]]) | {
        "tokens": args.tokens,
        "written_once": made,
        "mapped_by_each_process": loaded,
        "at_1.6e9_tokens_in_proportion": {
            "written_once_cpu_seconds": round(made["cpu_seconds"] * scale),
            "mapped_seconds": round(loaded["seconds"] * scale, 2),
            "own_mib": round(loaded["own_mib"] * scale),
        },
    }
    print(json.dumps(result, indent=2))
    if args.output:
        write_json(args.output, result)


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10


if __name__ == "__main__":
    main()
