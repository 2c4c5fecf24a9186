"""The training loop: features -> blocks -> drafter -> loss -> step, with resume points and real decoding."""

import contextlib
import math
import shutil
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dflash_toolkit.config import UserError, to_mapping
from dflash_toolkit.models.dflash.checkpoint import load_drafter, save_drafter
from dflash_toolkit.models.dflash.network import Drafter
from dflash_toolkit.models.target import Target
from dflash_toolkit.progress import Progress

from .config import OptimOptions, TrainConfig
from .distributed.parallel import Processes
from .distributed.zero import Learner, make_learner
from .features.memory import begin as begin_peak
from .features.memory import enough_memory
from .features.source import FeatureSource, open_features
from .objective.blocks import sample_blocks
from .objective.losses import RECALL, DraftLoss
from .objective.step import compute_loss, use_flex
from .optim.schedule import Joint, PackedSchedule, Part, Schedule, draws, joined_factor, learning_rate_factor, packing
from .responses.corpus import lengths_of
from .responses.rows import Row
from .run.cost import before_training, once_measured
from .run.flops import drafter_step_flops, visible_pairs
from .run.held_out import Evaluation, HeldOut, HeldOutPrompt
from .run.metrics import MetricsLog, Speed
from .run.state import RunState, Writer, host_copy, load_state, save_state

SETTLING_STEPS = 3  # behind which a compiled step has been compiled for every shape
TIMED_STEPS = 3  # of which the run's cost is told
PARTS = 1_000_000  # of a run by the clock


@dataclass(frozen=True, slots=True)
class Export:
    """A drafter that a run leaves behind."""

    role: str  # exported; best or last, which stand beside it
    step: int
    evaluation: Evaluation | None  # None without held-out prompts


@dataclass(slots=True)
class Outcome:
    """How a run ended. What is exported is known to the first process."""

    steps: int
    elapsed_s: float  # of training alone
    exported: Export | None = None
    beside: Export | None = None  # the one of best and last that is not exported, where they differ
    earlier: bool = False  # whether what is exported is not the end
    warnings: list[str] = field(default_factory=list)


class TrainingClock:
    """Seconds of training alone: neither of compiling, nor of what happens while it is paused.

    The first steps of a process compile. How long they would have taken without is not known before the steps behind
    them were timed, so until then no time passes, and then they are counted at that pace.

    A GPU's time is meant, and a step is on its way before it is done. So the device is waited for around the steps that
    are timed and before a pause, and where a run ends by the clock each step waits for the one before it.

    Args:
        seconds: of the run so far.
        settling: steps that compile.
        bounded: keep no more than a step on its way.
    """

    def __init__(self, device: torch.device, seconds: float, settling: int, bounded: bool) -> None:
        self.seconds = seconds
        self.pace: float | None = None  # seconds a step, once timed
        self._device, self._settling, self._bounded = device, settling, bounded
        self._first: list[float] = []
        self._ahead: deque[torch.cuda.Event] = deque()
        self._since = time.perf_counter()

    def start(self) -> None:
        """Training begins now."""
        self._since = time.perf_counter()

    def tick(self) -> None:
        """A step is behind."""
        timing = self.pace is None
        if timing:
            self._wait()
        elif self._bounded and self._device.type == "cuda":
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(self._device))
            self._ahead.append(event)
            if len(self._ahead) > 1:
                self._ahead.popleft().synchronize()
        now = time.perf_counter()
        took, self._since = now - self._since, now
        if timing:
            self._first.append(took)
            timed = self._first[self._settling :]
            if len(timed) == 1:  # the pace at which those before are counted
                self.seconds += sum(min(first, took) for first in self._first)
            elif timed:
                self.seconds += took
            if len(timed) == TIMED_STEPS:
                self.pace = sum(timed) / TIMED_STEPS
        else:
            self.seconds += took

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Time in here is no training."""
        self._wait()
        began = time.perf_counter()
        yield
        self._since += time.perf_counter() - began

    def _wait(self) -> None:
        self._ahead.clear()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


class Plan:
    """When a run ends, by optim.minutes, steps or epochs, and how fast it learns until then.

    Args:
        group: micro batches of a step.
        state: where the run goes on from; with another plan than this, the rate is led over to the new one's.

    Raises:
        UserError: the run has done more than this.
    """

    def __init__(
        self, optim: OptimOptions, schedule: Schedule | PackedSchedule, group: int, state: RunState | None, output: Path
    ) -> None:
        self._optim, self._schedule, self._group = optim, schedule, group
        self.named = plan_of(to_mapping(optim))
        step, micro = (state.step, state.micro) if state else (0, 0)
        self.steps = optim.steps or step + math.ceil((schedule.total - micro) / group)
        self.end = micro + (self.steps - step) * group if optim.steps else schedule.total  # of the micro batches
        if optim.minutes:
            self.end = sys.maxsize
        self.joint = Joint(**state.joint) if state and state.joint else None
        self.changed = bool(state and state.plan != self.named)
        if state and self.changed:
            self.joint = Joint(state.step, state.micro, state.elapsed_s, state.rate)
            epochs = schedule.epoch(micro)
            done = {"minutes": round(state.elapsed_s / 60, 2), "steps": step, "epochs": round(epochs, 2)}
            ((name, asked),) = self.named.items()
            behind = asked < (epochs if name == "epochs" else done[name])
            if behind:
                raise UserError(
                    f"optim.{name}={asked:g}: the run in {output} has done {done[name]:g} {name}; give more, or "
                    f"another --output"
                )

    def share(self, step: int, seconds: float) -> float:
        """Of the run that is done."""
        if self._optim.minutes:
            return min(1.0, seconds / (60 * self._optim.minutes))
        return step / self.steps

    def factor(self, step: int, micro: int, seconds: float) -> float:
        """Share of the peak learning rate that the next step has."""
        optim = self._optim
        done, total = self._place(step, micro, seconds)
        if self.joint is None:
            return learning_rate_factor(done, total, optim.warmup, optim.final_decay)
        since, _ = self._place(self.joint.step, self.joint.micro, self.joint.seconds)
        return joined_factor(done, total, optim.warmup, optim.final_decay, since, self.joint.rate)

    def _place(self, step: int, micro: int, seconds: float) -> tuple[int, int]:
        if self._optim.minutes:
            return round(PARTS * self.share(step, seconds)), PARTS
        if self._optim.steps:
            return step, self.steps
        # by the data: steps before a resumption may have been of another size
        return micro // self._group, math.ceil(self._schedule.total / self._group)

    def too_short(self, steps: int) -> str | None:
        """What is to be said of a run of so many steps."""
        least = math.ceil(1 / self._optim.warmup) if self._optim.warmup else 1
        if steps >= least:
            return None
        return (
            f"{steps} steps are too few to learn: optim.warmup={self._optim.warmup:g} of them is less than a step; "
            f"train for longer (from {least} steps on it is one)"
        )

    def said(self, step: int, seconds: float) -> str:
        """Where a run goes on, for people."""
        if self._optim.minutes:
            return f"step {step}, {seconds / 60:.3g} of {self._optim.minutes:g} minutes"
        return f"step {step} of {self.steps}"


def plan_of(optim: dict[str, Any]) -> dict[str, float]:
    """The one option, of a mapping of `OptimOptions`, that says when a run ends."""
    return next(({name: optim[name]} for name in ("minutes", "steps") if optim[name]), {"epochs": optim["epochs"]})


def train(
    config: TrainConfig,
    target: Target,
    drafter: Drafter,
    rows: Sequence[Row],
    held_out: Sequence[HeldOutPrompt],
    work: Path,
    fingerprint: dict[str, Any],
    export: Callable[[Drafter, Export], None],
    processes: Processes | None = None,
    source: FeatureSource | None = None,
    record: dict[str, Any] | None = None,
) -> Outcome:
    """Train `drafter` (fp32, on the target's device) and call `export` with what comes of it.

    A step takes `accumulate` times `world` micro batches of the schedule, dealt to the processes in turn. Its loss is
    normalised by the weights of all of them, so how many processes share them does not matter.

    The end is exported, unless an earlier drafter was measured to be better beyond the error of the difference
    (`Evaluation.clearly_better_than`). `export` is called once more for the other one, where the best that was measured
    is not the end. The best so far is a checkpoint in `work`, `best.STEP`.

    Args:
        rows: texts with at least one anchor each.
        held_out: prompts that are decoded to measure acceptance: some while training goes on, all of them in the end.
            May be empty, then the last is exported.
        work: directory for the resume point and metrics, the same for all processes.
        export: called by the first process.
        source: features that several runs share (default: what `config.run.features` asks for).
        record: what W&B shows as the run's configuration (default: the fingerprint).

    Raises:
        UserError: disk full, no room for features, or `work` holds another run, or one that has done more.
    """
    run, optim = config.run, config.optim
    processes = processes or Processes()
    group = optim.accumulate * processes.world  # micro batches of a step
    flex = use_flex(run.attention, target.device)
    tokens, count = packing(config, target.device)
    state_file = work / "state.pt"
    state = processes.together(load_state, state_file, fingerprint)
    if len(set(processes.gather(state and state.step))) > 1:
        raise UserError(f"{state_file} is not the same everywhere: all machines must share the output directory")
    limit = sys.maxsize if optim.minutes else optim.steps * group
    history: list[Part] = []
    if state:
        history = state.history or [(1, 0 if limit else optim.epochs, state.micro)]
    schedule: Schedule | PackedSchedule
    lengths = lengths_of(rows)
    if tokens:
        schedule = PackedSchedule(np.minimum(lengths, tokens), tokens, optim.epochs, limit, run.seed, group, history)
    else:
        schedule = Schedule(len(rows), optim.batch_size, optim.epochs, limit, run.seed, group, history)
    held = None
    if held_out:  # before the features, which take what is left of a GPU's memory
        held = processes.alone(HeldOut, target, drafter.config, held_out, run)
    plan = processes.together(Plan, optim, schedule, group, state, work.parent)
    if source is None:
        taps, mine = drafter.config.target_layer_ids, schedule.rows_of(processes.rank, processes.world)
        source = open_features(config, target, taps, rows, work, mine, processes, after_step=True)
    learner = make_learner(drafter, config, processes, state, work, bool(tokens))
    step, micro, rate = 0, 0, 0.0
    best: Evaluation | None = None
    latest: Evaluation | None = None
    if state:
        step, micro, rate = state.step, state.micro, state.rate
        best = Evaluation.of_state(state.best) if state.best else None
        latest = Evaluation.of_state(state.latest) if state.latest else None
    best = processes.alone(_forget_others, best, work)
    metrics = processes.alone(MetricsLog, work / "metrics.jsonl", step, run.wandb, record or fingerprint)
    compiled = target.device.type == "cuda" or run.compile == "on"
    clock = TrainingClock(
        target.device, state.elapsed_s if state else 0.0, SETTLING_STEPS if compiled else 1, optim.minutes > 0
    )
    speed = Speed(target.device)
    writer = Writer()
    outcome = Outcome(step, clock.seconds)

    def micro_step(turn: int, last: bool) -> Tensor:
        """Gradients of the micro batch whose turn it is in the schedule; where that is empty, of another one times
        zero."""
        with speed.data():
            taken = schedule.indices(turn) if turn < plan.end else []
            features = source([rows[i] for i in taken or schedule.spare(turn)])
            if source.reads_ahead and turn + processes.world < plan.end:
                source.ahead([rows[i] for i in schedule.indices(turn + processes.world)])
        blocks = sample_blocks(
            features, count or config.loss.anchors, config.drafter.block_size, drafter.config.mask_token_id,
            draws(run.seed, 2, turn), fixed=bool(tokens),
        )  # fmt: skip
        result = compute_loss(drafter, target, features, blocks, config, flex, learner.run)
        learner.backward(result.weighted_sum if taken else 0 * result.weighted_sum, last)
        return torch.cat([result.totals(), visible_pairs(blocks)[None].double()]) * bool(taken)

    def write(values: dict[str, Any]) -> None:
        if metrics:
            metrics.write(step, values)

    def log(totals: Tensor, norm: Tensor, seen: int) -> None:
        result = DraftLoss.of_totals(totals[:-1], config.drafter.block_size - 1)
        values = log_values(result, norm, learner, schedule.epoch(micro))
        slots = int(result.blocks) * config.drafter.block_size
        work = drafter_step_flops(drafter.config, seen, slots, int(totals[-1]), result.rows, len(target.head_weight))
        rates = speed.take(work / processes.world)
        write(values | rates)
        note = f"loss {values['loss']:.2f} tau~{values['estimated_acceptance_length']:.1f}"
        progress.advance(0, 0, note + (f" mfu {rates['mfu']:.0%}" if "mfu" in rates else ""))

    def measure(trained: Drafter) -> None:
        """The first process's. Of equal ones the later is the better one."""
        nonlocal best, latest
        assert held is not None
        latest = held(trained, step, progress)
        write(latest.values())
        progress.print(f"step {step}: acceptance length {latest} on {latest.prompts} held-out prompts")
        if best is None or not latest.tau < best.tau:  # also when no answer was long enough to measure
            best = latest
            save_drafter(trained, _kept(work, step), {"step": step})
        if metrics:
            metrics.summarise(best_acceptance_length=best.tau)

    def save() -> None:
        """A resume point, copied now and written while training goes on."""
        processes.alone(writer.wait)  # two copies are never held, and of a full disk all learn
        weights, moments, average = learner.snapshot()
        if not processes.main:
            return
        joint = asdict(plan.joint) if plan.joint else None
        evaluations = [evaluation.to_state() if evaluation else None for evaluation in (best, latest)]
        weights, moments, average = host_copy((weights, moments, average), target.device)
        point = RunState(
            step, fingerprint, weights, moments, evaluations[0], clock.seconds, micro, average, evaluations[1],
            plan.named, rate, joint, schedule.history(micro),
        )  # fmt: skip

        def write_out() -> None:
            save_state(point, state_file)
            for old in _checkpoints(work):
                if point.best and old < point.best["step"]:  # no resume point needs it any more
                    shutil.rmtree(_kept(work, old), ignore_errors=True)

        writer.begin(write_out)

    def conclude(trained: Drafter) -> None:
        """The first process's: what is exported, measured on all prompts, and what stands beside it."""
        chosen, evaluation, other = trained, latest, None
        if held is not None:
            assert latest is not None and best is not None
            if best.step != step:
                earlier = load_drafter(str(_kept(work, best.step)))
                if best.clearly_better_than(latest):
                    chosen, evaluation = earlier, best
                    outcome.earlier = True
                    other = trained, Export("last", step, latest)
                elif best.tau > latest.tau:
                    other = earlier, Export("best", best.step, best)
            assert evaluation is not None
            evaluation = held.all(chosen, evaluation)
            if metrics:
                metrics.summarise(acceptance_length=evaluation.tau, acceptance_length_error=evaluation.standard_error)
        outcome.exported = Export("exported", evaluation.step if evaluation else step, evaluation)
        export(chosen, outcome.exported)
        if other:
            outcome.beside = other[1]
            export(*other)

    def tell(lines: list[str]) -> None:
        for line in lines:
            progress.print(line)

    ending = max(1, round(60 * optim.minutes)) if optim.minutes else 0  # seconds; a run that ends by it shows it
    bar = Progress("training s", ending, unit="tok") if ending else Progress("training", plan.steps, unit="tok")
    with _closing(metrics), contextlib.closing(writer), enough_memory(config):
        with bar as progress:
            progress.reach(min(clock.seconds, ending) if ending else step, units=0)
            if processes.main:
                steps = 0 if ending else plan.steps
                epochs = min(schedule.total, plan.end) / schedule.per_epoch
                tell(before_training(config, drafter, rows, steps, epochs, source.nbytes(rows), work))
                if steps and (warning := plan.too_short(steps)):
                    outcome.warnings.append(warning)
                    tell([f"warning: {warning}"])
            if step:
                tell([f"resuming at {plan.said(step, clock.seconds)}"])
            if micro != step * group:
                progress.print(f"goes on after {micro} micro batches in {step} steps with {group} a step")
            if held_out and config.init_from and step == 0:
                with speed.paused():
                    processes.alone(measure, learner.whole())  # where it starts from, to see what is gained
            first = step + 1
            clock.start()
            saved = time.perf_counter()
            share = processes.agree(plan.share(step, clock.seconds))
            told = False
            while share < 1 or not step:
                rate = plan.factor(step, micro, share * 60 * optim.minutes)
                for parameters in learner.param_groups:
                    parameters["lr"] = learner.peak * rate
                turns = range(micro + processes.rank, micro + group, processes.world)
                totals = processes.sum(torch.stack([micro_step(turn, turn == turns[-1]) for turn in turns]).sum(0))
                norm = learner.step(totals[1])
                chosen = [i for turn in range(micro, min(micro + group, plan.end)) for i in schedule.indices(turn)]
                step, micro = step + 1, min(micro + group, plan.end)

                clock.tick()
                due = time.perf_counter() - saved >= 60 * run.save_minutes and not writer.busy
                share, due, failed = processes.agree((plan.share(step, clock.seconds), due, writer.failed))
                if failed:
                    processes.alone(writer.wait)  # raises
                last = share >= 1
                saves = last or (step % run.save_every == 0 if run.save_every else due)
                evaluates = last or (run.evaluate_every and step % run.evaluate_every == 0)
                if saves or evaluates or step % run.log_every == 0:
                    _check(norm, step, learner.peak)
                seen = int(np.minimum(lengths[chosen], config.prompts.max_length).sum())
                speed.count(seen, len(chosen))
                if step % run.log_every == 0 or last:
                    processes.alone(log, totals, norm, seen)
                progress.reach(ending * share if ending else step, units=seen)
                if clock.pace and not told:
                    told = True
                    left = math.ceil((60 * optim.minutes - clock.seconds) / clock.pace) if ending else plan.steps - step
                    evaluations = left // run.evaluate_every if held_out and run.evaluate_every else 0
                    if left > 0:
                        tell(once_measured(config, left, clock.pace, evaluations, speed.memory(), processes.world))

                if source.waits and step == first:
                    begin_peak(target.device)  # only now there is the optimiser's state
                elif source.waits:
                    with clock.paused(), speed.paused():  # the drafter is copied where it is measured and exported
                        source.settle(2 * sum(p.numel() * 2 for p in drafter.parameters()), progress)
                if saves or (held_out and evaluates):  # a pause waits for the device, which no other step does
                    with clock.paused(), speed.paused():
                        if held_out and evaluates:
                            processes.alone(measure, learner.whole())
                        if saves:
                            saved = time.perf_counter()
                            save()
                            processes.together(source.check)  # of one process; behind the save, so no step is lost
            if processes.agree(bool(held_out) and (latest is None or latest.step != step)):
                processes.alone(measure, learner.whole())
        if ending and processes.main and (warning := plan.too_short(step)):
            outcome.warnings.append(warning)
        processes.alone(writer.wait)
        processes.together(source.flush)
        processes.alone(conclude, learner.whole())
    outcome.steps, outcome.elapsed_s = step, clock.seconds
    return outcome


def _kept(work: Path, step: int) -> Path:
    """Where the best drafter so far is, if it is of this step."""
    return work / f"best.{step}"


def _checkpoints(work: Path) -> list[int]:
    """The steps of those that are there."""
    found = (path.name.partition(".")[2] for path in work.glob("best.*"))
    return [int(step) for step in found if step.isdecimal()]


def _forget_others(best: Evaluation | None, work: Path) -> Evaluation | None:
    """Removes what a run left that was killed behind its resume point; the best, if its weights are there."""
    for step in _checkpoints(work):
        if best is None or step != best.step:
            shutil.rmtree(_kept(work, step), ignore_errors=True)
    return best if best and (_kept(work, best.step) / "model.safetensors").exists() else None


def _check(norm: Tensor, step: int, rate: float) -> None:
    """Raises UserError where training has diverged, before that is saved."""
    if not math.isfinite(float(norm)):
        raise UserError(
            f"step {step}: the gradient is not a number; train again with optim.learning_rate lower than {rate:g} "
            f"(nothing of this step was saved)"
        )


@contextlib.contextmanager
def _closing(metrics: MetricsLog | None) -> Iterator[None]:
    try:
        yield
    finally:
        if metrics:
            metrics.close()


def log_values(result: DraftLoss, norm: Tensor, learner: Learner, epoch: float) -> dict[str, Any]:
    """What a line of metrics.jsonl holds, but for the rates."""
    overlap = {} if result.slot_overlap is None else {"slot_overlap": result.slot_overlap.tolist()}
    return {
        "loss": float(result.loss.detach()),
        "slot_accuracy": result.recall[0].tolist(),
        **{f"recall_at_{k}": result.recall[i].tolist() for i, k in enumerate(RECALL) if k > 1},
        **overlap,
        "estimated_acceptance_length": float(result.acceptance_length),
        "rows": result.rows,
        "gradient_norm": float(norm),
        "learning_rate": learner.param_groups[0]["lr"],
        "epoch": round(epoch, 4),
    }
