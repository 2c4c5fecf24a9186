"""The training loop: features -> blocks -> drafter -> loss -> step. `run/` measures, saves and reports."""

import contextlib
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from dflash_toolkit.config import UserError

from .distributed.parallel import Processes
from .distributed.zero import Learner, make_learner
from .features.gpu_memory import begin as begin_peak
from .features.gpu_memory import enough_memory, offload
from .features.source import FeatureSource, open_features
from .gradients import add_gradients
from .optim.schedule import PackedSchedule, Schedule, make_schedule, packing, rng_for
from .responses.corpus import lengths_of
from .run.definition import Outcome, Run
from .run.measure import Measuring
from .run.report import Report
from .run.resume_point import TrainState, load_state
from .run.save import Saving
from .run.training_budget import Budget, TrainingClock

SETTLING_STEPS = 3  # steps until a compiled step has been compiled for every shape


def train(run: Run, processes: Processes | None = None, source: FeatureSource | None = None) -> Outcome:
    """Trains `run.drafter` and calls `run.export` with the result.

    A step computes `accumulate` times `world` micro batches of the schedule, dealt to the processes in turn. Its loss
    is normalised by the sum of their weights, so it does not depend on the number of processes.

    Args:
        source: features that several runs share (default: those of `config.run.features`).

    Raises:
        UserError: disk full, no memory for features, or `run.work` holds another run, or a longer one.
    """
    config, device, drafter = run.config, run.target.device, run.drafter
    processes = processes or Processes()
    group = config.optim.accumulate * processes.world  # micro batches of a step

    state_file = run.work / "state.pt"
    point = processes.barrier(load_state, state_file, run.fingerprint)
    if len(set(processes.all_gather(point and point.step))) > 1:
        raise UserError(f"{state_file} differs between machines; all machines must share the output directory")
    state = TrainState(point.step, point.micro, point.rate) if point else TrainState()
    schedule = make_schedule(config, device, lengths_of(run.rows), group, point)
    measure = Measuring(run, point, processes)  # before the features, which fill the rest of a GPU's memory
    budget = processes.barrier(Budget, config.optim, schedule, group, point, run.work.parent)
    if source is None:
        taps, mine = drafter.config.target_layer_ids, schedule.rows_of(processes.rank, processes.world)
        source = open_features(config, run.target, taps, run.rows, run.work, mine, processes, after_step=True)
    if config.run.offload_target:
        offload(run.target)
        drafter.to(device)
    learner = make_learner(drafter, config, processes, point, run.work, bool(packing(config, device)[0]))
    clock = TrainingClock(
        device,
        seconds=point.elapsed_s if point else 0.0,
        settling=SETTLING_STEPS if device.type == "cuda" or config.run.compile == "on" else 1,
        bounded=budget.seconds > 0,
    )
    state.done = processes.broadcast(budget.done(state.step, clock.seconds))
    report = Report(run, budget, schedule, state.step, processes)
    save = Saving(run, processes, report.bar.print)
    gradients = Gradients(run, schedule, budget.end, source, learner, report, processes.world)

    with contextlib.closing(report), contextlib.closing(save), enough_memory(config):
        with report.bar:
            report.begin(state, clock, group, source.nbytes(run.rows))
            if config.init_from and state.step == 0 and run.held_out:
                with report.paused():
                    measure(learner.whole(), 0, report)  # the start, to show the gain
            first = state.step + 1
            while state.done < 1 or not state.step:
                state.rate = budget.rate(state)
                for parameters in learner.param_groups:
                    parameters["lr"] = learner.peak * state.rate
                turns = range(state.micro + processes.rank, state.micro + group, processes.world)
                totals = torch.stack([gradients(turn, state.done, last=turn == turns[-1]) for turn in turns]).sum(0)
                norm = learner.step(processes.sum(totals)[1])
                taken = range(state.micro, min(state.micro + group, budget.end))
                state.step, state.micro = state.step + 1, taken.stop
                clock.tick()

                done = budget.done(state.step, clock.seconds)
                state.done, overdue, failed = processes.broadcast((done, save.overdue, save.failed))
                if failed:
                    save.wait()  # raises
                saves, measures = save.due(state, overdue), measure.due(state)
                if saves or measures or report.due(state):
                    check_finite(norm, state.step, learner.peak)
                rows = [row for turn in taken for row in schedule.indices(turn)]
                report.step(state, clock, rows, totals, norm, learner.peak * state.rate)
                if source.waits and state.step == first:
                    begin_peak(device)  # the optimiser's state exists only now
                elif source.waits:
                    with clock.paused(), report.paused():  # measuring and exporting copy the drafter
                        copies = 2 * sum(p.numel() * 2 for p in drafter.parameters())
                        source.take_memory(copies + measure.nbytes, report.bar)
                if saves or measures:  # a pause waits for the device; other steps do not
                    with clock.paused(), report.paused():
                        if measures:
                            measure(learner.whole(), state.step, report)
                        if saves:
                            others = budget.to_state() | measure.to_state()
                            save(learner, state, clock.seconds, schedule.history(state.micro), others)
                            processes.barrier(source.check)  # one process's error; after the save, so no step is lost
                if save.stops and state.done < 1:
                    save.wait()
                    raise KeyboardInterrupt(
                        f"interrupted after step {state.step}; run the same command again to resume"
                    )
            if processes.broadcast(measure.missing(state.step)):
                measure(learner.whole(), state.step, report)
        save.wait()
        processes.barrier(source.flush)
        exported, other, followed = measure.conclude(learner.whole(), state.step, report)
    return Outcome(state.step, clock.seconds, exported, other, budget.too_short(state.step), followed)


@dataclass(frozen=True, slots=True)
class Gradients:
    """Accumulates the gradients of micro batches, given their turn in the schedule."""

    run: Run
    schedule: Schedule | PackedSchedule
    end: int  # number of turns in the run
    source: FeatureSource
    learner: Learner
    report: Report
    world: int  # processes that share the turns

    def __call__(self, turn: int, done: float, last: bool) -> Tensor:
        """Accumulates the gradients of one micro batch; past the end of its lane, those of other rows times zero.

        Returns the loss's totals and the number of visible pairs, on the device.

        Args:
            done: share of the run that is done.
            last: whether it is this process's last micro batch of the step.
        """
        run, config, source = self.run, self.run.config, self.source
        with self.report.data():
            taken = self.schedule.indices(turn) if turn < self.end else []
            features = source([run.rows[i] for i in taken or self.schedule.spare(turn)])
            if source.reads_ahead and turn + self.world < self.end:
                source.ahead([run.rows[i] for i in self.schedule.indices(turn + self.world)])
        random = rng_for(config.run.seed, 2, turn)
        return add_gradients(
            self.learner, run.target, features, config, random, done=done, last=last, counts=bool(taken)
        )


def check_finite(norm: Tensor, step: int, rate: float) -> None:
    """Raises UserError if training has diverged, before the weights are saved."""
    if not math.isfinite(float(norm)):
        raise UserError(
            f"step {step}: the gradient is not a number; lower optim.learning_rate ({rate:g}) and train again "
            f"(nothing of this step was saved)"
        )
