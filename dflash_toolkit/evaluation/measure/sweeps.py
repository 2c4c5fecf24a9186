"""Sweeps over draft lengths, context lengths and concurrency, and the recommendation from them."""

import itertools
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ...acceptance import ratio
from ...config import UserError
from ...generation import Generation
from ...sampling import SamplingParams
from ..report.results import Section, at_a_time, spread
from ..stats.bootstrap import interval, resampled_sums
from .decoders import EngineDecoder, OnStep, ThreadedDecoder
from .measurement import EncodedPrompt
from .pairs import Pair

WARM_UP_TOKENS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Sweeps:
    """The points of each sweep, in ascending order; none by default."""

    draft_length: tuple[int, ...] = ()  # tokens drafted per step
    context_length: tuple[int, ...] = ()  # tokens of a prompt, the same prompts at each length
    concurrency: tuple[int, ...] = ()  # concurrent requests
    draft_tree_nodes: tuple[int, ...] = ()  # compared with blocks and chains at each concurrency, or at 1
    requests: int = 16  # per point; at least 2 x concurrency

    def check(self, pair: Pair, max_tokens: int) -> None:
        """Raises UserError if this pair does not support a sweep."""
        if (most := max(self.draft_length, default=0)) > pair.block_size - 1:
            raise UserError(f"draft_length {most}: the drafter drafts at most {pair.block_size - 1} tokens per step")
        most = max(self.context_length, default=0)
        if most and most + max_tokens > pair.context_limit:
            raise UserError(
                f"context_length {most}: with an answer of {max_tokens} tokens (max_tokens) it exceeds the target's "
                f"limit of {pair.context_limit}"
            )
        if self.concurrency and pair.name not in ("engine", "endpoint"):
            raise UserError("concurrency: the reference decodes one request at a time; it needs --runtime engine")
        if self.draft_tree_nodes and pair.name != "engine":
            raise UserError(
                "draft_tree_nodes: only the engine can measure draft trees as served; it needs --runtime engine"
            )

    @property
    def drafting_loads(self) -> tuple[int, ...]:
        """Concurrency values at which ways to draft are compared."""
        return (self.concurrency or (1,)) if self.draft_tree_nodes else ()

    def at_concurrency(self, concurrency: int) -> int:
        """Number of requests of this point."""
        return max(self.requests, 2 * concurrency)


def chosen(sets: Mapping[str, Sequence[EncodedPrompt]], count: int) -> list[tuple[str, int]]:
    """Chooses up to `count` prompts evenly from all sets; returns the set's name and the index of each."""
    columns = ([(name, i) for i in range(len(prompts))] for name, prompts in sets.items())
    rows = itertools.zip_longest(*columns)
    return [place for row in rows for place in row if place is not None][:count]


# ---- concurrent requests ----------------------------------------------------------------------------------------


@dataclass(slots=True)
class Timed:
    """Times of one of several concurrent requests."""

    began: float
    first: float = math.nan  # seconds until the first token
    whole: float = math.nan  # seconds until the last token
    generation: Generation | None = None
    last: float = math.nan  # time of the latest token
    gaps: list[float] = field(default_factory=list)  # seconds between steps


def under_load(
    decoder: EngineDecoder | ThreadedDecoder,
    prompts: Sequence[list[int]],
    params: SamplingParams,
    concurrency: int,
    watch: OnStep | None = None,
) -> tuple[float, list[Timed]]:
    """Keeps `concurrency` requests in flight until all prompts are decoded; returns the seconds and every request."""
    timed: dict[int, Timed] = {}
    waiting = iter(enumerate(prompts))

    def submit() -> None:
        for key, prompt in itertools.islice(waiting, 1):
            request = timed[key] = Timed(time.perf_counter())

            def on_step(growing: Generation, request: Timed = request) -> None:
                now = time.perf_counter()
                if math.isnan(request.first):
                    request.first = now - request.began
                else:
                    request.gaps.append(now - request.last)
                request.last = now
                if watch:
                    watch(growing)

            decoder.submit(key, prompt, params, on_step=on_step)

    began = time.perf_counter()
    for _ in range(concurrency):
        submit()
    for _ in prompts:
        response = decoder.wait()
        request = timed[response.key]
        request.whole, request.generation = time.perf_counter() - request.began, response.generation
        submit()
    return time.perf_counter() - began, [timed[key] for key in range(len(prompts))]


def load_point(
    pair: Pair,
    prompts: Sequence[list[int]],
    params: SamplingParams,
    concurrency: int,
    baseline: bool,
    on_step: OnStep | None = None,
) -> dict[str, Any]:
    """Measures one concurrency, in the form of the report. Raises UserError if memory is too small.

    Args:
        on_step: called with the growing drafted answers.
    """
    seconds: dict[bool, float] = {}
    timed: dict[bool, list[Timed]] = {}
    steps = 0
    for draft in (True, False) if baseline else (True,):
        decoder = pair.decoder_for(draft, concurrency)
        warm_up(decoder, prompts, params, concurrency)
        before = pair.counted() if draft else None
        seconds[draft], timed[draft] = under_load(decoder, prompts, params, concurrency, on_step if draft else None)
        decoder.close()
        if draft:
            steps = pair.steps_since(before, [request.generation for request in timed[draft] if request.generation])
    answers = [request.generation for request in timed[True] if request.generation]
    figures = {draft: totals(found) for draft, found in timed.items()}
    speeds = {draft: ratio(figures[draft][:, 0].sum(), seconds[draft]) for draft in timed}
    speedup = speeds[True] / speeds[False] if baseline else None
    point = {
        "concurrency": concurrency,
        "requests": len(prompts),
        "tau_pooled": ratio(sum(len(a.tokens) - 1 for a in answers), steps),
        "tokens_per_second": speeds[True],
        "plain_tokens_per_second": speeds.get(False),
        "speedup": speedup,
        "speedup_ci95": speedup and speedup_interval(figures[True], figures[False], speedup),
    }
    return point | spreads(timed[True]) | spreads(timed.get(False, []), "plain_")


def warm_up(
    decoder: EngineDecoder | ThreadedDecoder, prompts: Sequence[list[int]], params: SamplingParams, concurrency: int
) -> None:
    """Decodes a few untimed tokens at the same concurrency."""
    short = replace(params, max_tokens=min(WARM_UP_TOKENS, params.max_tokens), ignore_eos=True)
    under_load(decoder, prompts[:concurrency], short, concurrency)


def spreads(timed: Sequence[Timed], prefix: str = "") -> dict[str, dict[str, float] | None]:
    """Returns the latencies that clients see, by their names in the report."""
    per_token = [(r.whole - r.first) / (_tokens(r) - 1) for r in timed if _tokens(r) > 1]
    return {
        f"{prefix}time_to_first_token_seconds": spread([r.first for r in timed]),
        f"{prefix}inter_token_latency_seconds": spread([gap for r in timed for gap in r.gaps]),
        f"{prefix}time_per_output_token_seconds": spread(per_token),
    }


def totals(timed: Sequence[Timed]) -> Any:
    """Returns tokens and seconds of each request, [R, 2]."""
    return np.array([(_tokens(request), request.whole) for request in timed])


def _tokens(request: Timed) -> int:
    return len(request.generation.tokens) if request.generation else 0


def speedup_interval(figures: Any, others: Any, speedup: float) -> Any:
    """Returns the interval of a speed-up: the bootstrap of two `totals`, scaled to the measured speed-up."""
    sums = resampled_sums(np.concatenate([figures, others], axis=1))
    ratios = (sums[:, 0] / sums[:, 1]) / (sums[:, 2] / sums[:, 3])
    all_of_them = np.concatenate([figures, others], axis=1).sum(0)
    measured = (all_of_them[0] / all_of_them[1]) / (all_of_them[2] / all_of_them[3])
    return interval(ratios * (speedup / measured), len(figures))


# ---- recommendation ---------------------------------------------------------------------------------------------


def recommendation(
    section: Section, sweeps: Mapping[str, Sequence[Mapping[str, Any]]], concurrency: int = 1
) -> dict[str, Any] | None:
    """Recommends whether to use the drafter, its draft length and the maximum load; None without a baseline."""
    speedup, within = section.overall.speedup, section.overall.intervals["speedup"]
    if speedup is None or not math.isfinite(speedup):
        return None
    said = []
    lengths = sweeps.get("draft_length", ())
    length = len(section.overall.drafted.accepted_lengths) - 1
    if lengths:
        best = max(lengths, key=lambda point: _number(point["tokens_per_second"]))
        length, speedup, within = best["num_speculative_tokens"], best["speedup"], best["speedup_ci95"]
        said.append(f"{length} drafted tokens are the fastest of {_listed(lengths, 'num_speculative_tokens')}")
    low, high = within or (speedup, speedup)
    use = True if low > 1 else False if high < 1 else None
    interval = f" (95 % interval {low:.2f}x to {high:.2f}x)" if within else ""
    unsure = " shows no clear difference:" if use is None else " is"
    said.append(f"{at_a_time(concurrency)}{unsure} {speedup:.2f}x as fast as without a drafter{interval}")
    most: int | None = None
    if loads := sweeps.get("concurrency", ()):
        paying = itertools.takewhile(
            lambda point: (point["speedup_ci95"] or (_number(point["speedup"]),))[0] > 1, loads
        )
        most = max((point["concurrency"] for point in paying), default=0)
        faster = f"up to {most} are faster" if most else "not even the fewest are clearly faster"
        said.append(f"of {_listed(loads, 'concurrency')} requests at a time {faster} with it")
    return {
        "use_drafter": use,
        "num_speculative_tokens": length,
        "max_concurrency": most,
        "speedup": speedup,
        "speedup_ci95": within,
        "reason": f"{'; '.join(said)}.".capitalize(),
    }


def _number(value: float | None) -> float:
    return -math.inf if value is None or math.isnan(value) else value


def _listed(points: Sequence[Mapping[str, Any]], key: str) -> str:
    return ", ".join(str(point[key]) for point in points)
