"""Trains a drafter on records in memory: what a server has just decoded, or the rollouts of reinforcement learning.

A record holds the tokens of a conversation and the target's hidden states (taps) of these tokens, which exist when the
target has decoded them. So the target does not run here: `OnlineTrainer` needs its embedding and head only. There are
no files, no run directory and no end: the learning rate warms up once and stays constant, and an average of the
weights is what one serves. The blocks, the loss and the optimiser are those of `dflash-train` (`gradients.py`).
"""

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dflash_toolkit.config import UserError
from dflash_toolkit.models.dflash.network import Drafter

from .config import TrainConfig
from .distributed.parallel import Processes, Replicated
from .features.batch import batch_of
from .features.source import fitting
from .gradients import add_gradients
from .objective.blocks import TILE, Features, sample_blocks
from .objective.loss import DraftLoss, compute_loss, runner, use_flex
from .objective.target_head import TargetHead
from .optim.optimizers import peak_rate, uses_muon
from .optim.schedule import packing, rng_for
from .responses.rows import Row, Span
from .run.held_out import Evaluation
from .training_options import OptimOptions

AVERAGE = 0.99  # decay per step of the average of the weights (default)
WARMUP = 20  # steps in which the learning rate rises
TOGETHER, TOKENS = 8, 8192  # held-out records that are computed together, and their tokens
BLOCKS, BLOCKS_ON_CPU = 64, 16  # blocks of each that are computed together; a dense mask is quadratic in them
STREAM = 4  # stream of `rng_for`: anchors of online steps


@dataclass(frozen=True, eq=False)
class Record:
    """A conversation that the target has decoded.

    Args:
        tokens: the n ids of prompt and answer.
        taps: [n, K*D] or [n - 1, K*D], outputs of the tapped layers, concatenated in the order of `target_layer_ids`;
            the last token of an answer was never read, so its taps may be missing. On any device, in any dtype.
        supervised: [start, end) of the tokens that the target itself wrote.
        source: name of the record's kind, for `Evaluation.by_source`.
    """

    tokens: Sequence[int]
    taps: Tensor
    supervised: Sequence[Span]
    source: str = ""

    def __post_init__(self) -> None:
        if self.taps.dim() != 2 or not len(self.tokens) - 1 <= len(self.taps) <= len(self.tokens):
            raise ValueError(
                f"taps have the shape {tuple(self.taps.shape)}; they must be those of {len(self.tokens)} tokens, of "
                f"which the last may be missing"
            )
        if any(not 0 <= start <= end <= len(self.tokens) for start, end in self.supervised):
            raise ValueError(f"supervised is {list(self.supervised)}, outside of {len(self.tokens)} tokens")

    @property
    def row(self) -> Row:
        return Row(0, len(self.tokens), list(self.tokens), tuple(self.supervised))

    @functools.cached_property
    def usable(self) -> bool:
        """Whether it has a block to train and all its taps are finite."""
        return self.row.has_anchor and bool(self.taps.isfinite().all())

    def cut(self, length: int) -> "Record":
        """Returns its last `length` tokens at most. Positions are relative, so a block only sees less context."""
        if len(self.tokens) <= length:
            return self
        start = max(len(self.tokens) - length, 0)
        spans = [(max(begin - start, 0), end - start) for begin, end in self.supervised if end > start]
        return replace(self, tokens=self.tokens[start:], taps=self.taps[start:].clone(), supervised=spans)


class OnlineTrainer:
    """Trains `drafter` with one step a call.

    Args:
        target_head: the target, or a `HeadWeights` with its embedding [V, D] and head [V, D].
        drafter: the drafter to start from, on the device of `target_head`. Its weights are copied to fp32.
        config: the options `loss`, `optim` and `run` of `dflash-train` (default: its own, and an average of the
            weights). The default learning rate is that of a run with `init_from`; the block size is the drafter's.
        warmup: steps in which the learning rate rises to its peak.

    Attributes:
        longest: tokens of a record that are trained on, its last ones.
        pack_tokens: tokens that are computed together, whether there are as many or not; 0 without packs.

    Raises:
        UserError: a loss that needs the target's own distribution, which records do not have.
    """

    def __init__(
        self, target_head: TargetHead, drafter: Drafter, config: TrainConfig | None = None, *, warmup: int = WARMUP
    ) -> None:
        config = config or TrainConfig(target="", optim=OptimOptions(ema=AVERAGE))
        if config.loss.distribution:
            raise UserError("loss.kl, tv, lk and lk_hybrid need the target's distribution; records do not have it")
        rate = peak_rate(config.optim, uses_muon(config, target_head.device.type == "cuda"), warm=True)
        self._config = config = replace(
            config,
            optim=replace(config.optim, learning_rate=rate),
            drafter=replace(config.drafter, block_size=drafter.config.block_size),
        )
        weights = {name: tensor.detach().float() for name, tensor in drafter.state_dict().items()}
        fresh = Drafter.fresh(drafter.config, 0).to(target_head.device)
        fresh.load_state_dict(weights)
        fresh.recompute = bool(config.optim.recompute)
        self._head, self._warmup, self._steps = target_head, max(warmup, 1), 0
        self._learner = Replicated(fresh.requires_grad_(True).train(), config, Processes(), None)
        self._eager = runner(replace(config, run=replace(config.run, compile="off")), target_head.device)
        self.pack_tokens, _ = packing(config, target_head.device)
        self.longest = self.pack_tokens or config.prompts.row_tokens

    def use_target(self, target_head: TargetHead) -> None:
        """Trains for another target of the same shape from the next step on; records of the old one are useless."""
        self._head = target_head

    @property
    def steps(self) -> int:
        """Number of steps so far."""
        return self._steps

    @property
    def drafter(self) -> Drafter:
        """The drafter to serve: the average of the weights, in fp32. The next step changes it in place."""
        return self._learner.whole()

    def step(self, records: Sequence[Record]) -> dict[str, float]:
        """Takes one optimiser step over all `records`; records that cannot be trained on are skipped.

        Returns:
            `loss` and `acceptance_length` (teacher-forced, of the weights before the step), `gradient_norm`,
            `learning_rate`, and the numbers of `blocks`, `records` and `tokens` in the step.

        Raises:
            ValueError: no record can be trained on.
            UserError: the gradient is not finite. The weights are then useless: load an earlier state.
        """
        usable = [record.cut(self.longest) for record in records if record.usable]
        usable = [record for record in usable if record.row.has_anchor]
        if not usable:
            raise ValueError("no record has two supervised tokens and finite taps")
        rate = self._learner.peak * min(1.0, (self._steps + 1) / self._warmup)
        for group in self._learner.param_groups:
            group["lr"] = rate
        batches = list(self._batches(usable))
        totals = torch.stack(
            [
                add_gradients(
                    self._learner, self._head, self._features(batch), self._config,
                    rng_for(self._config.run.seed, STREAM, self._steps + (k << 32)), last=k == len(batches) - 1,
                )
                for k, batch in enumerate(batches)
            ]
        ).sum(0)  # fmt: skip
        norm = float(self._learner.step(totals[1]))
        self._steps += 1
        if not math.isfinite(norm):
            raise UserError(
                f"step {self._steps}: the gradient is not a number; load an earlier state, or lower "
                f"optim.learning_rate ({self._learner.peak:g})"
            )
        loss = DraftLoss.of_totals(totals[:-1].cpu(), self.drafter.config.block_size - 1)
        return {
            "loss": float(loss.loss),
            "acceptance_length": float(loss.acceptance_length),
            "gradient_norm": norm,
            "learning_rate": rate,
            "blocks": float(loss.blocks),
            "records": float(len(usable)),
            "tokens": float(sum(len(record.tokens) for record in usable)),
        }

    @torch.no_grad()
    def held_out(self, records: Sequence[Record], drafter: Drafter | None = None) -> Evaluation:
        """Walks over the answers of `records` as decoding would, and counts tokens and steps of each.

        The drafter drafts at the first token of an answer, accepts the longest correct prefix, and drafts again after
        the next token. For greedy answers that is the acceptance length of decoding; for sampled ones its expectation
        over the target's samples.

        Args:
            drafter: another drafter with the same taps, for a paired comparison (default: `self.drafter`).

        Returns:
            `tau`, its `standard_error`, and `clearly_better_than` for two evaluations of the same records.
        """
        cuts = [record.cut(self.longest) for record in records]
        usable = sorted((i for i, record in enumerate(cuts) if record.usable), key=lambda i: len(cuts[i].tokens))
        counted = [(0, 0)] * len(cuts)
        while usable:  # some of similar length, as many as fit
            most = max(1, min(TOGETHER, TOKENS // len(cuts[usable[min(TOGETHER, len(usable)) - 1]].tokens)))
            some, usable = usable[:most], usable[most:]
            accepted = self._accepted(drafter or self.drafter, [cuts[i] for i in some])
            for i, found in zip(some, accepted, strict=True):
                counted[i] = _walk(cuts[i].supervised, found)
        tokens, steps = (tuple(count[i] for count in counted) for i in (0, 1))
        return Evaluation(self._steps, tuple(record.source for record in records), tokens, steps)

    def state_dict(self) -> dict[str, Any]:
        """Returns weights, optimiser state, average and steps. The tensors are views: the next step changes them."""
        drafter, optimizer, average = self._learner.snapshot()
        return {"drafter": drafter, "optimizer": optimizer, "average": average, "steps": self._steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from `state_dict`. Raises UserError for the state of another optimiser."""
        self._steps = state["steps"]
        self._learner.restore(state["drafter"], state["optimizer"], state["average"], self._steps)

    def _batches(self, records: Sequence[Record]) -> Iterator[Sequence[Record]]:
        """Yields micro batches: packs of a fixed length, or `optim.batch_size` records."""
        if self.pack_tokens:
            yield from fitting(records, lambda record: len(record.tokens), self.pack_tokens)
            return
        size = self._config.optim.batch_size
        for start in range(0, len(records), size):
            yield records[start : start + size]

    def _features(self, records: Sequence[Record], packed: int | None = None) -> Features:
        hidden = []
        for record in records:
            taps = record.taps.to(self._head.device, self._head.dtype)
            missing = len(record.tokens) - len(taps)  # never read: a block with a label ends before the last token
            hidden.append(torch.nn.functional.pad(taps, (0, 0, 0, missing)))
        flex = use_flex(self._config.run.attention, self._head.device)
        width, rows = self.drafter.config.feature_size, [record.row for record in records]
        packed = self.pack_tokens if packed is None else packed
        return batch_of(rows, hidden, width, self._head.device, packed, TILE if flex else 1)

    def _accepted(self, drafter: Drafter, records: Sequence[Record]) -> list[dict[int, int]]:
        """Returns the accepted tokens by anchor of each record."""
        features = self._features(records, packed=0)
        shape, longest = drafter.config, max(len(record.tokens) for record in records)
        everywhere = sample_blocks(features, longest, shape.block_size, shape.mask_token_id, rng_for(0, STREAM, 0))
        found: list[dict[int, int]] = [{} for _ in records]
        most = BLOCKS if self._head.device.type == "cuda" else BLOCKS_ON_CPU
        for part in everywhere.split(-(-everywhere.anchor.shape[1] // most)):
            if not bool(part.supervised.any()):
                continue
            loss = compute_loss(drafter, self._head, features, part, self._config, False, self._eager)
            assert loss.accepted is not None
            row, block = part.valid.nonzero(as_tuple=True)
            counts = torch.stack([row, part.anchor[row, block], loss.accepted[row, block]], 1)
            for i, anchor, count in counts.tolist():
                found[i][anchor] = count
        return found


def _walk(spans: Sequence[Span], accepted: dict[int, int]) -> tuple[int, int]:
    """Returns the tokens and steps of decoding the answers in `spans`, with the accepted tokens by anchor."""
    tokens = steps = 0
    for start, end in spans:
        at = start
        while at in accepted:
            committed = min(accepted[at] + 1, end - 1 - at)
            at, tokens, steps = at + committed, tokens + committed, steps + 1
    return tokens, steps
