"""Measures the acceptance length of a run's drafters on held-out prompts, and exports the best or the last one."""

import shutil
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dflash_toolkit.calibration import Calibration
from dflash_toolkit.config import UserError
from dflash_toolkit.models.dflash.checkpoint import load_drafter, save_drafter
from dflash_toolkit.models.dflash.network import Drafter

from ..distributed.parallel import Processes
from .cost import duration
from .definition import Export, Run
from .held_out import Evaluation, HeldOut
from .memory import still_needed
from .report import Report
from .resume_point import ResumePoint, TrainState


@dataclass(frozen=True, slots=True)
class _Chosen:
    """The drafter to export, and the other one."""

    drafter: Drafter
    evaluation: Evaluation | None  # the final one
    other: tuple[Drafter, Export] | None = None


class Measuring:
    """Decodes held-out prompts on the first process (and its peers); saves the best drafter so far as `work`/best.STEP.

    Every process calls the methods with a `Report` argument.

    Raises:
        UserError: the option is engine, but the engine does not support the target; from `conclude`, a selector that
            makes drafts worse, unless it must be exported.
    """

    def __init__(self, run: Run, point: ResumePoint | None, processes: Processes) -> None:
        self._run, self._processes = run, processes
        self._held_out: HeldOut | None = None
        if run.held_out:
            shape, options = run.drafter.config, run.config.run
            reserve = 0.0
            if run.target.device.type == "cuda":
                reserve = still_needed(run.config, run.target.config, run.drafter, processes.world)
            self._held_out = processes.first_group(HeldOut, run.target, shape, run.held_out, options, reserve)
        kept = [point.best, point.latest] if point else [None, None]
        self._best, self._latest = (Evaluation.of_state(state) if state else None for state in kept)
        processes.rank_zero(self._discard_others)

    @property
    def nbytes(self) -> int:
        """Bytes that a measurement allocates on the GPU of this process, in addition to the drafter's copy."""
        return self._held_out.engine_bytes if self._held_out else 0

    def due(self, state: TrainState) -> bool:
        """Whether to measure the drafter of this step."""
        every = self._run.config.run.evaluate_every
        return bool(self._run.held_out) and (state.done >= 1 or (every > 0 and state.step % every == 0))

    def __call__(self, trained: Drafter, step: int, report: Report) -> None:
        """Decodes with the drafter of this step."""
        found = self._processes.first_group(self._decode, trained, step, report)
        self._processes.rank_zero(self._keep, found, trained, step, report)

    def missing(self, step: int) -> bool:
        """Whether the last step was not measured, e.g. in a run that was killed after its last save."""
        return bool(self._run.held_out) and (self._latest is None or self._latest.step != step)

    def conclude(
        self, trained: Drafter, step: int, report: Report
    ) -> tuple[Export | None, Export | None, Evaluation | None]:
        """Exports the last drafter, or the best one during training if it is clearly better.

        Both are decoded on the prompts that were not looked at during training, at full length, so the comparison does
        not depend on the number of measurements before. The other one of the two is exported as well.

        Returns the export, the other one, and the last measurement during training.
        """
        candidate = self._processes.rank_zero(self._candidate, step)
        chosen = _Chosen(trained, None)
        alone = calibration = None
        if self._run.held_out:
            drafters = [(step, trained)] + ([candidate] if candidate else [])
            count = self._processes.broadcast(len(drafters))
            began = time.perf_counter()
            if self._held_out and self._processes.main:
                report.bar.print(
                    f"final measurement of the last drafter{', and the best one during training' * (count > 1)}: "
                    f"{self._held_out.final_work} each"
                )
            measured = [
                self._processes.first_group(self._decode_final, *(drafters[i] if i < len(drafters) else drafters[0]))
                for i in range(count)
            ]
            chosen = self._processes.rank_zero(self._choose, drafters, measured) or chosen
            at = chosen.evaluation.step if chosen.evaluation else step
            if self._run.drafter.config.has_selector:
                alone = self._processes.first_group(self._decode_without_selector, chosen.drafter, at)
            calibration = self._processes.first_group(self._calibrate, chosen.drafter)
            if self._processes.main:
                report.bar.print(f"the final measurement took {duration(time.perf_counter() - began)}")
        exports = self._processes.rank_zero(self._export, chosen, alone, calibration, step, report)
        return (*(exports or (None, None)), self._latest)

    def to_state(self) -> dict[str, Any]:
        """Returns the measurement's fields of a `ResumePoint`."""
        kept = {"best": self._best, "latest": self._latest}
        return {name: evaluation and evaluation.to_state() for name, evaluation in kept.items()}

    # ---- the first process and its peers ----------------------------------------------------------------------

    def _decode(self, trained: Drafter, step: int, report: Report) -> Evaluation:
        assert self._held_out is not None
        return self._held_out(trained, step, report.bar)

    def _decode_final(self, step: int, drafter: Drafter) -> Evaluation:
        assert self._held_out is not None
        return self._held_out.final(drafter, step)

    def _decode_without_selector(self, drafter: Drafter, step: int) -> Evaluation:
        assert self._held_out is not None
        return self._held_out.without_selector(drafter, step)

    def _calibrate(self, drafter: Drafter) -> Calibration | None:
        assert self._held_out is not None
        return self._held_out.calibration(drafter, selector=not self._leaves_selector_out)

    # ---- the first process ------------------------------------------------------------------------------------

    def _keep(self, found: Evaluation, trained: Drafter, step: int, report: Report) -> None:
        self._latest = found
        report.write(step, found.values())
        report.bar.print(f"step {step}: acceptance length {found} on {found.prompts} held-out prompts")
        if self._best is None or not found.tau < self._best.tau:  # the later of equals; also if no response was long
            self._best = found
            save_drafter(trained, _kept(self._run.work, step), {"step": step})
        report.summarise(best_acceptance_length=self._best.tau)

    def _candidate(self, step: int) -> tuple[int, Drafter] | None:
        """Returns the best drafter during training and its step, unless it is the last one, or not better."""
        best, latest = self._best, self._latest
        if best is None or latest is None or best.step == step or not best.tau > latest.tau:
            return None
        return best.step, load_drafter(str(_kept(self._run.work, best.step)))

    def _choose(self, drafters: list[tuple[int, Drafter]], measured: list[Evaluation]) -> "_Chosen":
        (_, trained), latest = drafters[0], measured[0]
        if len(drafters) == 1:
            return _Chosen(trained, latest)
        (_, earlier), best = drafters[1], measured[1]
        if best.clearly_better_than(latest):
            return _Chosen(earlier, best, (trained, Export("last", latest.step, latest)))
        return _Chosen(trained, latest, (earlier, Export("best", best.step, best)))

    @property
    def _leaves_selector_out(self) -> bool:
        return self._run.config.run.export_selector == "never" and self._run.drafter.config.has_selector

    def _export(
        self,
        chosen: "_Chosen",
        alone: Evaluation | None,
        calibration: Calibration | None,
        step: int,
        report: Report,
    ) -> tuple[Export, Export | None]:
        evaluation = chosen.evaluation
        if evaluation:
            report.summarise(acceptance_length=evaluation.tau, acceptance_length_error=evaluation.standard_error)
        wanted = self._run.config.run.export_selector
        if wanted == "better" and evaluation and alone and alone.clearly_better_than(evaluation):
            raise UserError(
                f"the selector makes drafts worse, {evaluation.tau:.3f} tokens per step, {alone.tau:.3f} without it, "
                f"on {alone.prompts} held-out prompts; nothing was exported: train longer, or run the same command "
                f"with run.export_selector=never to leave it out (always exports it)"
            )
        left_out = self._leaves_selector_out
        if left_out:
            evaluation, alone = alone, None
        exported = Export("exported", evaluation.step if evaluation else step, evaluation, alone)
        drafter = chosen.drafter.without_selector() if left_out else chosen.drafter
        if calibration:
            drafter.config = replace(
                drafter.config, acceptance_slope=calibration.slope, acceptance_bias=calibration.bias
            )
        self._run.export(drafter, exported)
        if chosen.other:
            drafter, made = chosen.other
            # the measurement was with the selector
            other = (drafter.without_selector(), replace(made, evaluation=None)) if left_out else (drafter, made)
            self._run.export(*other)
        return exported, chosen.other and chosen.other[1]

    def _discard_others(self) -> None:
        """Removes drafters of a run that was killed after its resume point; the best counts if its weights exist."""
        best, work = self._best, self._run.work
        for step in kept_steps(work):
            if best is None or step != best.step:
                discard(work, step)
        if best and not (_kept(work, best.step) / "model.safetensors").exists():
            self._best = None


def kept_steps(work: Path) -> list[int]:
    """Returns the steps of the drafters that exist."""
    found = (path.name.partition(".")[2] for path in work.glob("best.*"))
    return [int(step) for step in found if step.isdecimal()]


def discard(work: Path, step: int) -> None:
    shutil.rmtree(_kept(work, step), ignore_errors=True)


def _kept(work: Path, step: int) -> Path:
    return work / f"best.{step}"
