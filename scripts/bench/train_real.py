"""Trains drafters for some minutes each on a real target's responses, then decodes prompt sets with each.

    python scripts/bench/train_real.py --target DIR --minutes 2 4 8 --output OUT --samples 2 \
        --prompts-train gsm8k=gsm8k_train.jsonl mbpp='mbpp.jsonl[:800]' \
        --prompts gsm8k=gsm8k_test.jsonl mbpp='mbpp.jsonl[800:]' humaneval=humaneval.jsonl.gz --baseline

    torchrun --nproc-per-node 4 scripts/bench/train_real.py --target DIR --answers answers.jsonl --minutes 2 8 30 100 \
        --answers-gpu-minutes 12 --training-prompts 2000 8000 30000 --variant dflash2 --variant dspine --seeds 0 1 \
        --gpu-price 3 --prompts gsm8k=gsm8k_test.jsonl --output OUT

There is a run for each number of GPU minutes, of prompts, each variant and each seed. Its learning-rate schedule has
the run's length. `--variant NAME key=value ...` trains with these options; `--variant NAME` alone takes the options of
that name in variants.yaml, if it is there. With `init_from=NAME` a variant starts from the drafter of the variant NAME
before it, and `share=0.5` trains it for half of --minutes. Variants are also measured by a teacher-forced length on
held-out responses. Runs share the target, the responses, the compiled step and, if they tap the same layers, the
features.

The engine writes the responses as `dflash-data` does (`--samples`: the first greedy, the others sampled), or
`--answers` gives them: files of dflash-data, or JSONL with `prompt_ids` and `output_ids`. Several processes need
`--answers`. Drafters decode greedily on that engine, one prompt at a time, as `dflash-eval` does.

You can stop it at any time; run the same command again to resume. A run that is stopped continues from a resume point
in OUT/work, at most two minutes old (0.6 GiB for a 0.5B target, so it stays on the machine's disk).

Writes OUT/answers.jsonl, OUT/drafter-NAME, OUT/report-NAME and, after every run, OUT/result.json. `minutes` are GPU
minutes of training alone; `gpu_minutes` also counts the responses and features that the run used. Training options may
follow as key=value.
"""

import argparse
import functools
import itertools
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dflash_toolkit import Target, UserError
from dflash_toolkit.command_line import given_values, run_command
from dflash_toolkit.config import from_mapping, read_yaml
from dflash_toolkit.data.prompts import encode_chat, open_text, read_prompt_sets
from dflash_toolkit.evaluation.measure.measurement import EncodedPrompt
from dflash_toolkit.files import write_json
from dflash_toolkit.fingerprint import template_digest, tokens_digest
from dflash_toolkit.train.config import TrainConfig, configure
from dflash_toolkit.train.data_cli import DataConfig
from dflash_toolkit.train.data_options import ResponseOptions
from dflash_toolkit.train.data_run import run as answer
from dflash_toolkit.train.distributed.parallel import Processes
from dflash_toolkit.train.optim.schedule import packing
from dflash_toolkit.train.responses.file import Match, read_training_rows
from dflash_toolkit.train.responses.rows import Row
from dflash_toolkit.train.run.curve import Point, fit
from dflash_toolkit.train.run.provenance import target_digest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository, for `scripts`

from scripts.bench.decode_sets import decode, table
from scripts.bench.training_lab import Job, Journal, Lab, Responses, Turns, prompt_of, timed
from scripts.measure import setting, without_folders

# a 0.5B target on one large GPU; options of the command line override these
SETTINGS = ("prompts.max_length=1024", "loss.head_rows=2048", "run.feature_gpu_share=0.7", "run.evaluate_every=0",
            "run.log_every=100", "run.save_minutes=2")  # fmt: skip
OPTIONS = ("drafter", "prompts", "responses", "loss", "optim", "run", "init_from")  # the command line may set these
VARIANTS = Path(__file__).with_name("variants.yaml")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--target", required=True)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--answers", nargs="+", metavar="FILE", help="existing responses of the target")
    source.add_argument(
        "--prompts-train",
        nargs="+",
        metavar="NAME=FILE",
        help="prompts that the target answers first; FILE[a:b] is rows a..b-1",
    )
    add("--answers-gpu-minutes", type=float, default=0.0, help="GPU minutes that writing --answers took")
    add("--samples", type=int, default=1, help="responses per prompt: one greedy, the others sampled")
    add("--temperature", type=float, default=1.0, help="temperature of sampled responses")
    add("--answer-tokens", type=int, default=512, help="length limit of responses")
    add("--batch", type=int, help="responses written concurrently (default: what the memory holds)")
    add("--minutes", type=float, nargs="+", default=[8.0], help="GPU minutes of training, one run each")
    add("--training-prompts", type=int, nargs="+", default=[0], help="prompts trained on, one run each (default: all)")
    add("--seeds", type=int, nargs="+", default=[], help="values of run.seed, one run each (default: that option)")
    add("--gpu-price", type=float, help="price of a GPU hour, for the cost of each run")
    add("--variant", nargs="+", action="append", default=[], metavar="NAME [key=value ...]")
    add("--held-out", type=int, help="prompts kept out of training (default: 256 with variants, else 0)")
    add("--prompts", nargs="+", default=[], metavar="NAME=FILE", help="sets to decode; FILE[a:b] is rows a..b-1")
    add("--limit", type=int, default=80, help="prompts per set")
    add("--tokens", type=int, default=512, help="length limit of decoded answers")
    add(
        "--context-length",
        type=int,
        nargs="+",
        default=[],
        metavar="TOKENS",
        help="also decode --limit prompts of each set, lengthened with other prompts of the set to these lengths",
    )
    add("--requests", type=int, nargs="+", default=[], help="also measure tokens per second at so many requests")
    add("--pool", nargs="+", metavar="NAME", help="sets in the pooled figures (default: all)")
    add(
        "--baseline",
        nargs="*",
        metavar="NAME",
        help="sets that the last run also decodes without drafts (default: all)",
    )
    add("--turns", type=Path, metavar="FILE", help="programs with the same file share a GPU: train and decode in turns")
    add("--output", type=Path, required=True)
    add("overrides", nargs="*", metavar="key=value", help="training options")
    return parser.parse_intermixed_args(argv)


def jobs_of(args: argparse.Namespace, world: int = 1) -> list[Job]:
    """Every training that is asked for. Raises UserError for a wrong option. Args: world: number of GPUs."""
    jobs: list[Job] = []
    made: dict[tuple[object, ...], str] = {}
    several = args.samples > 1
    sampling = [f"responses.samples={args.samples}", f"responses.greedy_first={str(several).lower()}",
                f"responses.temperature={args.temperature if several else 0.0}"]  # fmt: skip
    for name, *given in variants_of(args) or [[""]]:
        share = [word.removeprefix("share=") for word in given if word.startswith("share=")] or ["1"]
        overrides = [word for word in given if not word.startswith("share=")]
        for minutes, prompts, seed in itertools.product(args.minutes, args.training_prompts, args.seeds or [None]):
            marks = [f"{minutes:g}m"] if not name or len(args.minutes) > 1 else []
            marks += [f"{prompts}p"] if len(args.training_prompts) > 1 else []
            marks += [f"s{seed}"] if len(args.seeds) > 1 else []
            own = [*SETTINGS, f"optim.minutes={minutes * float(share[0]) / world}", *args.overrides, *overrides]
            own += [] if seed is None else [f"run.seed={seed}"]
            if foreign := [word for word in own if re.split("[=.]", word)[0] not in OPTIONS]:
                raise UserError(f"{foreign[0]}: only options of {', '.join(OPTIONS)} may be given here")
            if sampled := [word for word in own if word.startswith("responses.") and args.answers]:
                raise UserError(f"{sampled[0]}: --answers gives the responses; give --prompts-train instead")
            words = ["--target", args.target, *([] if args.answers else sampling), *own]
            values, source = given_values(TrainConfig, words, "train_real", "")
            config = configure(values, source)
            if config.drafter.architecture:
                config = config.with_loss_of(config.drafter.architecture)
            full, place = "-".join(filter(None, (name, *marks))), (minutes, prompts, seed)
            if earlier := made.get((config.init_from, *place)):
                config = replace(config, init_from=str(drafter_of(args, earlier)))
            made[name, *place] = full
            jobs.append(Job(full, name, config.optim.minutes * world, prompts, given, config))
    names = [job.name for job in jobs]
    if len(set(names)) < len(names):
        raise UserError(f"two runs have one name: {', '.join(names)}")
    return jobs


def variants_of(args: argparse.Namespace) -> list[list[str]]:
    """Returns names with their options; a variant of the file comes after the one that it starts from."""
    known = {name: words.split() for name, words in read_yaml(VARIANTS).items()}
    found: list[list[str]] = []

    def add(name: str, *words: str) -> None:
        words = words or tuple(known.get(name, ()))
        for word in words:
            start = word.removeprefix("init_from=")
            if start != word and start in known and start not in (each[0] for each in found):
                add(start)
        found.append([name, *words])

    for variant in args.variant:
        add(*variant)
    return found


def drafter_of(args: argparse.Namespace, name: str) -> Path:
    """Returns the directory of a run's drafter."""
    return Path(args.output) / f"drafter-{name}"


# ---- prompts and answers -----------------------------------------------------------------------------------------


def regenerated(args: argparse.Namespace, job: Job, name: str) -> list[str]:
    """Lets the target answer the training prompts; resumes an earlier call. Raises UserError."""
    prompts, answers, config = args.output / "prompts.jsonl", args.output / name, job.config
    with open(prompts, "w", encoding="utf-8") as handle:
        for source, rows in read_prompt_sets(args.prompts_train).items():
            for place, row in enumerate(rows):
                line = {"id": f"{source}/{place}", "messages": row.messages, "tools": row.tools}
                handle.write(json.dumps(line) + "\n")
    sampler = {key: getattr(config.responses, key) for key in ("samples", "greedy_first", "temperature")}
    asked = {
        "target": args.target, "data": [str(prompts)], "output": str(answers), "batch_size": args.batch,
        "device": config.device, "dtype": config.dtype,
        "prompts": {"max_length": config.prompts.max_length, "similarity": 1.0},
        "max_tokens": args.answer_tokens, **sampler,
    }  # fmt: skip
    answer(from_mapping(DataConfig, asked))
    return [str(answers)]


def read_rows(files: Sequence[str], target: Target) -> list[Row]:
    """The rows of answers files, of either form. Raises UserError."""
    rows: list[Row] = []
    for file in files:
        try:
            with open_text(Path(file)) as lines:
                first = json.loads(next(lines))
                if "prompt_ids" in first:
                    for r in [first, *map(json.loads, lines)]:
                        ids = np.array(r["prompt_ids"] + r["output_ids"], np.int32)
                        rows.append(Row(len(rows), len(r["prompt_ids"]), ids))
                    continue
        except (OSError, ValueError, LookupError, StopIteration) as error:
            raise UserError(f"{file}: holds no answers ({error!r})") from error
        digest, words = target_digest(target.name), target.config.vocab_size
        rows += read_training_rows([file], Match(target.name, digest, words, template_digest(target.tokenizer)))
    return rows


# ---- the whole ---------------------------------------------------------------------------------------------------


def usable(rows: list[Row], longest: int, forbidden: set[tuple[int, ...]]) -> tuple[list[Row], dict[str, int]]:
    """Rows to train on, each there once, cut to `longest` and renumbered, and how many were left out for what.

    Args:
        forbidden: prompts (token ids) that are measured on.

    Raises:
        UserError: none is left.
    """
    left_out = dict.fromkeys(("repeated", "in_evaluation", "too_short"), 0)
    measured = {tokens_digest(prompt) for prompt in forbidden}
    seen: set[bytes] = set()
    kept: list[Row] = []
    for row in (row.cut(longest) for row in rows):
        tokens = tokens_digest(row.tokens)
        if tokens in seen:
            left_out["repeated"] += 1
        elif prompt_of(row) in measured:
            left_out["in_evaluation"] += 1
        elif not row.has_anchor:
            left_out["too_short"] += 1
        else:
            kept.append(replace(row, index=len(kept)))
        seen.add(tokens)
    if not kept:
        raise UserError(f"none of {len(rows)} answers can be trained on: {left_out}")
    return kept, left_out


def hold_out(rows: list[Row], prompts: int, seed: int) -> tuple[list[Row], list[Row]]:
    """Returns the training rows, and the first row of each of `prompts` held-out prompts.

    Raises:
        UserError: there are too few prompts.
    """
    prompts_of = list(map(prompt_of, rows))
    by_prompt = dict(zip(reversed(prompts_of), reversed(rows), strict=True))
    names = list(by_prompt)
    if prompts >= len(names):
        raise UserError(f"{prompts} prompts are to be kept out of training and there are {len(names)}; keep fewer out")
    order = torch.randperm(len(names), generator=torch.Generator().manual_seed(seed)).tolist()
    chosen = {names[i] for i in order[:prompts]}
    training = [row for row, name in zip(rows, prompts_of, strict=True) if name not in chosen]
    return training, [by_prompt[name] for name in names if name in chosen]


def run(args: argparse.Namespace) -> None:
    with Processes.started("auto") as processes:
        jobs = processes.barrier(jobs_of, args, processes.world)
        run_jobs(args, jobs, processes)


def run_jobs(args: argparse.Namespace, jobs: list[Job], processes: Processes) -> None:
    config, output = jobs[0].config, args.output
    asked = read_prompt_sets(args.prompts, args.limit)
    args.pool = args.pool or list(asked)
    plain = set(asked if args.baseline == [] else args.baseline or ())
    if unknown := [name for name in [*args.pool, *plain] if name not in asked]:
        raise UserError(f"{unknown[0]!r} is not a set to decode: {', '.join(asked)}")
    if processes.world > 1 and not args.answers:
        raise UserError(f"{processes.world} processes need --answers; write them first with dflash-data --gpus")
    if processes.world > 1 and args.turns:
        raise UserError(f"--turns is for one process, but there are {processes.world}; remove it")
    if (written := output / "result.json").exists() and len(json.loads(written.read_text())["runs"]) == len(jobs):
        raise UserError(f"{written} is there already; choose another --output or remove it")
    work = output / "work"
    work.mkdir(parents=True, exist_ok=True)
    turns = Turns(args.turns)
    journal = Journal(work / "journal.json", args.argv, processes)
    answered = {}
    for job in jobs:  # each way to sample responses once
        if job.sampler not in answered:
            name = f"answers {job.variant}" if answered else "answers"
            file = f"{name.replace(' ', '-')}.jsonl"
            make = functools.partial(regenerated, args, job, file)
            answered[job.sampler] = journal.stage(name, lambda make=make: {"files": args.answers or make()})
    seconds = {"regenerate": round(sum(each["seconds"] for each in answered.values()), 1)}
    with timed(seconds, "load"):
        target = Target.load(args.target, processes.device if processes.world > 1 else config.device, config.dtype)
        sets = {
            name: [EncodedPrompt(p.id, encode_chat(target.tokenizer, p.messages, tools=p.tools)) for p in prompts]
            for name, prompts in asked.items()
        }
        forbidden = {tuple(prompt.token_ids) for prompts in sets.values() for prompt in prompts}
        longest = min(packing(job.config, target.device)[0] or sys.maxsize for job in jobs)
        longest = min(longest, *(job.config.prompts.max_length for job in jobs))
        held = args.held_out if args.held_out is not None else 256 if args.variant else 0
        responses, left_out = dict[ResponseOptions, Responses](), dict[str, int]()
        for sampler, found in answered.items():
            rows, left_out = usable(read_rows(found["files"], target), longest, forbidden)
            spent = 60 * args.answers_gpu_minutes if args.answers else found["seconds"]
            responses[sampler] = Responses(*hold_out(rows, held, config.run.seed), spent)
    lab, runs = Lab(target, work, processes, turns), []
    first = responses[jobs[0].sampler]
    for job in jobs:
        if processes.main:
            print(
                f"\n== {job.name}: {job.minutes:g} GPU minutes of training, {' '.join(job.overrides)}", file=sys.stderr
            )
        folder, report = drafter_of(args, job.name), output / f"report-{job.name}"
        trained = journal.stage(f"train {job.name}", functools.partial(lab.train, job, responses[job.sampler], folder))
        figures = {
            "name": job.name,
            "variant": job.variant,
            "minutes": job.minutes,
            "settings": job.overrides,
        } | trained
        figures["seconds"] = dict(trained["parts"])
        del figures["parts"]
        if args.gpu_price is not None:
            figures["cost"] = round(figures["gpu_minutes"]["total"] / 60 * args.gpu_price, 2)
        if sets:
            now = plain if job is jobs[-1] else set()
            work_of = functools.partial(processes.rank_zero, decode, target, folder, report, sets, now, args)
            with turns.alone():
                decoded = journal.stage(f"decode {job.name}", lambda work_of=work_of: work_of() or {})
            figures = decoded | figures | {"seconds": figures["seconds"] | {"evaluation": decoded["seconds"]}}
        runs.append(figures)
        total = sum(seconds.values()) + sum(sum(run["seconds"].values()) for run in runs)
        result = {
            **setting("bench/train_real.py", [without_folders(word) for word in args.argv]),
            "gpus": processes.world,
            "target": Path(args.target).name,
            "target_parameters": sum(parameter.numel() for parameter in target.model.parameters()),
            "answers": {
                "regenerated": not args.answers, "rows": len(first.rows), "tokens": first.tokens,
                "held_out": len(first.held_out), "left_out": left_out,
            },
            "seconds": seconds | {"total": round(total, 1)},
            "runs": runs,
            "curves": curves(runs),
        }  # fmt: skip
        if processes.main:
            write_json(written, result)
    if processes.main:
        print(f"\n{table(result, list(sets))}\n\n{total:.0f} s in all; {written}")


def curves(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns, by variant, the law of pooled acceptance against GPU minutes and prompts, or why there is none."""
    found: dict[str, Any] = {}
    for variant in dict.fromkeys(run["variant"] for run in runs):
        points = [
            Point((run["gpu_minutes"]["total"], run["prompts"]), run["pooled"]["tau"])
            for run in runs
            if run["variant"] == variant and run.get("pooled", {}).get("tau")
        ]
        try:
            curve = fit(points)
        except UserError as error:
            found[variant] = str(error)
            continue
        most = max(points)
        twice, wider = (tuple(f * x for f, x in zip(by, most.amounts, strict=True)) for by in ((2, 1), (1, 2)))
        found[variant] = {
            "points": len(points),
            "exponents": dict(zip([("gpu_minutes", "prompts")[i] for i in curve.varied],
                                  (round(float(x), 3) for x in curve.weights @ curve.exponents), strict=True)),
            "longest_run": [round(x, 4) for x in curve.at(most.amounts)],
            "gain_of_twice_the_minutes": [round(x, 4) for x in curve.gain(most.amounts, twice)],
            "gain_of_twice_the_prompts": [round(x, 4) for x in curve.gain(most.amounts, wider)],
        }  # fmt: skip
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """The program. Exit codes: 0 done, 2 a mistake (one line), 130 interrupted (run again to resume)."""
    args = parse(argv)
    args.argv = list(sys.argv[1:] if argv is None else argv)
    return run_command(lambda: run(args))


if __name__ == "__main__":
    raise SystemExit(main())
