"""Measures how fast a target's responses are written: tokens per second by batch size, and a whole training run.

    python scripts/bench/responses.py rates --shape qwen3-8b --batch 32 64 128 256 --output rates.json
    python scripts/bench/responses.py rates --target DIR --drafter DIR --data gsm8k=train.jsonl --output rates.json
    python scripts/bench/responses.py run --target DIR --data gsm8k=gsm8k_train.jsonl --prompts 8345 --minutes 4 \
        --output run.json

`rates` writes responses as dflash-data does, with random weights of a shape (--shape; drafts are accepted at random,
--accept) or with a real target. For each batch size it writes greedy responses without drafts, sampled ones, and
greedy ones with drafts: `tokens_per_second` of the whole job, prefills included, and `steady_tokens_per_second` while
the batch is full. --profile adds the functions that take the host longest.

`run` is one dflash-train command, timed from outside: `seconds` and the line that each stage began with.
"""

import argparse
import cProfile
import gc
import io
import itertools
import json
import pstats
import random
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from dflash_toolkit import SamplingParams, UserError
from dflash_toolkit.command_line import run_command
from dflash_toolkit.data.prompts import encode_chat, read_prompt_sets
from dflash_toolkit.evaluation.measure.decoders import EngineDecoder
from dflash_toolkit.files import read_json, write_json
from dflash_toolkit.models.target_files import load_tokenizer
from dflash_toolkit.runtime import EngineOptions, SyntheticAcceptance
from dflash_toolkit.runtime.load import Parts, load_parts
from dflash_toolkit.train.responses.generate import seed_of

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository, for `scripts`

from scripts.measure import setting, without_folders
from scripts.shapes import random_parts

MODES = ("greedy", "sampled", "drafts")
SETTINGS = (
    "prompts.max_length=1024", "responses.max_tokens=512", "loss.head_rows=2048", "run.feature_gpu_share=0.7",
    "run.evaluate_every=0", "run.log_every=100", "run.save_every=1000000000",
)  # fmt: skip  # a 0.5B target on one large GPU, as in train_real.py
STAGE = re.compile(r"\d+/\d+ ")  # lines of progress, which the timeline leaves out
Job = tuple[list[int], int]  # a prompt, and the limit of its response


# ---- rates -----------------------------------------------------------------------------------------------------


def parts_of(args: argparse.Namespace) -> Parts:
    """Returns the real pair, or random weights of the shape with a random drafter. Raises UserError."""
    if args.target:
        return load_parts(args.target, args.drafter, args.device, "auto")
    return random_parts(args.shape, args.layers, args.device, drafts="drafts" in args.modes)


def jobs_of(args: argparse.Namespace, vocabulary: int) -> Iterator[Job]:
    """Yields prompts without end: of the data, or random ones with lengths as chats have them."""
    if args.data:
        tokenizer = load_tokenizer(args.target)
        rows = [row for rows in read_prompt_sets(args.data).values() for row in rows]
        random.Random(0).shuffle(rows)
        yield from itertools.cycle([(encode_chat(tokenizer, row.messages), args.tokens) for row in rows[:4096]])
    dice = random.Random(0)
    while True:
        prompt = [dice.randrange(8, vocabulary - 8) for _ in range(dice.randint(*args.prompt_tokens))]
        yield prompt, dice.randint(args.tokens // 4, args.tokens)


def write_responses(decoder: EngineDecoder, jobs: Sequence[Job], temperature: float, stops: bool) -> dict[str, Any]:
    """Writes the responses to all jobs, as many at a time as the decoder takes, and returns tokens per second."""
    waiting, running, tokens = enumerate(jobs), 0, 0
    full_tokens, full_at, began = 0, 0.0, time.perf_counter()
    left = len(jobs)
    while left:
        while running < decoder.width and (found := next(waiting, None)):
            key, (prompt, limit) = found
            params = SamplingParams(
                temperature=temperature, seed=seed_of(0, key), max_tokens=limit, ignore_eos=not stops
            )
            decoder.submit(key, prompt, params)
            running += 1
        response = decoder.wait()
        tokens += len(response.tokens)
        running, left = running - 1, left - 1
        if left >= decoder.width // 2:
            full_tokens, full_at = tokens, time.perf_counter() - began
    seconds = time.perf_counter() - began
    return {
        "responses": len(jobs), "tokens": tokens, "seconds": round(seconds, 2),
        "tokens_per_second": round(tokens / seconds, 1),
        "steady_tokens_per_second": round(full_tokens / full_at, 1) if full_at else None,
    }  # fmt: skip


def measured(parts: Parts, mode: str, batch: int, args: argparse.Namespace) -> dict[str, Any]:
    """Returns the rates of one way of writing responses at one batch size. Raises UserError."""
    parts = replace(parts, drafter=parts.drafter if mode == "drafts" else None)
    accept = SyntheticAcceptance(rate=args.accept, seed=1) if mode == "drafts" and not args.target else None
    began = time.perf_counter()
    options = EngineOptions(max_num_seqs=batch, max_model_len=args.max_model_len, draft_tree=0, synthetic=accept)
    engine = parts.engine(options)
    decoder = EngineDecoder(engine)
    vocabulary, stops = parts.target.spec.vocab_size, bool(args.target)
    source, temperature = jobs_of(args, vocabulary), 1.0 if mode == "sampled" else 0.0
    write_responses(
        decoder, list(itertools.islice(source, args.warm_up * batch)), temperature, stops
    )  # captures graphs
    start = time.perf_counter() - began
    profile = cProfile.Profile() if args.profile else None
    if profile:
        profile.enable()
    found = write_responses(decoder, list(itertools.islice(source, args.rounds * batch)), temperature, stops)
    if profile:
        profile.disable()
        text = io.StringIO()
        pstats.Stats(profile, stream=text).sort_stats("tottime").print_stats(18)
        found["profile"] = [line.strip() for line in text.getvalue().splitlines() if ":" in line or "{" in line]
    found |= {"mode": mode, "batch": batch, "start_seconds": round(start, 1)}
    if torch.cuda.is_available():
        found["gpu_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 1)
    if mode == "drafts":
        found["draft_lengths"] = dict(sorted(engine.stats.draft_lengths.items()))
    del engine
    decoder.close()
    return found


def rates(args: argparse.Namespace) -> None:
    parts, result = parts_of(args), heading(args) | {"rates": []}
    for batch in args.batch:
        for mode in args.modes:
            if mode == "drafts" and parts.drafter is None:
                continue
            gc.collect()
            try:
                found = measured(parts, mode, batch, args)
            except UserError as error:
                found = {"mode": mode, "batch": batch, "refused": str(error)}
            result["rates"].append(found)
            shown = found.get("refused") or f"{found['tokens_per_second']} tokens/s in {found['seconds']} s"
            print(f"{batch} {mode}: {shown}", flush=True)
            write_json(args.output, result)


# ---- a whole run -----------------------------------------------------------------------------------------------


def whole_run(args: argparse.Namespace) -> None:
    """Times one dflash-train command and stores when each of its stages began."""
    folder = args.output.with_suffix("")
    command = [
        sys.executable, "-m", "dflash_toolkit.train.cli", "--target", args.target, "--data", *args.data, "--output",
        str(folder), *SETTINGS, f"prompts.max_prompts={args.prompts}", f"optim.minutes={args.minutes}", *args.overrides,
    ]  # fmt: skip
    began, timeline, last = time.perf_counter(), list[tuple[float, str]](), ""
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as running:
        assert running.stderr is not None
        for line in running.stderr:
            print(line, end="", file=sys.stderr, flush=True)
            last = line.strip() or last
            if line.strip() and (not STAGE.search(line) or not timeline or line[:8] != timeline[-1][1][:8]):
                timeline.append((round(time.perf_counter() - began, 1), without_folders(line.strip())[:160]))
    seconds = time.perf_counter() - began
    if running.returncode:
        raise UserError(f"dflash-train ended with {running.returncode}: {last}")
    record = read_json(folder / "run.json")
    write_json(
        args.output,
        heading(args)
        | {
            "seconds": round(seconds, 1),
            "response_speed": record["response_speed"],
            "training_seconds": record["result"]["training_seconds"],
            "result": {key: record["result"].get(key) for key in ("prompts", "answers", "answer_tokens", "steps")},
            "acceptance_length": record["result"].get("acceptance_length"),
            "timeline": timeline,
        },
    )
    print(f"{seconds:.0f} s in all; responses {json.dumps(record['response_speed'])}")


def heading(args: argparse.Namespace) -> dict[str, Any]:
    found = setting("bench/responses.py", args.argv)
    return found | {"command": [without_folders(word) for word in found["command"]]}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ways = parser.add_subparsers(required=True)
    one = ways.add_parser("rates", help="tokens per second by batch size")
    one.set_defaults(work=rates)
    what = one.add_mutually_exclusive_group(required=True)
    what.add_argument("--shape", help="named shape with random weights")
    what.add_argument("--target", help="real target")
    one.add_argument("--drafter", help="of a real target")
    one.add_argument("--data", nargs="+", default=[], metavar="NAME=SOURCE", help="prompts of a real target")
    one.add_argument("--layers", type=int, help="layers of the shape (default: all)")
    one.add_argument("--batch", type=int, nargs="+", default=[32, 64, 128, 256], help="requests at a time")
    one.add_argument("--modes", nargs="+", default=list(MODES), choices=MODES)
    one.add_argument("--accept", type=float, default=0.8, help="acceptance rate of a position, with --shape")
    one.add_argument("--prompt-tokens", type=int, nargs=2, default=[40, 240], help="fewest and most, with --shape")
    one.add_argument("--tokens", type=int, default=512, help="limit of a response; with --shape a quarter at least")
    one.add_argument("--rounds", type=int, default=3, help="responses, times the requests at a time")
    one.add_argument("--warm-up", type=int, default=1, help="responses before, times the requests at a time")
    one.add_argument("--max-model-len", type=int, default=2048)
    one.add_argument("--profile", action="store_true", help="add the functions that take the host longest")
    whole = ways.add_parser("run", help="a whole training run")
    whole.set_defaults(work=whole_run)
    whole.add_argument("--target", required=True)
    whole.add_argument("--data", nargs="+", required=True, metavar="NAME=SOURCE")
    whole.add_argument("--prompts", type=int, default=8345)
    whole.add_argument("--minutes", type=float, default=4.0)
    whole.add_argument("overrides", nargs="*", metavar="key=value", help="training options")
    for each in (one, whole):
        each.add_argument("--device", default="auto")
        each.add_argument("--output", type=Path, required=True)
    args = parser.parse_args(argv)
    args.argv = list(sys.argv[1:] if argv is None else argv)
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    return run_command(lambda: args.work(args))


if __name__ == "__main__":
    raise SystemExit(main())
