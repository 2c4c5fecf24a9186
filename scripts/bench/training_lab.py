"""Trains drafters one after the other on shared features: the work of train_real.py. It resumes a run that was stopped.

Under torchrun every process calls the same methods; the first one exports and writes files.
"""

import contextlib
import fcntl
import functools
import json
import math
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dflash_toolkit import Drafter, Target, UserError, load_drafter, save_drafter
from dflash_toolkit.files import write_json
from dflash_toolkit.fingerprint import template_digest, tokens_digest
from dflash_toolkit.models.dflash.checkpoint import tensor_shapes
from dflash_toolkit.record import RECORD_KEY, export_record
from dflash_toolkit.train.config import TrainConfig
from dflash_toolkit.train.data_options import ResponseOptions
from dflash_toolkit.train.distributed.parallel import Processes
from dflash_toolkit.train.features.source import FeatureSource, features_key, open_features
from dflash_toolkit.train.loop import train
from dflash_toolkit.train.objective.blocks import sample_blocks
from dflash_toolkit.train.objective.loss import compute_loss, use_flex
from dflash_toolkit.train.optim.optimizers import peak_rate, uses_muon
from dflash_toolkit.train.optim.schedule import PackedSchedule, Schedule, packing, rng_for
from dflash_toolkit.train.responses.join import joined
from dflash_toolkit.train.responses.rows import Row
from dflash_toolkit.train.run.definition import Export, Run
from dflash_toolkit.train.run.prepare import drafter_config

from .decode_sets import release, rounded

WARM_UP_STEPS = 3  # compile what the run needs
CURVE = ("step", "gpu_minutes", "loss", "estimated_acceptance_length", "sequences_per_second", "epoch")
SELECTOR = ("estimated_unary_length", "estimated_oracle_length")  # without it, and with its best choice
CURVE_POINTS = 50


class Job(NamedTuple):
    """One training."""

    name: str
    variant: str
    minutes: float  # GPU minutes of training, all GPUs together
    prompts: int  # prompts that are trained on; 0 is all
    overrides: list[str]
    config: TrainConfig

    @property
    def sampler(self) -> ResponseOptions:
        """How the responses that it trains on are sampled."""
        return self.config.responses


@dataclass(frozen=True)
class Responses:
    """The rows of one way to sample, and what they took."""

    rows: list[Row]
    held_out: list[Row]
    seconds: float  # time of all processes to write all of them

    @property
    def tokens(self) -> int:
        return tokens_in(self.rows)


def tokens_in(rows: list[Row]) -> int:
    """Returns the response tokens of rows."""
    return sum(row.response_tokens for row in rows)


class Journal:
    """Figures of the finished stages; the same command resumes after them.

    Raises:
        UserError: the file is of another command.
    """

    def __init__(self, path: Path, command: list[str], processes: Processes) -> None:
        self._path, self._processes = path, processes
        self._kept: dict[str, Any] = {"command": command}
        if path.exists():
            self._kept = json.loads(path.read_text())
            if self._kept["command"] != command:
                raise UserError(f"{path.parent} is of another command; choose another --output or remove it")

    def stage(self, name: str, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Returns the figures of `work` and its seconds; reuses those of an earlier run."""
        if not self._processes.broadcast(name in self._kept):
            began = time.perf_counter()
            figures = work() | {"seconds": round(time.perf_counter() - began, 1)}
            self._kept[name] = self._processes.broadcast(figures)
            if self._processes.main:
                write_json(self._path, self._kept)
        return self._processes.broadcast(self._kept.get(name, {}))


class Turns:
    """Lets programs prepare on one GPU at the same time, and measures each of them alone.

    A program holds the file's lock shared while it prepares, and exclusively while it is measured. So the first one is
    measured when all have prepared.

    Args:
        file: the same for all programs; None for a program that has the GPU to itself.
    """

    def __init__(self, file: Path | None) -> None:
        self._file = open(file, "a") if file else None  # noqa: SIM115, open until the program ends
        self._lock(fcntl.LOCK_SH)

    def _lock(self, kind: int) -> None:
        if self._file:
            fcntl.flock(self._file, kind)

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Waits until no other program computes, and lets none do so meanwhile."""
        release()  # memory that others need
        self._lock(fcntl.LOCK_EX)
        try:
            yield
        finally:
            self._lock(fcntl.LOCK_SH)


class Lab:
    """Holds the objects that runs share: the target, and the features of the same rows and tapped layers."""

    def __init__(self, target: Target, work: Path, processes: Processes, turns: Turns) -> None:
        self.target, self._work, self._processes, self._turns = target, work, processes, turns
        self._key: tuple[object, ...] = ()
        self._source: FeatureSource | None = None
        self._fill_s = 0.0  # seconds that filled it

    def drafter(self, config: TrainConfig) -> Drafter:
        """A fresh one, or the one to start from."""
        if config.init_from:
            return load_drafter(config.init_from, self.target.device, torch.float32).train().requires_grad_()
        drafter = Drafter(drafter_config(config, self.target.config, self.target.tokenizer))
        drafter.init_weights(torch.Generator().manual_seed(config.run.seed))
        drafter = drafter.to(self.target.device).train()
        drafter.config.architecture.fit_head(drafter, self.target.head_weight)
        return drafter

    def _features(self, config: TrainConfig, taps: tuple[int, ...], responses: Responses) -> FeatureSource | None:
        """Returns features of all rows, shared by runs; None if several processes each keep their own."""
        if self._processes.world > 1:
            return None
        key = (id(responses), *features_key(config, self.target, taps))
        if self._source is None or key != self._key:
            self._source = None  # its memory first
            release()
            began = time.perf_counter()
            rows = [*training_rows(config, responses.rows), *responses.held_out]
            self._source, self._key = open_features(config, self.target, taps, rows, self._work), key
            self._fill_s = time.perf_counter() - began
        return self._source

    def train(self, job: Job, responses: Responses, folder: Path) -> dict[str, Any]:
        """Trains a drafter, exports it to `folder`, and returns its figures."""
        release()
        config, work, seconds = job.config, self._work / job.name, dict[str, float]()
        if config.init_from:
            rate = peak_rate(config.optim, uses_muon(config, self.target.device.type == "cuda"), warm=True)
            config = replace(config, optim=replace(config.optim, learning_rate=rate))
        shape = self.drafter(config).config
        rows = of_prompts(responses.rows, job.prompts)
        tokens = tokens_in(rows)
        with timed(seconds, "features"):
            source = self._features(config, shape.target_layer_ids, responses)
        prompts, rows = prompts_in(rows), training_rows(config, rows)
        with timed(seconds, "compile"):
            online = config.run if source else replace(config.run, features="online", feature_cache_gb=0.0)
            short = replace(config, optim=replace(config.optim, minutes=0.0, steps=WARM_UP_STEPS), run=online)
            self._processes.rank_zero(functools.partial(shutil.rmtree, self._work / "warm-up", ignore_errors=True))
            self._run(short, rows, self._work / "warm-up", source, keep_nothing)
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        note = {"template_hash": template_digest(self.target.tokenizer)}

        def export(trained: Drafter, made: Export) -> None:
            save_drafter(trained, folder, note | {RECORD_KEY: export_record(trained, self.target)})

        with self._turns.alone(), timed(seconds, "training"):
            outcome = self._run(config, rows, work, source, export)
        peak = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else None
        held_out = None
        if responses.held_out and source and self._processes.main:
            with timed(seconds, "held_out"):
                exported = load_drafter(str(folder), self.target.device, torch.float32).train()
                held_out = teacher_forced_length(exported, self.target, source, responses.held_out, config)
        if not self._processes.main:
            return {}
        curve = [json.loads(line) for line in (work / "metrics.jsonl").read_text().splitlines()]
        epochs = curve[-1]["epoch"]
        every = -(-len(curve) // CURVE_POINTS)
        thinned = [line for i, line in enumerate(curve) if i % every == 0 or line is curve[-1]]
        share = tokens / max(1, responses.tokens)
        minutes = {
            "responses": share * responses.seconds / 60,
            "features": (share * self._fill_s if source else seconds["training"] - outcome.elapsed_s)
            * self._processes.world / 60,
            "training": outcome.elapsed_s * self._processes.world / 60,
        }  # fmt: skip
        return {
            "kind": shape.architecture.kind,
            "parameters": sum(math.prod(sides) for sides in tensor_shapes(shape).values()),
            "prompts": prompts,
            "rows": len(rows),
            "response_tokens": tokens,
            "seen_tokens": round(epochs * tokens),
            "steps": outcome.steps,
            "epochs": epochs,
            "gpu_minutes": {name: round(each, 3) for name, each in minutes.items()}
            | {"total": round(sum(minutes.values()), 3)},
            "sequences_per_second": rounded(epochs * len(rows) / outcome.elapsed_s),
            "peak_gib": rounded(peak),
            "held_out_tau": rounded(held_out),
            "parts": seconds,
            "curve": [{key: line[key] for key in (*CURVE, *SELECTOR) if key in line} for line in thinned],
        }

    def _run(
        self, config: TrainConfig, rows: list[Row], work: Path, source: FeatureSource | None,
        export: Callable[[Drafter, Export], None],
    ) -> Any:  # fmt: skip
        """Trains; continues from the resume point of `work`, which is removed at the end."""
        self._processes.rank_zero(functools.partial(work.mkdir, parents=True, exist_ok=True))
        run = Run(config, self.target, self.drafter(config), rows, [], work, {}, export)
        outcome = train(run, self._processes, source)
        self._processes.rank_zero((work / "state.pt").unlink)
        return outcome


# ---- rows ------------------------------------------------------------------------------------------------------------


def training_rows(config: TrainConfig, rows: list[Row]) -> list[Row]:
    """Returns the rows, joined if the options say so."""
    length = config.prompts.join_to
    return list(joined(rows, length, config.run.seed)) if length else rows


def prompt_of(row: Row) -> bytes:
    return tokens_digest(row.tokens[: row.prompt_tokens])


def prompts_in(rows: list[Row]) -> int:
    return len({prompt_of(row) for row in rows})


def of_prompts(rows: list[Row], count: int) -> list[Row]:
    """Returns the rows of `count` of their prompts, of which a smaller number are a subset; 0 is all.

    Raises:
        UserError: there are fewer.
    """
    names = list(dict.fromkeys(map(prompt_of, rows)))
    if count > len(names):
        raise UserError(f"--training-prompts has {count}, but there are {len(names)} prompts; give at most that many")
    order = torch.randperm(len(names), generator=torch.Generator().manual_seed(0)).tolist()
    chosen = {names[i] for i in order[: count or len(names)]}
    kept = [row for row in rows if prompt_of(row) in chosen]
    return [replace(row, index=i) for i, row in enumerate(kept)]


# ---- helpers ---------------------------------------------------------------------------------------------------------


def keep_nothing(*_: object) -> None:
    """Export nothing."""


@contextlib.contextmanager
def timed(seconds: dict[str, float], part: str) -> Iterator[None]:
    began = time.perf_counter()
    yield
    seconds[part] = round(time.perf_counter() - began, 1)


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
