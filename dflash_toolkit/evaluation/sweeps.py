"""The same prompts over a range of draft lengths, context lengths or requests at a time, and what to serve with."""

import itertools
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ..acceptance import ratio
from ..config import UserError
from ..generation import Generation
from ..sampling import SamplingParams
from .bootstrap import interval, resampled_sums
from .decoders import EngineDecoder, OnStep, Pair, ThreadedDecoder
from .measure import EncodedPrompt
from .report import Section, Summary, at_a_time, spread

WARM_UP_TOKENS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Sweeps:
    """What to go through, in ascending order; nothing by default."""

    draft_length: tuple[int, ...] = ()  # tokens drafted a step
    context_length: tuple[int, ...] = ()  # tokens of a prompt
    concurrency: tuple[int, ...] = ()  # requests at a time
    requests: int = 16  # of a point; at least two for each place

    def check(self, pair: Pair, max_tokens: int) -> None:
        """Raises UserError for what this pair cannot do."""
        if (most := max(self.draft_length, default=0)) > pair.block_size - 1:
            raise UserError(f"draft_length {most}: the drafter drafts at most {pair.block_size - 1} tokens a step")
        most = max(self.context_length, default=0)
        if most and most + max_tokens > pair.context_limit:
            raise UserError(
                f"context_length {most}: with an answer of {max_tokens} tokens (max_tokens) it is beyond the target's "
                f"limit of {pair.context_limit}"
            )
        if self.concurrency and pair.name not in ("engine", "endpoint"):
            raise UserError("concurrency: the reference decodes one request at a time; it needs --runtime engine")

    def at_concurrency(self, concurrency: int) -> int:
        """Requests of this point."""
        return max(self.requests, 2 * concurrency)


def chosen(sets: Mapping[str, Sequence[EncodedPrompt]], count: int) -> list[tuple[str, int]]:
    """Up to `count` prompts, from all sets alike: the name of the set and the place in it."""
    columns = ([(name, i) for i in range(len(prompts))] for name, prompts in sets.items())
    rows = itertools.zip_longest(*columns)
    return [place for row in rows for place in row if place is not None][:count]


def of_length(prompts: Sequence[EncodedPrompt], length: int) -> list[EncodedPrompt]:
    """The prompts, each behind as much of all of them, over and over, as makes so many tokens; longer ones are cut."""
    stream = [token for prompt in prompts for token in prompt.token_ids]
    filling = stream * (length // len(stream) + 1)
    found = []
    for prompt in prompts:
        own = prompt.token_ids[-length:]
        found.append(replace(prompt, token_ids=filling[: length - len(own)] + own, rest=None))
    return found


# ---- requests at a time -----------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Timed:
    """A request among others."""

    began: float
    first: float = math.nan  # seconds until the first token
    whole: float = math.nan  # and until the last
    generation: Generation | None = None
    last: float = math.nan  # when its latest token came
    gaps: list[float] = field(default_factory=list)  # seconds from each step to the next


def under_load(
    decoder: EngineDecoder | ThreadedDecoder,
    prompts: Sequence[list[int]],
    params: SamplingParams,
    concurrency: int,
    watch: OnStep | None = None,
) -> tuple[float, list[_Timed]]:
    """Seconds in all, and every request: whenever one has ended the next is submitted, `concurrency` at a time."""
    timed: dict[int, _Timed] = {}
    waiting = iter(enumerate(prompts))

    def submit() -> None:
        for key, prompt in itertools.islice(waiting, 1):
            request = timed[key] = _Timed(time.perf_counter())

            def on_step(growing: Generation, request: _Timed = request) -> None:
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
    """What the report has of so many requests at a time. Raises UserError: they have no room.

    Args:
        on_step: called with the growing drafted answers.
    """
    seconds: dict[bool, float] = {}
    timed: dict[bool, list[_Timed]] = {}
    short = replace(params, max_tokens=min(WARM_UP_TOKENS, params.max_tokens), ignore_eos=True)
    steps = 0
    for draft in (True, False) if baseline else (True,):
        decoder = pair.decoder_for(draft, concurrency)
        under_load(decoder, prompts[:concurrency], short, concurrency)
        before = pair.counted() if draft else None
        seconds[draft], timed[draft] = under_load(decoder, prompts, params, concurrency, on_step if draft else None)
        decoder.close()
        if draft:
            steps = pair.steps_since(before, [request.generation for request in timed[draft] if request.generation])
    answers = [request.generation for request in timed[True] if request.generation]
    figures = {draft: np.array([(_tokens(r), r.whole) for r in found]) for draft, found in timed.items()}
    speeds = {draft: ratio(figures[draft][:, 0].sum(), seconds[draft]) for draft in timed}
    speedup = speeds[True] / speeds[False] if baseline else None
    point = {
        "concurrency": concurrency,
        "requests": len(prompts),
        "tau_pooled": ratio(sum(len(a.tokens) - 1 for a in answers), steps),
        "tokens_per_second": speeds[True],
        "plain_tokens_per_second": speeds.get(False),
        "speedup": speedup,
        "speedup_ci95": speedup and _speedup_interval(figures, speedup),
    }
    for draft, name in ((True, ""), (False, "plain_")):
        found = timed.get(draft)
        per_token = [(r.whole - r.first) / (_tokens(r) - 1) for r in found if _tokens(r) > 1] if found else []
        point[f"{name}time_to_first_token_seconds"] = spread([r.first for r in found or ()])
        point[f"{name}inter_token_latency_seconds"] = spread([gap for r in found or () for gap in r.gaps])
        point[f"{name}time_per_output_token_seconds"] = spread(per_token)
    return point


def _tokens(request: _Timed) -> int:
    return len(request.generation.tokens) if request.generation else 0


def _speedup_interval(figures: Mapping[bool, Any], speedup: float) -> Any:
    """Of requests' own times, which differ as those of the whole do."""
    sums = resampled_sums(np.concatenate([figures[True], figures[False]], axis=1))
    ratios = (sums[:, 0] / sums[:, 1]) / (sums[:, 2] / sums[:, 3])
    all_of_them = np.concatenate([figures[True], figures[False]], axis=1).sum(0)
    measured = (all_of_them[0] / all_of_them[1]) / (all_of_them[2] / all_of_them[3])
    return interval(ratios * (speedup / measured), len(figures[True]))


# ---- what to serve with -----------------------------------------------------------------------------------------


def recommendation(
    section: Section, sweeps: Mapping[str, Sequence[Mapping[str, Any]]], concurrency: int = 1
) -> dict[str, Any] | None:
    """Whether to use the drafter, how long drafts are to be and up to how many requests; None without a baseline."""
    speedup, within = section.overall.speedup, section.overall.intervals["speedup"]
    if speedup is None or not math.isfinite(speedup):
        return None
    said = []
    lengths = sweeps.get("draft_length", ())
    length = _block_size(section.overall) - 1
    if lengths:
        best = max(lengths, key=lambda point: _number(point["tokens_per_second"]))
        length, speedup, within = best["num_speculative_tokens"], best["speedup"], best["speedup_ci95"]
        said.append(f"{length} drafted tokens are the fastest of {_listed(lengths, 'num_speculative_tokens')}")
    low, high = within or (speedup, speedup)
    use = True if low > 1 else False if high < 1 else None
    said.append(f"{at_a_time(concurrency)} is {speedup:.2f}x as fast as without a drafter")
    most: int | None = None
    if loads := sweeps.get("concurrency", ()):
        paying = itertools.takewhile(
            lambda point: (point["speedup_ci95"] or (_number(point["speedup"]),))[0] > 1, loads
        )
        most = max((point["concurrency"] for point in paying), default=0)
        faster = f"up to {most} are faster" if most else "not even the fewest are surely faster"  # more may be
        said.append(f"of {_listed(loads, 'concurrency')} requests at a time {faster} with it")
    return {
        "use_drafter": use,
        "num_speculative_tokens": length,
        "max_concurrency": most,
        "speedup": speedup,
        "speedup_ci95": within,
        "reason": f"{'; '.join(said)}.".capitalize(),
    }


def _block_size(summary: Summary) -> int:
    return len(summary.drafted.accepted_lengths)


def _number(value: float | None) -> float:
    return -math.inf if value is None or math.isnan(value) else value


def _listed(points: Sequence[Mapping[str, Any]], key: str) -> str:
    return ", ".join(str(point[key]) for point in points)
