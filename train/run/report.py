"""Reports a run: progress bar, metrics.jsonl and W&B, speed and remaining cost."""

import contextlib
import math
from collections.abc import Iterable
from typing import Any

import numpy as np
from torch import Tensor

from dflash_toolkit.progress import Progress

from ..distributed.parallel import Processes
from ..objective.loss import RECALL, DraftLoss
from ..optim.schedule import PackedSchedule, Schedule
from ..responses.corpus import lengths_of
from .cost import before_training, drafter_step_flops, once_measured
from .definition import Run
from .metrics_log import MetricsLog, Speed
from .resume_point import TrainState
from .training_budget import Budget, TrainingClock


class Report:
    """Reports of a run; only the first process has the log and the bar. The caller enters `bar`."""

    def __init__(
        self, run: Run, budget: Budget, schedule: Schedule | PackedSchedule, step: int, processes: Processes
    ) -> None:
        self._run, self._budget, self._schedule, self._processes = run, budget, schedule, processes
        options, path = run.config.run, run.work / "metrics.jsonl"
        self._log = processes.rank_zero(MetricsLog, path, step, options.wandb, run.record or run.fingerprint)
        self._lengths = np.minimum(lengths_of(run.rows), run.config.prompts.row_tokens)
        self._speed = Speed(run.target.device)
        self._cost_reported = False
        self._trained_s = 0.0  # seconds of training so far
        self._seconds = max(1, round(budget.seconds)) if budget.seconds else 0  # for the bar of a run by the clock
        stage, total = ("training s", self._seconds) if self._seconds else ("training", budget.steps)
        self.bar = Progress(stage, total, unit="tok")

    def close(self) -> None:
        if self._log:
            self._log.close()

    def begin(self, state: TrainState, clock: TrainingClock, group: int, features: int) -> None:
        """Reports the start of training, or of its continuation. Args: features: bytes of all rows' features."""
        self._trained_s = clock.seconds
        run, budget, schedule = self._run, self._budget, self._schedule
        self._reach(state, 0)
        if self._processes.main:
            epochs = min(schedule.total, budget.end) / schedule.per_epoch
            self._print(before_training(run.config, run.drafter, run.rows, budget.steps, epochs, features, run.work))
            if budget.steps:
                self._print(f"warning: {warning}" for warning in budget.too_short(budget.steps))
        if state.step:
            self._print([f"resuming at {budget.place(state.step, clock.seconds)}"])
        if state.micro != state.step * group:
            self._print([f"resuming with {group} micro batches per step, after {state.micro} in {state.step} steps"])

    def due(self, state: TrainState) -> bool:
        """Whether to log this step."""
        return state.done >= 1 or state.step % self._run.config.run.log_every == 0

    def data(self) -> contextlib.AbstractContextManager[None]:
        """Times the wait for features inside."""
        return self._speed.data()

    def paused(self) -> contextlib.AbstractContextManager[None]:
        """Excludes the time inside."""
        return self._speed.paused()

    def step(
        self, state: TrainState, clock: TrainingClock, rows: list[int], totals: Tensor, norm: Tensor, rate: float
    ) -> None:
        """Reports a step. Args: rows: of the step. totals: of its loss, then its visible pairs; on the device."""
        tokens = int(self._lengths[rows].sum())
        self._trained_s = clock.seconds
        self._speed.count(tokens, len(rows))
        if self.due(state):
            self._processes.rank_zero(self._log_step, state, totals, norm, rate, tokens)
        self._reach(state, tokens)
        if clock.pace and not self._cost_reported:
            self._cost_reported = True
            config, left = self._run.config, self._budget.steps_left(state.step, clock.seconds, clock.pace)
            every = config.run.evaluate_every if self._run.held_out else 0
            if left > 0:
                measured, world = left // every if every else 0, self._processes.world
                self._print(once_measured(config, left, clock.pace, measured, self._speed.memory(), world))

    def write(self, step: int, values: dict[str, Any]) -> None:
        """Writes a line of metrics.jsonl."""
        if self._log:
            minutes = self._trained_s / 60 * self._processes.world
            self._log.write(step, values | {"gpu_minutes": minutes})

    def summarise(self, **values: float) -> None:
        """Sets the run's summary in W&B."""
        if self._log:
            self._log.summarise(**values)

    def _log_step(self, state: TrainState, totals: Tensor, norm: Tensor, rate: float, tokens: int) -> None:
        run, block_size = self._run, self._run.config.drafter.block_size
        loss = DraftLoss.of_totals(totals[:-1], block_size - 1)
        values = log_values(loss, norm, rate, self._schedule.epoch(state.micro))
        slots, vocab = int(loss.blocks) * block_size, len(run.target.head_weight)
        work = drafter_step_flops(run.drafter.config, tokens, slots, int(totals[-1]), loss.rows, vocab)
        rates = self._speed.take(work / self._processes.world)
        self.write(state.step, values | rates)
        note = f"loss {values['loss']:.2f} tau~{values['estimated_acceptance_length']:.1f}"
        self.bar.advance(0, 0, note + (f" mfu {rates['mfu']:.0%}" if "mfu" in rates else ""))

    def _reach(self, state: TrainState, tokens: int) -> None:
        self.bar.reach(self._seconds * state.done if self._seconds else state.step, units=tokens)

    def _print(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.bar.print(line)


def log_values(result: DraftLoss, norm: Tensor, learning_rate: float, epoch: float) -> dict[str, Any]:
    """Returns the values of a line of metrics.jsonl, without the rates."""
    overlap = {} if result.slot_overlap is None else {"slot_overlap": result.slot_overlap.tolist()}
    selector = float(result.selector_loss)
    chain = {} if math.isnan(selector) else {
        "selector_loss": selector,
        "estimated_unary_length": float(result.unary_length),  # with each slot's best token drafted
        "estimated_oracle_length": float(result.oracle_length),  # with the right token drafted if it is a candidate
    }  # fmt: skip
    return {
        "loss": float(result.loss.detach()),
        "slot_accuracy": result.recall[0].tolist(),
        **{f"recall_at_{k}": result.recall[i].tolist() for i, k in enumerate(RECALL) if k > 1},
        **overlap,
        "estimated_acceptance_length": float(result.acceptance_length),
        **chain,
        "rows": result.rows,
        "gradient_norm": float(norm),
        "learning_rate": learning_rate,
        "epoch": round(epoch, 4),
    }
