"""The answers that the drafter helped least and most, token by token: who chose each."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from ..measure.measurement import Measurement
from .results import Report
from .table import number, percent, times

SHOWN = 3  # of the worst and of the best
SIBLINGS = 3  # of a token, the likeliest
PROMPT, ANSWER = 600, 240  # characters, tokens


@dataclass(frozen=True, slots=True)
class ShownToken:
    """A token, and what a draft tree had in its place."""

    kind: str  # accepted; accepted bought: no chain would have had it; corrected; own
    text: str
    said: str = ""
    siblings: tuple[tuple[str, str], ...] = ()  # text, and what is said of it


@dataclass(frozen=True, slots=True)
class ShownStep:
    """One verification."""

    said: str
    tokens: tuple[ShownToken, ...]


@dataclass(frozen=True, slots=True)
class Answer:
    """A request as a reader looks it up."""

    name: str
    figures: str
    prompt: str
    steps: tuple[ShownStep, ...]
    left_out: int  # tokens


def worst_and_best(report: Report) -> tuple[list[Answer], list[Answer]]:
    """By acceptance length, least first and most first, of the first section; no request is in both."""
    found = [(name, m) for name, s in report.sets.items() for m in s.measurements if m.drafted.steps]
    found.sort(key=lambda item: item[1].drafted.acceptance_length or 0.0)
    count = min(SHOWN, len(found) // 2)
    worst, best = found[: max(count, min(1, len(found)))], found[len(found) - count :][::-1]
    return [_answer(*item) for item in worst], [_answer(*item) for item in best]


def _answer(name: str, measurement: Measurement) -> Answer:
    drafted, plain = measurement.drafted, measurement.plain
    category = f" ({measurement.category})" if measurement.category else ""
    turn = f", turn {measurement.turn}" if measurement.turn > 1 else ""
    figures = f"τ {number(drafted.acceptance_length)}, {len(drafted.tokens):,} tokens in {len(drafted.steps):,} steps"
    if plain and plain.steps and plain.decode_s and drafted.decode_s:
        rates = [sum(len(step.tokens) for step in answer.steps) / answer.decode_s for answer in (drafted, plain)]
        figures += f", {times(rates[0] / rates[1])}"
    # what decodes without giving texts is shown by its ids
    texts = measurement.token_texts or tuple(f"{token} " for token in drafted.tokens)
    text = measurement.asked or measurement.prompt_text
    prompt = text if len(text) <= PROMPT else f"{text[: PROMPT // 2]} … {text[-PROMPT // 2 :]}"
    shown = _steps(measurement, texts[:ANSWER])
    return Answer(
        f"{own_name(name, measurement.id)}{category}{turn}", figures, prompt, shown, max(0, len(texts) - ANSWER)
    )


def own_name(set_name: str, request: str) -> str:
    """Names a request of a set; an id that begins with the set's name does not repeat it."""
    return request if request.startswith(f"{set_name}/") else f"{set_name}: {request}"


def _steps(measurement: Measurement, texts: tuple[str, ...]) -> tuple[ShownStep, ...]:
    """The texts by steps, behind the prefill's token."""
    steps = measurement.drafted.steps
    ends = [0, 1]
    for step in steps:
        ends.append(ends[-1] + len(step.tokens))
    offered_texts = dict(measurement.offered_texts)
    shown = [ShownStep("from the prefill", (ShownToken("own", texts[0]),))]
    for place, (step, (start, end)) in enumerate(zip(steps, pairwise(ends[1:]), strict=True), 1):
        last = "corrected" if step.accepted < step.drafted else "own"
        kinds = ["accepted" if i < step.accepted else last for i in range(end - start)]
        said = f"step {place}: {step.accepted} of {step.drafted} drafts accepted"
        offered = step.offered or ((),) * len(kinds)
        tokens = zip(kinds, texts[start:end], step.tokens, offered, strict=False)
        shown.append(ShownStep(said, tuple(_token(*each, said, offered_texts) for each in tokens)))
    return tuple(step for step in shown if step.tokens)


def _token(
    kind: str, text: str, token: int, offered: Sequence[tuple[int, float]], said: str, texts: Mapping[int, str]
) -> ShownToken:
    """A token of a step of which so much is `said`."""
    drafted = [each for each, _ in offered]
    siblings = [(_visible(texts[each]), f"offered with {percent(p)}") for each, p in offered if each != token][
        :SIBLINGS
    ]
    if kind == "accepted" and token in drafted:
        place = drafted.index(token)
        said += f"; offered with {percent(offered[place][1])}, {place + 1} of {len(drafted)} in its place"
        kind = "accepted bought" if place else kind
    elif drafted:
        said += f"; {len(drafted)} others were offered in its place" if len(drafted) > 1 else "; another was offered"
    return ShownToken(kind, text, said if drafted else "", tuple(siblings))


def _visible(text: str) -> str:
    return text.replace("\n", "⏎").strip() or "␣"
