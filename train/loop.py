"""The training loop: features -> blocks -> drafter -> loss -> step, with resume points and real decoding."""

import contextlib
import copy
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from dflash_toolkit.drafter import Drafter
from dflash_toolkit.evaluation.measure import Acceptance
from dflash_toolkit.progress import Progress
from dflash_toolkit.target import Target

from .answers import Row
from .blocks import Blocks, sample_blocks
from .config import TrainConfig
from .features import FeatureSource
from .flops import drafter_step_flops, visible_pairs
from .held_out import HeldOut
from .losses import DraftLoss
from .metrics import MetricsLog, Speed
from .optimizers import Optimizers, make_optimizer, update_average
from .schedule import PackedSchedule, Schedule, draws, learning_rate_factor, packing
from .state import RunState, load_state, save_state
from .step import compute_loss, use_flex


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
    rows: list[Row],
    held_out: list[list[int]],
    work: Path,
    fingerprint: dict[str, Any],
    export: Callable[[Drafter, float], None],
    record: dict[str, Any] | None = None,
) -> Outcome:
    """Train `drafter` (fp32, on the target's device) and call `export` whenever its measured acceptance is the best.

    Args:
        rows: texts with at least one anchor each.
        held_out: prompts (token ids) that are decoded to measure acceptance; may be empty, then the last is exported.
        work: directory for the resume point and metrics.
        record: what W&B shows as the run's configuration (default: the fingerprint).

    Raises:
        UserError: disk full, or `work` holds another run.
    """
    run, optim = config.run, config.optim
    flex = use_flex(run.attention, target.device)
    tokens, count = packing(config, target.device)
    schedule: Schedule | PackedSchedule
    if tokens:
        lengths = [min(len(row.tokens), tokens) for row in rows]
        schedule = PackedSchedule(lengths, tokens, optim.epochs, optim.steps, run.seed)
    else:
        schedule = Schedule(len(rows), optim.batch_size, optim.epochs, optim.steps, run.seed)
    # before the features, which take what is left of a GPU's memory
    held = HeldOut(target, drafter.config, held_out[: run.evaluate_prompts], run) if held_out else None
    source = FeatureSource(
        target, drafter.config.target_layer_ids, config.prompts.max_length, run.feature_cache_gb,
        128 if flex else 1, tokens,
    )  # fmt: skip
    if target.device.type == "cuda" and not optim.steps:  # a run over all rows
        source.fill(rows)
    optimizer = make_optimizer(drafter, optim)
    peak = optimizer.param_groups[0]["lr"]
    state_file = work / "state.pt"
    average = copy.deepcopy(drafter) if optim.ema else None
    step, best, elapsed = 0, -math.inf, 0.0
    if state := load_state(state_file, fingerprint):
        drafter.load_state_dict(state.drafter)
        optimizer.load_state_dict(state.optimizer)
        if average and state.average:
            average.load_state_dict(state.average)
        step, best, elapsed = state.step, state.best, state.elapsed_s
    metrics = MetricsLog(work / "metrics.jsonl", step, run.wandb, record or fingerprint)
    started = time.perf_counter() - elapsed
    result_of = average or drafter  # what is measured and exported
    acceptance: Acceptance | None = None

    def share_done() -> float:
        """Of the run, when the next step begins."""
        if optim.minutes:
            return min(1.0, (time.perf_counter() - started) / (60 * optim.minutes))
        return step / schedule.total

    def save() -> None:
        save_state(
            RunState(
                step, fingerprint, drafter.state_dict(), optimizer.state_dict(), best, time.perf_counter() - started,
                average.state_dict() if average else None,
            ),
            state_file,
        )  # fmt: skip

    def measure(held: HeldOut) -> Acceptance:
        nonlocal best
        found = held(result_of)
        metrics.write(step, {"acceptance_length": found.tau_pooled, "decode_steps": found.steps})
        progress.print(f"step {step}: acceptance length {found.tau_pooled:.3f}")
        if not found.tau_pooled <= best:  # also when no answer was long enough to measure
            best = found.tau_pooled
            export(result_of, best)
        metrics.summarise(best_acceptance_length=best)
        return found

    with _closing(metrics), Progress("training", schedule.total, unit="tok") as progress:
        progress.advance(step, units=0)
        if held and config.init_from and step == 0:
            measure(held)  # where it starts from, to see what is gained
        speed = Speed(target.device)
        last = share_done() >= 1
        while not last:
            chosen = schedule.indices(step)
            with speed.data():
                features = source([rows[i] for i in chosen])
            blocks = sample_blocks(
                features, count or config.loss.anchors, config.drafter.block_size, drafter.config.mask_token_id,
                draws(run.seed, 2, step), fixed=bool(tokens),
            )  # fmt: skip
            done, total = (round(1e6 * share_done()), 1_000_000) if optim.minutes else (step, schedule.total)
            for group in optimizer.param_groups:
                group["lr"] = peak * learning_rate_factor(done, total, optim.warmup, optim.final_decay)
            result = compute_loss(drafter, target, features, blocks, config, flex)
            result.loss.backward()
            norm = nn.utils.clip_grad_norm_(drafter.parameters(), optim.clip)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if average:
                update_average(average, drafter, optim.ema, step)

            last = share_done() >= 1
            seen = sum(min(len(rows[i].tokens), config.prompts.max_length) for i in chosen)
            speed.count(seen, len(chosen))
            if step % run.log_every == 0 or last:
                values = log_values(result, norm, optimizer, step / schedule.per_epoch)
                rates = speed.take(lambda: step_flops(drafter, target, seen, blocks, result))  # noqa: B023
                metrics.write(step, values | rates)
                note = f"loss {values['loss']:.2f} tau~{values['estimated_acceptance_length']:.1f}"
                if "mfu" in rates:
                    note += f" mfu {rates['mfu']:.0%}"
                progress.advance(1, units=seen, note=note)
            else:
                progress.advance(1, units=seen)

            with speed.paused():
                if held and (last or (run.evaluate_every and step % run.evaluate_every == 0)):
                    acceptance = measure(held)
                elif last:
                    export(result_of, math.nan)
                if last or step % run.save_every == 0:
                    save()
    return Outcome(step, best, acceptance, time.perf_counter() - started)


@contextlib.contextmanager
def _closing(metrics: MetricsLog) -> Iterator[None]:
    try:
        yield
    finally:
        metrics.close()


def log_values(result: DraftLoss, norm: Tensor, optimizer: Optimizers, epoch: float) -> dict[str, Any]:
    """What a line of metrics.jsonl holds."""
    return {
        "loss": float(result.loss.detach()),
        "slot_accuracy": [float(a) for a in result.slot_accuracy],
        "estimated_acceptance_length": float(result.acceptance_length),
        "rows": result.rows,
        "gradient_norm": float(norm),
        "learning_rate": optimizer.param_groups[0]["lr"],
        "epoch": round(epoch, 4),
    }


def step_flops(drafter: Drafter, target: Target, tokens: int, blocks: Blocks, result: DraftLoss) -> float:
    """Of the drafter's forward and backward over `blocks` and `tokens` of context. Waits for the device."""
    rows = int(blocks.valid.sum()) * blocks.size
    vocab = len(target.head_weight)
    return drafter_step_flops(drafter.config, tokens, rows, visible_pairs(blocks), result.rows, vocab)
