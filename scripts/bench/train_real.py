"""Trains drafters for some minutes each on a real target's responses, then decodes prompt sets with each.

    python scripts/bench/train_real.py --target DIR --minutes 2 4 8 --output OUT --samples 2 \
        --prompts-train gsm8k=gsm8k_train.jsonl mbpp='mbpp.jsonl[:800]' \
        --prompts gsm8k=gsm8k_test.jsonl mbpp='mbpp.jsonl[800:]' humaneval=humaneval.jsonl.gz --baseline

Each number of minutes is one run with a learning-rate schedule of that length. Each `--variant NAME key=value ...`
trains with these options instead and measures a teacher-forced length on held-out responses: an ablation. Runs
share the target, the responses, the compiled step and, if they tap the same layers, the features. With
`init_from=NAME` a variant starts from the drafter of the variant NAME before it.

The engine writes the responses as `dflash-data` does (`--samples`: the first greedy, the others sampled), or
`--answers` gives them: files of dflash-data, or JSONL with `prompt_ids` and `output_ids`. Drafters decode greedily
on that engine, one prompt at a time, as `dflash-eval` does. Run the same command again to resume after the last
finished stage.

Writes OUT/answers.jsonl, OUT/drafter-NAME, OUT/report-NAME and, after every run, OUT/result.json. The minutes are
those of training alone; features and compilation are timed separately, and the total covers everything. Training
options may follow as key=value.
"""

import argparse
import contextlib
import functools
import json
import math
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from dflash_toolkit import Drafter, Target, UserError, load_drafter, save_drafter
from dflash_toolkit.config import from_mapping, given_values, run_command
from dflash_toolkit.data.prompts import encode_chat, open_text, read_prompt_sets
from dflash_toolkit.evaluation.measure.measurement import EncodedPrompt
from dflash_toolkit.files import write_json
from dflash_toolkit.fingerprint import template_digest, tokens_digest
from dflash_toolkit.models.dflash.checkpoint import tensor_shapes
from dflash_toolkit.record import RECORD_KEY, export_record
from dflash_toolkit.train.config import TrainConfig, configure
from dflash_toolkit.train.data_cli import DataConfig
from dflash_toolkit.train.data_run import run as answer
from dflash_toolkit.train.features.source import FeatureSource, features_key, open_features
from dflash_toolkit.train.loop import train
from dflash_toolkit.train.objective.blocks import sample_blocks
from dflash_toolkit.train.objective.loss import compute_loss, use_flex
from dflash_toolkit.train.optim.optimizers import peak_rate, uses_muon
from dflash_toolkit.train.optim.schedule import PackedSchedule, Schedule, packing, rng_for
from dflash_toolkit.train.responses.file import Match, read_training_rows
from dflash_toolkit.train.responses.join import joined
from dflash_toolkit.train.responses.rows import Row
from dflash_toolkit.train.run.definition import Export, Run
from dflash_toolkit.train.run.prepare import drafter_config
from dflash_toolkit.train.run.provenance import target_digest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository, for `scripts`

from scripts.bench.decode_sets import decode, release, rounded, table
from scripts.measure import setting, without_folders

# a 0.5B target on one large GPU; options of the command line override these
SETTINGS = ("prompts.max_length=1024", "loss.head_rows=2048", "run.feature_gpu_share=0.7", "run.evaluate_every=0",
            "run.log_every=100", "run.save_every=1000000000")  # fmt: skip
OPTIONS = ("drafter", "prompts", "loss", "optim", "run", "init_from")  # what the command line may set
WARM_UP_STEPS = 3  # compile what the run needs
CURVE = ("step", "loss", "estimated_acceptance_length", "sequences_per_second", "epoch")
SELECTOR = ("estimated_unary_length", "estimated_oracle_length")  # without it, and with its best choice


class Job(NamedTuple):
    """One training."""

    name: str
    minutes: float
    overrides: list[str]
    config: TrainConfig


class Journal:
    """Figures of the finished stages; the same command resumes after them.

    Raises:
        UserError: the file is of another command.
    """

    def __init__(self, path: Path, command: list[str]) -> None:
        self._path = path
        self._kept: dict[str, Any] = {"command": command}
        if path.exists():
            self._kept = json.loads(path.read_text())
            if self._kept["command"] != command:
                raise UserError(f"{path.parent} is of another command; choose another --output or remove it")

    def stage(self, name: str, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Returns the figures of `work` and its seconds; reuses those of an earlier run."""
        if name not in self._kept:
            began = time.perf_counter()
            figures = work()
            self._kept[name] = figures | {"seconds": round(time.perf_counter() - began, 1)}
            write_json(self._path, self._kept)
        return self._kept[name]


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
    add("--samples", type=int, default=1, help="responses per prompt: one greedy, the others sampled")
    add("--temperature", type=float, default=1.0, help="temperature of sampled responses")
    add("--answer-tokens", type=int, default=512, help="length limit of responses")
    add("--batch", type=int, help="responses written concurrently (default: what the memory holds)")
    add("--minutes", type=float, nargs="+", default=[8.0], help="minutes of training, one run each")
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
    add("--pool", nargs="+", metavar="NAME", help="sets in the pooled figures (default: all)")
    add(
        "--baseline",
        nargs="*",
        metavar="NAME",
        help="sets that the last run also decodes without drafts (default: all)",
    )
    add("--output", type=Path, required=True)
    add("overrides", nargs="*", metavar="key=value", help="training options")
    return parser.parse_intermixed_args(argv)


def jobs_of(args: argparse.Namespace) -> list[Job]:
    """Every training that is asked for. Raises UserError for a wrong option."""
    jobs = []
    for name, *overrides in args.variant or [[""]]:
        for minutes in args.minutes:
            budget = f"{minutes:g}m" if not name or len(args.minutes) > 1 else ""
            own = [*SETTINGS, f"optim.minutes={minutes}", *args.overrides, *overrides]
            if foreign := [word for word in own if re.split("[=.]", word)[0] not in OPTIONS]:
                raise UserError(f"{foreign[0]}: only options of {', '.join(OPTIONS)} may be given here")
            values, source = given_values(TrainConfig, ["--target", args.target, *own], "train_real", "")
            config = configure(values, source)
            if config.drafter.architecture:
                config = config.with_loss_of(config.drafter.architecture)
            if config.init_from in [job.name for job in jobs]:
                config = replace(config, init_from=str(drafter_of(args, config.init_from)))
            jobs.append(Job("-".join(filter(None, (name, budget))), config.optim.minutes, overrides, config))
    names = [job.name for job in jobs]
    if len(set(names)) < len(names):
        raise UserError(f"two runs have one name: {', '.join(names)}")
    return jobs


def drafter_of(args: argparse.Namespace, name: str) -> Path:
    """Returns the directory of a run's drafter."""
    return Path(args.output) / f"drafter-{name}"


# ---- prompts and answers -----------------------------------------------------------------------------------------


def regenerated(args: argparse.Namespace, config: TrainConfig) -> list[str]:
    """Lets the target answer the training prompts; resumes an earlier call. Raises UserError."""
    prompts, answers = args.output / "prompts.jsonl", args.output / "answers.jsonl"
    with open(prompts, "w", encoding="utf-8") as handle:
        for name, rows in read_prompt_sets(args.prompts_train).items():
            for place, row in enumerate(rows):
                handle.write(json.dumps({"id": f"{name}/{place}", "messages": row.messages, "tools": row.tools}) + "\n")
    several = args.samples > 1
    sampler = {"samples": args.samples, "greedy_first": several, "temperature": args.temperature if several else 0.0}
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


# ---- one run -----------------------------------------------------------------------------------------------------


class Lab:
    """Holds the objects that runs share: the target, the rows, and the features of the same tapped layers."""

    def __init__(self, target: Target, rows: list[Row], held_out: list[Row], work: Path) -> None:
        self.target, self.rows, self.held_out, self._work = target, rows, held_out, work
        self._key: tuple[object, ...] = ()
        self._source: FeatureSource | None = None

    def drafter(self, config: TrainConfig) -> Drafter:
        """A fresh one, or the one to start from."""
        if config.init_from:
            return load_drafter(config.init_from, self.target.device, torch.float32).train().requires_grad_()
        drafter = Drafter(drafter_config(config, self.target.config, self.target.tokenizer))
        drafter.init_weights(torch.Generator().manual_seed(config.run.seed))
        drafter = drafter.to(self.target.device).train()
        drafter.config.architecture.fit_head(drafter, self.target.head_weight)
        return drafter

    def training_rows(self, config: TrainConfig) -> list[Row]:
        """Returns the rows, joined if the options say so."""
        length = config.prompts.join_to
        return list(joined(self.rows, length, config.run.seed)) if length else self.rows

    def source(self, config: TrainConfig, taps: tuple[int, ...]) -> FeatureSource:
        key = features_key(config, self.target, taps)
        if self._source is None or key != self._key:
            self._source = None  # its memory first
            release()
            rows = [*self.training_rows(config), *self.held_out]
            self._source = open_features(config, self.target, taps, rows, self._work)
            self._key = key
        return self._source

    def train(self, job: Job, folder: Path) -> dict[str, Any]:
        """Train a drafter and export it to `folder`; what there is to say of it."""
        release()
        config, work, seconds = job.config, self._work / job.name, {}
        if config.init_from:
            rate = peak_rate(config.optim, uses_muon(config, self.target.device.type == "cuda"), warm=True)
            config = replace(config, optim=replace(config.optim, learning_rate=rate))
        shape = self.drafter(config).config
        with timed(seconds, "features"):
            source, rows = self.source(config, shape.target_layer_ids), self.training_rows(config)
        with timed(seconds, "compile"):
            short = replace(config, optim=replace(config.optim, minutes=0.0, steps=WARM_UP_STEPS))
            train(
                Run(short, self.target, self.drafter(config), rows, [], fresh(work), {}, keep_nothing),
                None,
                source,
            )
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        note = {"template_hash": template_digest(self.target.tokenizer)}

        def export(trained: Drafter, made: Export) -> None:
            save_drafter(trained, folder, note | {RECORD_KEY: export_record(trained, self.target)})

        with timed(seconds, "training"):
            run = Run(config, self.target, self.drafter(config), rows, [], fresh(work), {}, export)
            outcome = train(run, None, source)
        (work / "state.pt").unlink()  # a run by the clock is not resumed
        peak = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else None
        held_out = None
        if self.held_out:
            with timed(seconds, "held_out"):
                exported = load_drafter(str(folder), self.target.device, torch.float32).train()
                held_out = teacher_forced_length(exported, self.target, source, self.held_out, config)
        curve = [json.loads(line) for line in (work / "metrics.jsonl").read_text().splitlines()]
        epochs = curve[-1]["epoch"]
        thinned = [line for i, line in enumerate(curve) if i % -(-len(curve) // 50) == 0 or line is curve[-1]]
        return {
            "parameters": sum(math.prod(sides) for sides in tensor_shapes(shape).values()),
            "steps": outcome.steps,
            "epochs": epochs,
            "rows": len(rows),
            "sequences_per_second": rounded(epochs * len(rows) / outcome.elapsed_s),
            "peak_gib": rounded(peak),
            "held_out_tau": rounded(held_out),
            "parts": seconds,
            "curve": [{key: line[key] for key in (*CURVE, *SELECTOR) if key in line} for line in thinned],
        }


def keep_nothing(*_: object) -> None:
    """Export nothing."""


@contextlib.contextmanager
def timed(seconds: dict[str, float], part: str) -> Iterator[None]:
    began = time.perf_counter()
    yield
    seconds[part] = round(time.perf_counter() - began, 1)


def fresh(folder: Path) -> Path:
    """An empty directory: a run by the clock is not resumed."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


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
        elif tokens_digest(row.tokens[: row.prompt_tokens]) in measured:
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
    prompts_of = [tokens_digest(row.tokens[: row.prompt_tokens]) for row in rows]
    by_prompt = dict(zip(reversed(prompts_of), reversed(rows), strict=True))
    names = list(by_prompt)
    if prompts >= len(names):
        raise UserError(f"{prompts} prompts are to be kept out of training and there are {len(names)}; keep fewer out")
    order = torch.randperm(len(names), generator=torch.Generator().manual_seed(seed)).tolist()
    chosen = {names[i] for i in order[:prompts]}
    training = [row for row, name in zip(rows, prompts_of, strict=True) if name not in chosen]
    return training, [by_prompt[name] for name in names if name in chosen]


def run(args: argparse.Namespace) -> None:
    jobs = jobs_of(args)
    config, output = jobs[0].config, args.output
    asked = read_prompt_sets(args.prompts, args.limit)
    args.pool = args.pool or list(asked)
    plain = set(asked if args.baseline == [] else args.baseline or ())
    if unknown := [name for name in [*args.pool, *plain] if name not in asked]:
        raise UserError(f"{unknown[0]!r} is not a set to decode: {', '.join(asked)}")
    if (written := output / "result.json").exists() and len(json.loads(written.read_text())["runs"]) == len(jobs):
        raise UserError(f"{written} is there already; choose another --output or remove it")
    work = output / "work"
    work.mkdir(parents=True, exist_ok=True)
    journal = Journal(work / "journal.json", args.argv)
    answered = journal.stage("answers", lambda: {"files": args.answers or regenerated(args, config)})
    seconds = {"regenerate": answered["seconds"]}
    with timed(seconds, "load"):
        target = Target.load(args.target, config.device, config.dtype)
        sets = {
            name: [EncodedPrompt(p.id, encode_chat(target.tokenizer, p.messages, tools=p.tools)) for p in prompts]
            for name, prompts in asked.items()
        }
        forbidden = {tuple(prompt.token_ids) for prompts in sets.values() for prompt in prompts}
        longest = min(packing(job.config, target.device)[0] or sys.maxsize for job in jobs)
        longest = min(longest, *(job.config.prompts.max_length for job in jobs))
        rows, left_out = usable(read_rows(answered["files"], target), longest, forbidden)
        held = args.held_out if args.held_out is not None else 256 if args.variant else 0
        rows, held_out = hold_out(rows, held, config.run.seed)
    lab, runs = Lab(target, rows, held_out, work), []
    for job in jobs:
        print(f"\n== {job.name}: {job.minutes:g} minutes of training, {' '.join(job.overrides)}", file=sys.stderr)
        folder, report = drafter_of(args, job.name), output / f"report-{job.name}"
        trained = journal.stage(f"train {job.name}", functools.partial(lab.train, job, folder))
        figures = {"name": job.name, "minutes": job.minutes, "settings": job.overrides} | trained
        figures["seconds"] = dict(trained["parts"])
        del figures["parts"]
        if sets:
            now = plain if job is jobs[-1] else set()
            decoded = journal.stage(
                f"decode {job.name}", functools.partial(decode, target, folder, report, sets, now, args)
            )
            figures = decoded | figures | {"seconds": figures["seconds"] | {"evaluation": decoded["seconds"]}}
        runs.append(figures)
        total = sum(seconds.values()) + sum(sum(run["seconds"].values()) for run in runs)
        result = {
            **setting("bench/train_real.py", [without_folders(word) for word in args.argv]),
            "target": Path(args.target).name,
            "answers": {
                "regenerated": not args.answers, "rows": len(rows), "tokens": sum(row.response_tokens for row in rows),
                "held_out": len(held_out), "left_out": left_out,
            },
            "seconds": seconds | {"total": round(total, 1)},
            "runs": runs,
        }  # fmt: skip
        write_json(written, result)
    print(f"\n{table(result, list(sets))}\n\n{total:.0f} s in all; {written}")


def teacher_forced_length(
    drafter: Drafter, target: Target, source: FeatureSource, rows: list[Row], config: TrainConfig
) -> float:
    """Mean over blocks of `rows` of 1 + the slots drafted right before the first wrong one.

    The blocks are drawn from the rows and the options of packing alone, so every drafter of one block size sees the
    same ones. An estimate of tau: real decoding takes its anchors where the last block ended.

    Args:
        rows: with at least one anchor each.
    """
    tokens, count = packing(config, target.device)
    flex = use_flex(config.run.attention, target.device)
    schedule: Schedule | PackedSchedule = Schedule(len(rows), config.optim.batch_size, epochs=1, steps=0, seed=0)
    if tokens:
        schedule = PackedSchedule([min(len(row.tokens), tokens) for row in rows], tokens, epochs=1, steps=0, seed=0)
    length, seen = 0.0, 0
    for step in range(schedule.total):
        features = source([rows[i] for i in schedule.indices(step)])
        blocks = sample_blocks(
            features, count or config.loss.anchors, config.drafter.block_size, drafter.config.mask_token_id,
            rng_for(0, 2, step), fixed=bool(tokens),
        )  # fmt: skip
        # computes unused gradients, so that the step that was compiled for training also runs here
        result = compute_loss(drafter, target, features, blocks, config, flex)
        valid = int(blocks.valid.sum())
        length += valid * float(result.acceptance_length.detach())
        seen += valid
    return length / seen


def main(argv: Sequence[str] | None = None) -> int:
    """The program. Exit codes: 0 done, 2 a mistake (one line), 130 interrupted (run again to go on)."""
    args = parse(argv)
    args.argv = list(sys.argv[1:] if argv is None else argv)
    return run_command(lambda: run(args))


if __name__ == "__main__":
    raise SystemExit(main())
