"""Held-out prompts decoded during a run, to measure the acceptance length that its checkpoint will have."""

import itertools
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from dflash_toolkit.acceptance import ratio
from dflash_toolkit.calibration import Calibration
from dflash_toolkit.confidence import calibrate
from dflash_toolkit.config import UserError
from dflash_toolkit.evaluation.measure.decoders import EngineDecoder, ReferenceDecoder, decode_all
from dflash_toolkit.generation import Generation
from dflash_toolkit.models.dflash.network import Drafter, DrafterConfig
from dflash_toolkit.models.target import Target
from dflash_toolkit.progress import Progress
from dflash_toolkit.runtime import Engine, EngineOptions
from dflash_toolkit.runtime.load import load_parts
from dflash_toolkit.sampling import SamplingParams

from ..config import RunOptions

TOGETHER = 8  # prompts decoded at a time; up to eight, the engine's responses do not depend on the batch
PAGE = 64  # tokens


CLEARLY = 2.0  # standard errors beyond which a difference counts


@dataclass(frozen=True, slots=True)
class HeldOutPrompt:
    """A prompt for measuring, not for training."""

    tokens: list[int]  # rendered with the chat template
    source: str  # short name of its file or data set


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Counts per prompt of a decoded drafter, after `step` steps of training.

    The acceptance length is a ratio of sums over prompts, tau = sum(tokens) / sum(steps). Prompts are the sample, so
    its standard error, and that of a difference of two evaluations of the same prompts, is the delta method's over
    prompts (the linearisation of a ratio estimator; Cochran, Sampling Techniques, 1977, chapter 6).
    """

    step: int
    sources: tuple[str, ...]  # [P] of every prompt
    tokens: tuple[int, ...]  # [P] committed by verification steps, with bonus tokens
    steps: tuple[int, ...]  # [P] verification steps

    @classmethod
    def of(cls, step: int, prompts: Sequence[HeldOutPrompt], responses: Sequence[Generation]) -> "Evaluation":
        """Counts the responses to `prompts`."""
        committed = tuple(sum(len(s.tokens) for s in response.steps) for response in responses)
        return cls(
            step, tuple(p.source for p in prompts), committed, tuple(len(response.steps) for response in responses)
        )

    @property
    def prompts(self) -> int:
        return len(self.steps)

    @property
    def tau(self) -> float:
        """Tokens per verification step over all prompts; NaN if no response was long enough for a step."""
        return ratio(sum(self.tokens), sum(self.steps))

    @property
    def standard_error(self) -> float:
        """Standard error of `tau`: sqrt(P / (P - 1) * sum((tokens - tau * steps)^2)) / sum(steps); NaN for P < 2."""
        return _spread(self._residuals())

    def _residuals(self) -> list[float]:
        """Returns by how much each prompt changes tau, to first order: [P]."""
        tau, steps = self.tau, sum(self.steps)
        return [ratio(t - tau * s, steps) for t, s in zip(self.tokens, self.steps, strict=True)]

    def clearly_better_than(self, other: "Evaluation") -> bool:
        """Whether tau is larger by more than two standard errors of the difference.

        Both evaluations have the same prompts, so the error is that of paired differences. With fewer than two prompts,
        or without a step, the result is False.
        """
        pairs = zip(self._residuals(), other._residuals(), strict=True)
        return self.tau - other.tau > CLEARLY * _spread([ours - theirs for ours, theirs in pairs])

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
        return cls(state["step"], *(tuple(state[name]) for name in ("sources", "tokens", "steps")))


def _spread(parts: list[float]) -> float:
    """Returns the standard error of a sum of independent terms with mean zero."""
    count = len(parts)
    return math.sqrt(count / (count - 1) * sum(part * part for part in parts)) if count > 1 else math.nan


def draw(prompts: Sequence[HeldOutPrompt], count: int) -> list[HeldOutPrompt]:
    """Returns at most `count` prompts, from every source in turn."""
    by_source: dict[str, list[HeldOutPrompt]] = {}
    for prompt in prompts:
        by_source.setdefault(prompt.source, []).append(prompt)
    turns = itertools.zip_longest(*by_source.values())
    return [prompt for turn in turns for prompt in turn if prompt is not None][:count]


class HeldOut:
    """Decodes held-out prompts greedily with a drafter as it will be served: rounded to bf16, in the target's dtype.

    The engine is created once and shares the target's weights; every evaluation copies the drafter's weights into it,
    so its captured steps stay valid. Processes that share a target decode together, with the reference: the first of
    them has the drafter and broadcasts it.

    Args:
        shape: of all drafters.
        prompts: all held-out prompts; `evaluate_prompts` of them, from all sources, are decoded during the run.

    Raises:
        UserError: `evaluate_runtime` is engine, but the engine does not support the target.
    """

    def __init__(self, target: Target, shape: DrafterConfig, prompts: Sequence[HeldOutPrompt], run: RunOptions) -> None:
        self._target, self._prompts = target, list(prompts)
        self._drawn = draw(self._prompts, run.evaluate_prompts)
        self._params = SamplingParams(max_tokens=run.evaluate_tokens)
        self._answers: list[tuple[list[int], Generation]] = []  # latest responses, independent of the drafter
        self._engine: Engine | None = None
        auto = run.evaluate_runtime == "auto"
        if run.evaluate_runtime == "engine" or (auto and target.device.type == "cuda" and target.mesh is None):
            try:
                self._engine = self._make_engine(shape)
            except (UserError, torch.OutOfMemoryError) as error:
                if not auto:
                    raise
                reason = " ".join(str(error).split())
                print(f"held-out prompts are decoded by the reference; the engine cannot: {reason}", file=sys.stderr)

    def __call__(self, drafter: Drafter, step: int = 0, bar: Progress | None = None) -> Evaluation:
        """Decodes the sampled prompts with `drafter`.

        Args:
            step: of the run, for the record.
            bar: the run's progress bar; this one is shown below it.

        Raises:
            UserError: a prompt does not fit the target.
        """
        return self._measured(drafter, self._drawn, step, bar)

    def all(self, drafter: Drafter, known: Evaluation | None) -> Evaluation | None:
        """Decodes all prompts, or returns `known` if all were sampled; None on peers of the first process.

        Raises UserError.
        """
        if len(self._drawn) == len(self._prompts):
            return known
        return self._measured(drafter, self._prompts, known.step if known else 0, None)

    def without_selector(self, drafter: Drafter, step: int) -> Evaluation:
        """Decodes all prompts with each slot's own best token. Raises UserError."""
        return self._measured(drafter, self._prompts, step, None, selector=False)

    def calibration(self, drafter: Drafter, *, selector: bool = True) -> Calibration | None:
        """Calibrates the drafter's probabilities with the responses that were decoded last. Raises UserError.

        Args:
            selector: whether it is exported with its selector.
        """
        served = self._served(drafter)
        if not self._answers:  # as in a run that resumes after its last evaluation
            with Progress("held out", len(self._drawn), unit="tok") as bar:
                self._decoded(served, self._drawn, bar)
        return calibrate(self._target, served if selector else served.without_selector(), self._answers)

    def _measured(
        self,
        drafter: Drafter,
        prompts: list[HeldOutPrompt],
        step: int,
        bar: Progress | None,
        *,
        selector: bool = True,
    ) -> Evaluation:
        served = self._served(drafter)
        if not selector and served.selector:
            served.selector.init_weights()  # each slot's best; the engine keeps its shape
        with Progress("held out", len(prompts), unit="tok", under=bar) as progress:
            return Evaluation.of(step, prompts, self._decoded(served, prompts, progress))

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

    def _decoded(self, served: Drafter, prompts: list[HeldOutPrompt], bar: Progress) -> list[Generation]:
        decoder: EngineDecoder | ReferenceDecoder
        if self._engine is None:
            decoder = ReferenceDecoder(self._target, served)
        else:
            self._engine.load_drafter(served)
            decoder = EngineDecoder(self._engine)

        def on_step(generation: Generation) -> None:
            if generation.finish_reason is not None:
                bar.advance(1, len(generation.tokens))

        found = decode_all(decoder, [prompt.tokens for prompt in prompts], self._params, on_step)
        self._answers = [(prompt.tokens, answer) for prompt, answer in zip(prompts, found, strict=True)]
        return found

    def _make_engine(self, shape: DrafterConfig) -> Engine:
        target, tokens = self._target, self._params.max_tokens
        parts = load_parts(target, Drafter.fresh(shape, 0), share=True)
        longest = sorted((len(prompt.tokens) for prompt in self._prompts), reverse=True)[:TOGETHER]
        # the last step writes whole blocks beyond the end of a response
        room = [-(-(n + tokens + 3 * shape.block_size) // PAGE) * PAGE for n in longest]
        options = EngineOptions(
            max_num_seqs=len(longest),
            max_model_len=min(target.context_limit, longest[0] + tokens),
            num_speculative_tokens=shape.block_size - 1,  # whole blocks at every step, as in dflash-eval
            page_size=PAGE,
            kv_cache_tokens=sum(room),
            prefix_cache=False,  # its pages would hold keys and values of an older drafter
            draft_dtype="full",  # rounded copies would not follow the weights
        )
        return parts.engine(options)
