"""The training loop: features -> blocks -> drafter -> loss -> step, with resume points and real decoding."""

import contextlib
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dflash_toolkit.acceptance import Acceptance
from dflash_toolkit.config import UserError
from dflash_toolkit.drafter import Drafter
from dflash_toolkit.progress import Progress
from dflash_toolkit.target import Target

from .answers import Row
from .blocks import sample_blocks
from .config import TrainConfig
from .features import FeatureSource, open_features
from .flops import drafter_step_flops, visible_pairs
from .held_out import HeldOut
from .losses import RECALL, DraftLoss
from .metrics import MetricsLog, Speed
from .parallel import Processes
from .schedule import PackedSchedule, Schedule, draws, learning_rate_factor, packing
from .state import RunState, load_state, save_state
from .step import compute_loss, use_flex
from .zero import Learner, make_learner


@dataclass(slots=True)
class Outcome:
    """How a run ended."""

    steps: int
    best: float  # acceptance length of the exported drafter on the held-out prompts
    last: Acceptance | None
    elapsed_s: float


def train(
    config: TrainConfig,
    target: Target,
    drafter: Drafter,
    rows: Sequence[Row],
    held_out: list[list[int]],
    work: Path,
    fingerprint: dict[str, Any],
    export: Callable[[Drafter, float], None],
    processes: Processes | None = None,
    source: FeatureSource | None = None,
    record: dict[str, Any] | None = None,
) -> Outcome:
    """Train `drafter` (fp32, on the target's device) and call `export` whenever its measured acceptance is the best.

    A step takes `accumulate` times `world` micro batches of the schedule, dealt to the processes in turn. Its loss is
    normalised by the weights of all of them, so how many processes share them does not matter.

    Args:
        rows: texts with at least one anchor each.
        held_out: prompts (token ids) that are decoded to measure acceptance; may be empty, then the last is exported.
        work: directory for the resume point and metrics, the same for all processes.
        export: called by the first process.
        source: features that several runs share (default: what `config.run.features` asks for).
        record: what W&B shows as the run's configuration (default: the fingerprint).

    Raises:
        UserError: disk full, no room for features, or `work` holds another run.
    """
    run, optim = config.run, config.optim
    processes = processes or Processes()
    group = optim.accumulate * processes.world  # micro batches of a step
    flex = use_flex(run.attention, target.device)
    tokens, count = packing(config, target.device)
    schedule: Schedule | PackedSchedule
    if tokens:
        lengths = [min(len(row.tokens), tokens) for row in rows]
        schedule = PackedSchedule(lengths, tokens, optim.epochs, optim.steps * group, run.seed)
    else:
        schedule = Schedule(len(rows), optim.batch_size, optim.epochs, optim.steps * group, run.seed)
    held = None
    if held_out:  # before the features, which take what is left of a GPU's memory
        held = processes.alone(HeldOut, target, drafter.config, held_out[: run.evaluate_prompts], run)
    if source is None:
        place = (processes.rank, processes.world)
        taps = drafter.config.target_layer_ids
        source = processes.together(open_features, config, target, taps, rows, work, *place)
    state_file = work / "state.pt"
    state = processes.together(load_state, state_file, fingerprint)
    if len(set(processes.gather(state and state.step))) > 1:
        raise UserError(f"{state_file} is not the same everywhere: all machines must share the output directory")
    learner = make_learner(drafter, config, processes, state, work, bool(tokens))
    step, micro, best, elapsed = 0, 0, -math.inf, 0.0
    if state:
        step, micro, best, elapsed = state.step, state.micro, state.best, state.elapsed_s
    total = optim.steps or step + math.ceil((schedule.total - micro) / group)
    end = micro + (total - step) * group if optim.steps else schedule.total  # of the micro batches
    if optim.minutes:
        end = sys.maxsize
    metrics = processes.alone(MetricsLog, work / "metrics.jsonl", step, run.wandb, record or fingerprint)
    started = time.perf_counter() - elapsed
    speed = Speed(target.device)
    acceptance: Acceptance | None = None

    def share_done() -> float:
        """Of the run, when the next step begins."""
        if optim.minutes:
            return processes.agree(min(1.0, (time.perf_counter() - started) / (60 * optim.minutes)))
        return step / total

    def micro_step(turn: int, last: bool) -> Tensor:
        """Gradients of the micro batch whose turn it is in the schedule; past its end, of another one times zero."""
        with speed.data():
            features = source([rows[i] for i in schedule.indices(turn if turn < end else micro)])
            if source.reads_ahead and turn + processes.world < end:
                source.ahead([rows[i] for i in schedule.indices(turn + processes.world)])
        blocks = sample_blocks(
            features, count or config.loss.anchors, config.drafter.block_size, drafter.config.mask_token_id,
            draws(run.seed, 2, turn), fixed=bool(tokens),
        )  # fmt: skip
        result = compute_loss(drafter, target, features, blocks, config, flex, learner.run)
        learner.backward(result.weighted_sum if turn < end else 0 * result.weighted_sum, last)
        return torch.cat([result.totals(), visible_pairs(blocks)[None].double()]) * (turn < end)

    def write(values: dict[str, Any]) -> None:
        if metrics:
            metrics.write(step, values)

    def log(totals: Tensor, norm: Tensor, seen: int) -> None:
        result = DraftLoss.of_totals(totals[:-1], config.drafter.block_size - 1)
        values = log_values(result, norm, learner, micro / schedule.per_epoch)
        slots = int(result.blocks) * config.drafter.block_size
        work = drafter_step_flops(drafter.config, seen, slots, int(totals[-1]), result.rows, len(target.head_weight))
        rates = speed.take(work / processes.world)
        write(values | rates)
        note = f"loss {values['loss']:.2f} tau~{values['estimated_acceptance_length']:.1f}"
        progress.advance(0, 0, note + (f" mfu {rates['mfu']:.0%}" if "mfu" in rates else ""))

    def measure(trained: Drafter) -> None:
        nonlocal best, acceptance
        assert held is not None
        acceptance = held(trained)
        write({"acceptance_length": acceptance.tau_pooled, "decode_steps": acceptance.steps})
        progress.print(f"step {step}: acceptance length {acceptance.tau_pooled:.3f}")
        if not acceptance.tau_pooled <= best:  # also when no answer was long enough to measure
            best = acceptance.tau_pooled
            export(trained, best)
        if metrics:
            metrics.summarise(best_acceptance_length=best)

    clock = max(1, round(60 * optim.minutes)) if optim.minutes else 0  # seconds; a run that ends by it shows it
    bar = Progress("training s", clock, unit="tok") if clock else Progress("training", total, unit="tok")
    with _closing(metrics), bar as progress:
        progress.reach(min(elapsed, clock) if clock else step, units=0)
        if micro != step * group:
            progress.print(f"goes on after {micro} micro batches in {step} steps with {group} a step")
        if held_out and config.init_from and step == 0:
            before = time.perf_counter()
            with speed.paused():
                processes.alone(measure, learner.whole())  # where it starts from, to see what is gained
            started += time.perf_counter() - before  # of optim.minutes, none
        share = share_done()
        while share < 1 or not step:
            done, of = step, total
            if optim.minutes:
                done, of = round(1e6 * share), 1_000_000
            elif not optim.steps:  # by the data: steps before a resumption may have been of another size
                done, of = micro // group, math.ceil(schedule.total / group)
            for parameters in learner.param_groups:
                parameters["lr"] = learner.peak * learning_rate_factor(done, of, optim.warmup, optim.final_decay)
            turns = range(micro + processes.rank, micro + group, processes.world)
            totals = processes.sum(torch.stack([micro_step(turn, turn == turns[-1]) for turn in turns]).sum(0))
            norm = learner.step(totals[1])
            chosen = [i for turn in range(micro, min(micro + group, end)) for i in schedule.indices(turn)]
            step, micro = step + 1, min(micro + group, end)

            share = share_done()
            last = share >= 1
            if last or any(
                every and step % every == 0 for every in (run.log_every, run.save_every, run.evaluate_every)
            ):
                _check(norm, step, learner.peak)
            seen = sum(min(len(rows[i].tokens), config.prompts.max_length) for i in chosen)
            speed.count(seen, len(chosen))
            if step % run.log_every == 0 or last:
                processes.alone(log, totals, norm, seen)
            progress.reach(clock * share if clock else step, units=seen)

            with speed.paused():
                if held_out and (last or (run.evaluate_every and step % run.evaluate_every == 0)):
                    processes.alone(measure, learner.whole())
                elif last:
                    processes.alone(export, learner.whole(), math.nan)
                if last or step % run.save_every == 0:
                    weights, moments, average = learner.snapshot()
                    spent = time.perf_counter() - started
                    point = RunState(step, fingerprint, weights, moments, best, spent, micro, average)
                    processes.alone(save_state, point, state_file)
                    processes.together(source.check)  # of one process; behind the save, so that no step is lost
    processes.together(source.flush)
    return Outcome(step, best, acceptance, time.perf_counter() - started)


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
