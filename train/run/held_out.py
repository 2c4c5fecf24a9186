"""Held-out prompts decoded during a run, to measure the acceptance length that its checkpoint will have."""

import contextlib
import itertools
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from dflash_toolkit.acceptance import ratio
from dflash_toolkit.calibration import Calibration
from dflash_toolkit.confidence import calibrate
from dflash_toolkit.config import UserError
from dflash_toolkit.evaluation.measure.decoders import EngineDecoder, ReferenceDecoder, decode_all, free_memory
from dflash_toolkit.evaluation.stats.bootstrap import student_quantile
from dflash_toolkit.generation import Generation
from dflash_toolkit.models.dflash.config import DrafterConfig
from dflash_toolkit.models.dflash.network import Drafter
from dflash_toolkit.models.target import Target
from dflash_toolkit.progress import Progress
from dflash_toolkit.runtime import Engine, EngineOptions
from dflash_toolkit.runtime.load import load_parts
from dflash_toolkit.sampling import SamplingParams

from ..features.gpu_memory import memory_use
from ..training_options import RunOptions
from .cost import duration

TOGETHER = (8, 4, 2, 1)  # prompts decoded at a time, which change no response of the engine
PAGE = 64  # tokens


SURE = 0.975  # quantile of Student's t beyond which a difference counts: by chance one in forty does


@dataclass(frozen=True, slots=True)
class HeldOutPrompt:
    """A prompt for measuring, not for training."""

    tokens: list[int]  # rendered with the chat template
    source: str  # short name of its file or data set


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Counts per prompt of a decoded drafter, after `step` steps of training.

    The acceptance length is a ratio of sums over prompts, tau = sum(tokens) / sum(steps). Prompts are the sample, so
    its standard error, and that of a difference of two evaluations of the same prompts, is the jackknife's over prompts
    (Cochran, Sampling Techniques, 1977, chapter 6). It is at least that of counting accepted drafts, so prompts that
    happen to agree do not have an error of zero.
    """

    step: int
    sources: tuple[str, ...]  # [P] of every prompt
    tokens: tuple[int, ...]  # [P] committed by verification steps, with bonus tokens
    steps: tuple[int, ...]  # [P] verification steps
    max_tokens: int = 0  # longest response

    @classmethod
    def of(
        cls, step: int, prompts: Sequence[HeldOutPrompt], responses: Sequence[Generation], max_tokens: int
    ) -> "Evaluation":
        """Counts the responses to `prompts`."""
        committed = tuple(sum(len(s.tokens) for s in response.steps) for response in responses)
        steps = tuple(len(response.steps) for response in responses)
        return cls(step, tuple(p.source for p in prompts), committed, steps, max_tokens)

    @property
    def prompts(self) -> int:
        return len(self.steps)

    @property
    def tau(self) -> float:
        """Tokens per verification step over all prompts; NaN if no response was long enough for a step."""
        return ratio(sum(self.tokens), sum(self.steps))

    @property
    def standard_error(self) -> float:
        """Standard error of `tau`; NaN for P < 2."""
        return _spread(self._residuals(), self._counting)

    @property
    def _counting(self) -> float:
        """Standard error of `tau` if drafts were accepted independently: a Poisson count, and one more a prompt."""
        return ratio(math.sqrt(sum(self.tokens) - sum(self.steps) + self.prompts), sum(self.steps))

    def _residuals(self) -> list[float]:
        """Returns by how much tau is larger with each prompt than without it: [P]."""
        tau, steps = self.tau, sum(self.steps)
        return [ratio(t - tau * s, steps - s) for t, s in zip(self.tokens, self.steps, strict=True)]

    def clearly_better_than(self, other: "Evaluation", sure: float = SURE) -> bool:
        """Whether tau is larger beyond the error of the difference, by the quantile `sure` of Student's t.

        Both evaluations have the same prompts, so the error is that of paired differences. With fewer than two prompts,
        or without a step, the result is False.
        """
        if self.prompts < 2:
            return False
        return self.tau - other.tau > student_quantile(sure, self.prompts - 1) * self.error_of_difference(other)

    def error_of_difference(self, other: "Evaluation") -> float:
        """Returns the standard error of the difference of tau from an evaluation of the same prompts."""
        pairs = zip(self._residuals(), other._residuals(), strict=True)
        return _spread([ours - theirs for ours, theirs in pairs], math.hypot(self._counting, other._counting))

    def by_source(self) -> dict[str, float]:
        """Returns tau for the prompts of each source, in order of first appearance."""
        counted: dict[str, list[int]] = {}
        for source, tokens, steps in zip(self.sources, self.tokens, self.steps, strict=True):
            sums = counted.setdefault(source, [0, 0])
            sums[0], sums[1] = sums[0] + tokens, sums[1] + steps
        return {source: ratio(tokens, steps) for source, (tokens, steps) in counted.items()}

    def __str__(self) -> str:
        """Formats as 3.512 +- 0.120 (chat 3.20, code 4.02)."""
        found = self.by_source()
        each = f" ({', '.join(f'{name} {tau:.2f}' for name, tau in found.items())})" if len(found) > 1 else ""
        error = self.standard_error
        return f"{self.tau:.3f}{f' +- {error:.3f}' if math.isfinite(error) else ''}{each}"

    def values(self) -> dict[str, Any]:
        """Returns the values for metrics.jsonl and the run's record."""
        return {
            "acceptance_length": self.tau,
            "acceptance_length_error": self.standard_error,
            "acceptance_length_by_source": self.by_source(),
            "decode_steps": sum(self.steps),
        }

    def to_state(self) -> dict[str, Any]:
        """Returns plain values for a resume point."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}

    @classmethod
    def of_state(cls, state: dict[str, Any]) -> "Evaluation":
        sources, tokens, steps = (tuple(state[name]) for name in ("sources", "tokens", "steps"))
        return cls(state["step"], sources, tokens, steps, state.get("max_tokens", 0))


def _spread(parts: list[float], least: float) -> float:
    """Returns the jackknife's standard error from the effect of each part, at least `least`; NaN for one part."""
    count = len(parts)
    if count < 2 or math.isnan(least):
        return math.nan
    mean = sum(parts) / count
    return max(least, math.sqrt((count - 1) / count * sum((part - mean) ** 2 for part in parts)))


def draw(prompts: Sequence[HeldOutPrompt], count: int) -> list[HeldOutPrompt]:
    """Returns at most `count` prompts, from every source in turn."""
    by_source: dict[str, list[HeldOutPrompt]] = {}
    for prompt in prompts:
        by_source.setdefault(prompt.source, []).append(prompt)
    turns = itertools.zip_longest(*by_source.values())
    return [prompt for turn in turns for prompt in turn if prompt is not None][:count]


def split(prompts: Sequence[HeldOutPrompt], count: int) -> tuple[list[HeldOutPrompt], list[HeldOutPrompt]]:
    """Returns the prompts that are decoded during a run, at most `count` and half of them, and the unseen others.

    Both have prompts of every source. A single prompt is used for both.
    """
    turns = draw(prompts, len(prompts))
    followed = max(1, min(count, len(turns) // 2))
    return turns[:followed], turns[followed:] or turns


class HeldOut:
    """Decodes held-out prompts greedily with a drafter as it will be served: rounded to bf16, in the target's dtype.

    The engine shares the target's weights. It is created once, and every evaluation copies the drafter's weights into
    it, so its captured steps stay valid; if a step of training needs its memory, it exists only while it decodes.
    Processes that share a target decode together, with the reference: the first of
    them has the drafter and broadcasts it.

    Args:
        shape: of all drafters.
        prompts: all held-out prompts; `evaluate_prompts` of them, from all sources, are decoded during the run, with
            short responses, and the others at its end, at full length.
        reserve: bytes of the GPU that training will need in addition to what is in use now.

    Raises:
        UserError: `evaluate_runtime` is engine, but the engine does not support the target.
    """

    def __init__(
        self, target: Target, shape: DrafterConfig, prompts: Sequence[HeldOutPrompt], run: RunOptions,
        reserve: float = 0.0,
    ) -> None:  # fmt: skip
        self._target = target
        self._followed, self._unseen = split(prompts, run.evaluate_prompts)
        self._short, self._full = run.evaluate_tokens, run.final_tokens or run.evaluate_tokens
        self._pace = 0.0  # seconds per token of the latest measurement during the run
        self._answers: list[tuple[list[int], Generation]] = []  # latest responses, independent of the drafter
        self._auto = run.evaluate_runtime == "auto"
        self._between = False  # whether the engine exists only while it decodes
        self._engine: Engine | None = None
        self.engine_bytes = 0  # memory that the engine allocates while it decodes
        on_gpu = target.device.type == "cuda" and target.mesh is None
        if run.evaluate_runtime == "engine" or (self._auto and on_gpu):
            before = memory_use(target.device)
            self._engine = self._make_engine(Drafter.fresh(shape, 0))
            after = memory_use(target.device)
            if self._engine and before and after and after.free < reserve:
                self._between, self._engine = True, None
                # the engine may use segments of the allocator that were partly filled, and so not free, before
                self.engine_bytes = max(before.free - after.free, after.allocated - before.allocated)
                free_memory()

    def __call__(self, drafter: Drafter, step: int = 0, bar: Progress | None = None) -> Evaluation:
        """Decodes the prompts of measurements during the run with `drafter`, with short responses.

        Args:
            step: of the run, for the record.
            bar: the run's progress bar; this one is shown below it.

        Raises:
            UserError: a prompt does not fit the target.
        """
        began = time.perf_counter()
        found = self._measured(drafter, self._followed, self._short, step, bar)
        self._pace = (time.perf_counter() - began) / max(1, sum(found.tokens))
        return found

    @property
    def final_work(self) -> str:
        """The work of a final measurement of one drafter, and the longest it may take at the latest pace, in words."""
        count, most = len(self._unseen), len(self._unseen) * self._full
        time_left = f", at most {duration(most * self._pace)}" if self._pace else ""
        return f"{count} held-out prompt{'s' * (count > 1)}, responses of at most {self._full} tokens{time_left}"

    def final(self, drafter: Drafter, step: int) -> Evaluation:
        """Decodes the prompts that were not looked at during the run, at full length. Raises UserError."""
        return self._measured(drafter, self._unseen, self._full, step, None)

    def without_selector(self, drafter: Drafter, step: int) -> Evaluation:
        """Like `final`, with each slot's own best token. Raises UserError."""
        return self._measured(drafter, self._unseen, self._full, step, None, selector=False)

    def calibration(self, drafter: Drafter, *, selector: bool = True) -> Calibration | None:
        """Calibrates the drafter's probabilities with the responses that were decoded last. Raises UserError.

        Args:
            selector: whether it is exported with its selector.
        """
        served = self._served(drafter)
        return calibrate(self._target, served if selector else served.without_selector(), self._answers)

    def _measured(
        self,
        drafter: Drafter,
        prompts: list[HeldOutPrompt],
        max_tokens: int,
        step: int,
        bar: Progress | None,
        *,
        selector: bool = True,
    ) -> Evaluation:
        served = self._served(drafter)
        if not selector and served.selector:
            served.selector.init_weights()  # each slot's best; the engine keeps its shape
        with Progress("held out", len(prompts), unit="tok", under=bar) as progress:
            return Evaluation.of(step, prompts, self._decoded(served, prompts, max_tokens, progress), max_tokens)

    def _served(self, drafter: Drafter) -> Drafter:
        """Returns the drafter as it is exported; peers get the first process's."""
        target = self._target
        with torch.device("meta"):
            tensors = Drafter(drafter.config).state_dict()
        whole = drafter.state_dict() if target.leads else {}
        for name, shape in tensors.items():
            if target.leads:
                tensors[name] = whole[name].detach().bfloat16().to(target.device, target.dtype)
            else:
                tensors[name] = torch.empty_like(shape, device=target.device, dtype=target.dtype)
            target.broadcast_(tensors[name])
        return Drafter.of_tensors(drafter.config, tensors).eval()

    def _decoded(
        self, served: Drafter, prompts: list[HeldOutPrompt], max_tokens: int, bar: Progress
    ) -> list[Generation]:
        engine = self._make_engine(served) if self._between else self._engine
        decoder: EngineDecoder | ReferenceDecoder
        if engine is None:
            decoder = ReferenceDecoder(self._target, served)
        else:
            engine.load_drafter(served)
            decoder = EngineDecoder(engine)
            del engine

        def on_step(generation: Generation) -> None:
            if generation.finish_reason is not None:
                bar.advance(1, len(generation.tokens))

        params = SamplingParams(max_tokens=max_tokens)
        try:
            found = decode_all(decoder, [prompt.tokens for prompt in prompts], params, on_step)
        finally:
            if self._between:
                decoder.close()
        self._answers = [(prompt.tokens, answer) for prompt, answer in zip(prompts, found, strict=True)]
        return found

    def _make_engine(self, drafter: Drafter) -> Engine | None:
        """Returns an engine for as many prompts at a time as the memory holds; None, with a line, for the reference."""
        try:
            parts = load_parts(self._target, drafter, share=True)
            for together in TOGETHER[:-1]:
                with contextlib.suppress(UserError, torch.OutOfMemoryError):
                    return parts.engine(self._options_for(drafter.config, together))
                free_memory()
            return parts.engine(self._options_for(drafter.config, TOGETHER[-1]))
        except (UserError, torch.OutOfMemoryError) as error:
            if not self._auto:
                raise
            reason = " ".join(str(error).split())
            print(f"held-out prompts are decoded by the reference; the engine cannot: {reason}", file=sys.stderr)
        return None

    def _options_for(self, shape: DrafterConfig, together: int) -> EngineOptions:
        target, tokens = self._target, max(self._short, self._full)
        lengths = sorted((len(prompt.tokens) for prompt in (*self._followed, *self._unseen)), reverse=True)
        longest = lengths[:together]
        # the last step writes whole blocks beyond the end of a response
        room = [-(-(n + tokens + 3 * shape.block_size) // PAGE) * PAGE for n in longest]
        return EngineOptions(
            max_num_seqs=len(longest),
            max_model_len=min(target.context_limit, longest[0] + tokens),
            num_speculative_tokens=shape.block_size - 1,  # whole blocks at every step, as in dflash-eval
            page_size=PAGE,
            kv_cache_tokens=sum(room),
            prefix_cache=False,  # its pages would hold keys and values of an older drafter
            draft_dtype="full",  # as in the reference
        )
