"""The training loop: features -> blocks -> drafter -> loss -> step, with resume points and real decoding."""

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from dflash_toolkit.decode import SamplingParams
from dflash_toolkit.drafter import Drafter
from dflash_toolkit.evaluation.measure import Acceptance, held_out_acceptance
from dflash_toolkit.progress import Progress
from dflash_toolkit.target import Target

from .answers import Row
from .blocks import sample_blocks
from .config import TrainConfig
from .features import FeatureSource, open_features
from .losses import RECALL, DraftLoss
from .metrics import MetricsLog
from .optimizers import Optimizers, make_optimizer
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
    source: FeatureSource | None = None,
) -> Outcome:
    """Train `drafter` (fp32, on the target's device) and call `export` whenever its measured acceptance is the best.

    Args:
        rows: texts with at least one anchor each.
        held_out: prompts (token ids) that are decoded to measure acceptance; may be empty, then the last is exported.
        work: directory for the resume point and metrics.
        source: features that several runs share (default: what `config.run.features` asks for).

    Raises:
        UserError: disk full, no room for features, or `work` holds another run.
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
    if source is None:
        source = open_features(config, target, drafter.config.target_layer_ids, rows, work)
    optimizer = make_optimizer(drafter, optim)
    peak = optimizer.param_groups[0]["lr"]
    state_file = work / "state.pt"
    step, best, elapsed = 0, -math.inf, 0.0
    if state := load_state(state_file, fingerprint):
        drafter.load_state_dict(state.drafter)
        optimizer.load_state_dict(state.optimizer)
        step, best, elapsed = state.step, state.best, state.elapsed_s
    metrics = MetricsLog(work / "metrics.jsonl", step, run.wandb, fingerprint)
    started = time.perf_counter() - elapsed
    speed = _Speed()
    acceptance: Acceptance | None = None

    def share_done() -> float:
        """Of the run, when the next step begins."""
        if optim.minutes:
            return min(1.0, (time.perf_counter() - started) / (60 * optim.minutes))
        return step / schedule.total

    def save() -> None:
        save_state(
            RunState(
                step, fingerprint, drafter.state_dict(), optimizer.state_dict(), best, time.perf_counter() - started
            ),
            state_file,
        )

    with _closing(metrics), Progress("training", schedule.total, unit="tok") as progress:
        progress.advance(step, units=0)
        last = share_done() >= 1
        while not last:
            chosen = schedule.indices(step)
            features = source([rows[i] for i in chosen])
            if source.reads_ahead:
                source.ahead([rows[i] for i in schedule.indices(step + 1)])
            blocks = sample_blocks(
                features, count or config.loss.anchors, config.drafter.block_size, drafter.config.mask_token_id,
                draws(run.seed, 2, step), fixed=bool(tokens),
            )  # fmt: skip
            for group in optimizer.param_groups:
                if optim.minutes:
                    factor = learning_rate_factor(round(1e6 * share_done()), 1_000_000, optim.warmup)
                else:
                    factor = learning_rate_factor(step, schedule.total, optim.warmup)
                group["lr"] = peak * factor
            result = compute_loss(drafter, target, features, blocks, config, flex)
            result.loss.backward()
            norm = nn.utils.clip_grad_norm_(drafter.parameters(), optim.clip)
            optimizer.step()
            optimizer.zero_grad()
            step += 1

            last = share_done() >= 1
            seen = sum(min(len(rows[i].tokens), config.prompts.max_length) for i in chosen)
            speed.count(seen, len(chosen))
            if step % run.log_every == 0 or last:
                values = log_values(result, norm, optimizer, step / schedule.per_epoch)
                metrics.write(step, values | speed.take())
                note = f"loss {values['loss']:.2f} tau~{values['estimated_acceptance_length']:.1f}"
                progress.advance(1, units=seen, note=note)
            else:
                progress.advance(1, units=seen)

            if held_out and (last or (run.evaluate_every and step % run.evaluate_every == 0)):
                acceptance = decode_held_out(target, drafter, held_out[: run.evaluate_prompts], config)
                metrics.write(step, {"acceptance_length": acceptance.tau_pooled, "decode_steps": acceptance.steps})
                progress.print(f"step {step}: acceptance length {acceptance.tau_pooled:.3f}")
                if not acceptance.tau_pooled <= best:  # also when no answer was long enough to measure
                    best = acceptance.tau_pooled
                    export(drafter, best)
            elif last:
                export(drafter, math.nan)
            if last or step % run.save_every == 0:
                save()
    source.flush()
    return Outcome(step, best, acceptance, time.perf_counter() - started)


@contextlib.contextmanager
def _closing(metrics: MetricsLog) -> Iterator[None]:
    try:
        yield
    finally:
        metrics.close()


class _Speed:
    """Context tokens and sequences per second since the last line of metrics.jsonl."""

    def __init__(self) -> None:
        self._tokens, self._sequences, self._since = 0, 0, time.perf_counter()

    def count(self, tokens: int, sequences: int) -> None:
        self._tokens += tokens
        self._sequences += sequences

    def take(self) -> dict[str, float]:
        now = time.perf_counter()
        seconds = now - self._since
        rates = {"tokens_per_second": self._tokens / seconds, "sequences_per_second": self._sequences / seconds}
        self._tokens, self._sequences, self._since = 0, 0, now
        return rates


def log_values(result: DraftLoss, norm: Tensor, optimizer: Optimizers, epoch: float) -> dict[str, Any]:
    """What a line of metrics.jsonl holds."""
    overlap = {} if result.slot_overlap is None else {"slot_overlap": result.slot_overlap.tolist()}
    return {
        "loss": float(result.loss.detach()),
        "slot_accuracy": result.recall[0].tolist(),
        **{f"recall_at_{k}": result.recall[i].tolist() for i, k in enumerate(RECALL) if k > 1},
        **overlap,
        "estimated_acceptance_length": float(result.acceptance_length),
        "rows": result.rows,
        "gradient_norm": float(norm),
        "learning_rate": optimizer.param_groups[0]["lr"],
        "epoch": round(epoch, 4),
    }


def decode_held_out(target: Target, drafter: Drafter, prompts: list[list[int]], config: TrainConfig) -> Acceptance:
    """Real greedy decoding in the target's dtype, as it will be served."""
    drafter.eval()
    served = Drafter(drafter.config).to(target.device)
    served.load_state_dict({n: p.detach().bfloat16() for n, p in drafter.state_dict().items()})  # as exported
    served = served.to(target.dtype).eval()
    acceptance = held_out_acceptance(target, served, prompts, SamplingParams(max_new_tokens=config.run.evaluate_tokens))
    drafter.train()
    return acceptance
