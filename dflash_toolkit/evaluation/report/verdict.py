"""Summarizes a report in sentences: speed, exactness, losses and the recommendation."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ...options import PromptOptions
from ..measure.distribution import SUSPICIOUS
from ..stats.bootstrap import Interval
from .results import Report, Summary
from .table import times
from .tables import SWEPT

TIE_NATS = 0.2  # a regret up to this value is a tie that rounding can decide
FALL = 0.1  # a larger fall of tau with the prompt's length has advice
PACKED = 128  # prompts.join_to is a multiple of it
NAMED = 6  # maximum number of listed losses
SWEPT_PLACES: dict[
    str, Callable[[int], str]
] = {  # points of sweeps, in words; of draft lengths the best one is served with
    "context_length": lambda length: f"prompts of {length:,} tokens",
    "concurrency": lambda count: "one request at a time" if count == 1 else f"{count:,} requests at a time",
}

Outcome = Literal["good", "bad", "unsure", "unknown"]
SIGNS: dict[Outcome, str] = {"good": "✓", "bad": "✗", "unsure": "?", "unknown": "○"}  # readable without colours


@dataclass(frozen=True, slots=True)
class Verdict:
    """The summary at the top of a report."""

    outcome: Outcome  # whether to use the drafter
    headline: str
    exactness: Outcome
    points: tuple[tuple[str, str], ...]  # question and answer
    with_drafter: bool  # whether to serve with it


def judge(speedup: float | None, within: Interval | None) -> Outcome:
    """Judges a speed-up: its interval, if there is one, must not contain 1."""
    if speedup is None or not math.isfinite(speedup):
        return "unknown"
    low, high = within or (speedup, speedup)
    return "good" if low > 1 else "bad" if high < 1 else "unsure"


def judge_summary(summary: Summary) -> Outcome:
    return judge(summary.speedup, summary.intervals["speedup"])


def verdict(report: Report) -> Verdict:
    """Judges the first section; the losses also cover the other sections and the sweeps."""
    exactness, said = _exact(report)
    points = [
        ("Exact?", " ".join([said, *_distribution(report), *_cache(report)])),
        ("Where does it lose?", _losses(report)),
        *(("Long prompts?", said) for said in _long_prompts(report)),
        ("What to serve with?", _recommended(report)),
    ]
    headline, outcome = _headline(report), judge_summary(report.overall)
    if exactness == "bad":
        headline, outcome = f"Not exact. {headline}", "bad"
    against = outcome == "bad" or _advised_against(report.recommendation)
    return Verdict(outcome, headline, exactness, tuple(points), not against)


def _advised_against(advice: Mapping[str, Any] | None) -> bool:
    """Whether the recommendation is to serve without the drafter."""
    return advice is not None and (advice["use_drafter"] is False or advice["max_concurrency"] == 0)


def speed(summary: Summary) -> str:
    """Writes a speed-up with its interval."""
    within = summary.intervals["speedup"]
    interval = f"95 % interval {times(within[0])} to {times(within[1])}" if within else "one request, so no interval"
    return f"{times(summary.speedup)} ({interval})"


def _headline(report: Report) -> str:
    name = report.sections[0].name
    how = f"{speed(report.overall)} the speed of plain decoding, {report.load}, {name}"
    return {
        "good": f"Faster: {how}.",
        "bad": f"Slower: {how}.",
        "unsure": f"No clear difference: {how}.",
        "unknown": f"Speed-up not measured: nothing was decoded without the drafter ({name}).",
    }[judge_summary(report.overall)]


def _exact(report: Report) -> tuple[Outcome, str]:
    summary = report.overall
    if summary.identical is None:
        if summary.plain is None:
            return "unknown", "Not measured: nothing was decoded without the drafter."
        return "unknown", "Not compared: sampled drafts give other answers of the same distribution."
    count, differ = summary.drafted.answers, summary.drafted.answers - summary.identical
    if not differ:
        all_are = f"all {count:,} answers are those" if count > 1 else "the answer is that"
        return "good", f"Yes: {all_are} of plain decoding, token for token."
    found = [d.regret_nats for s in report.sets.values() for _, d in s.differences]
    said = f"{differ:,} of {count:,} answers differ from plain decoding"
    if report.sections[0].temperature:
        return "bad", f"No: {said}, though both were sampled with the same random numbers."
    worst = max((math.inf if r is None or math.isnan(r) else r for r in found), default=math.inf)
    if worst <= TIE_NATS:
        return (
            "good",
            f"Yes, up to rounding: {said}, each first at a tie of the target (regret up to {worst:.3f} nats).",
        )
    size = f"{worst:.2f} nats" if math.isfinite(worst) else "no number"
    return "bad", f"No: {said}, with a regret of {size} at a first difference: more than rounding explains."


def _distribution(report: Report) -> list[str]:
    """Writes the result of the distribution test, if there is one."""
    if not report.distribution:
        return []
    chance = report.distribution["p_value"]
    unlike = "have another distribution than" if chance < SUSPICIOUS else "show no difference in distribution from"
    count = report.distribution["samples"]
    return [f"Sampled answers {unlike} plain ones (p = {chance:.3f}, {count:,} answers per prompt)."]


def _cache(report: Report) -> list[str]:
    """Names the format of the KV cache if it changes the target's answers."""
    if report.arguments.get("kv_cache_dtype") != "fp8":
        return []
    return ["The KV cache is in fp8, with and without the drafter: the target's answers differ from those in 16 bits."]


def _losses(report: Report) -> str:
    """Lists sets that are not faster, categories that differ from their set, and such points of sweeps."""
    found: dict[Outcome, list[str]] = {"good": [], "bad": [], "unsure": [], "unknown": []}
    for section in report.sections:
        where = f", {section.name}" if len(report.sections) > 1 else ""
        for name, result in section.sets.items():
            own = judge_summary(result.summary)
            found[own].append(f"{name} ({times(result.summary.speedup)}{where})")
            for kind, summary in result.categories.items():
                if judge_summary(summary) != own:
                    found[judge_summary(summary)].append(f"{name}: {kind} ({times(summary.speedup)}{where})")
    swept: dict[Outcome, list[str]] = {"good": [], "bad": [], "unsure": [], "unknown": []}
    for sweep, place in SWEPT_PLACES.items():
        for point in report.sweeps.get(sweep, ()):
            said = f"{place(point[SWEPT[sweep][0]])} ({times(point['speedup'])})"
            swept[judge(point["speedup"], point["speedup_ci95"])].append(said)
    words: dict[Outcome, str] = {"bad": "Slower", "unsure": "Not sure"}
    parts = [
        f"{said} {where} {_named(places[outcome])}."
        for outcome, said in words.items()
        for where, places in (("in", found), ("with", swept))
        if places[outcome]
    ]
    if found["good"] and not found["bad"] and not found["unsure"]:
        parts.insert(0, "Every set is faster." if parts else "Nowhere: every set is faster.")
    return " ".join(parts) or "Not measured."


def _long_prompts(report: Report) -> Iterator[str]:
    """Writes how tau changes with the prompt's length, and what to do if it falls; nothing for one length."""
    points = report.sweeps.get("context_length", [])
    measured = [point for point in points[1:] if math.isfinite(point.get("tau_over_shortest") or math.nan)]
    if not measured:
        yield from _other_prompts(report)
        return
    fallen = [point for point in measured if point["tau_over_shortest"] < 1 - FALL]
    point = fallen[0] if fallen else measured[-1]
    within = point["tau_over_shortest_ci95"]
    interval = f" (95 % interval {times(within[0])} to {times(within[1])})" if within else ""
    said = (
        f"τ with {point['context_length']:,} prompt tokens is {times(point['tau_over_shortest'])} of that with "
        f"{points[0]['context_length']:,}{interval}, for the same questions."
    )
    if not fallen:
        yield said
    elif within and within[1] >= 1:
        yield f"{said} That may be chance: raise --sweep-requests."
    else:
        longest = max(point["context_length"] + report.arguments["max_tokens"], PromptOptions().max_length)
        tokens = -(-longest // PACKED) * PACKED
        yield (
            f"{said} Train on rows of this length, with dflash-train --prompts.join-to {tokens}, or limit the context "
            f"that the drafter sees, with --drafter.layer-types sliding_attention and --drafter.sliding-window."
        )


def _other_prompts(report: Report) -> Iterator[str]:
    """Writes the shortest group of longer prompts with a tau clearly below that of the shortest prompts."""
    groups = list(report.sections[0].by_prompt_tokens.items())
    for group, summary in groups[1:]:
        first, short = groups[0]
        before, after = (each.intervals["tau_pooled"] for each in (short, summary))
        taus = short.drafted.tau_pooled, summary.drafted.tau_pooled
        if before and after and after[1] < before[0] and taus[1] < (1 - FALL) * taus[0]:
            yield (
                f"τ is {taus[0]:.2f} with prompts of {first} tokens and {taus[1]:.2f} with {group}. These are other "
                f"prompts; --context-length 1024 8192 measures the same questions at both lengths."
            )
            return


def _named(places: list[str]) -> str:
    more = f" and {len(places) - NAMED} more" if len(places) > NAMED else ""
    return ", ".join(places[:NAMED]) + more


def _recommended(report: Report) -> str:
    advice = report.recommendation
    if advice is None:
        needed = " (--plain-endpoint)" if report.arguments.get("endpoint") else ""
        return f"Not known: it needs plain decoding of the same prompts{needed}."
    most = advice["max_concurrency"]
    if advice["use_drafter"] is None:
        do = "Unclear: measure more requests."
    elif _advised_against(advice):
        do = "Without the drafter, on this machine and for such prompts."
    else:
        load = f", up to {most} requests at a time" if most else ""
        do = f"{advice['num_speculative_tokens']} drafted tokens a step{load}."
    missing = {"draft_length": "--draft-length", "concurrency": "--concurrency"}
    unswept = [option for name, option in missing.items() if not report.sweeps.get(name)]
    ask = f" Not measured: other settings ({' and '.join(unswept)} would)." if unswept else ""
    return f"{do} {advice['reason']}{ask}"
