"""Shows the answers with the lowest and highest acceptance, token by token, and the source of each token."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from ..measure.measurement import Measurement
from .results import Report
from .table import number, percent, times

SHOWN = 3  # worst answers, and best answers
SIBLINGS = 3  # alternatives per token, most probable first
PROMPT, ANSWER = 600, 240  # maximum characters, maximum tokens


@dataclass(frozen=True, slots=True)
class ShownToken:
    """A token and its alternatives in the draft tree."""

    kind: str  # accepted; accepted bought: a chain would have missed it; corrected; own
    text: str
    note: str = ""
    siblings: tuple[tuple[str, str], ...] = ()  # text and note


@dataclass(frozen=True, slots=True)
class ShownStep:
    """One verification step."""

    note: str
    tokens: tuple[ShownToken, ...]


@dataclass(frozen=True, slots=True)
class Answer:
    """A request in the report."""

    name: str
    figures: str
    prompt: str
    steps: tuple[ShownStep, ...]
    left_out: int  # tokens that are not shown


def worst_and_best(report: Report) -> tuple[list[Answer], list[Answer]]:
    """Returns the answers of the first section with the lowest and the highest acceptance length, without overlap."""
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
    # without texts, ids are shown
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
    """Splits the texts into steps; the prefill's token comes first."""
    steps = measurement.drafted.steps
    ends = [0, 1]
    for step in steps:
        ends.append(ends[-1] + len(step.tokens))
    offered_texts = dict(measurement.offered_texts)
    shown = [ShownStep("from the prefill", (ShownToken("own", texts[0]),))]
    for place, (step, (start, end)) in enumerate(zip(steps, pairwise(ends[1:]), strict=True), 1):
        last = "corrected" if step.accepted < step.drafted else "own"
        kinds = ["accepted" if i < step.accepted else last for i in range(end - start)]
        note = f"step {place}: {step.accepted} of {step.drafted} drafts accepted"
        offered = step.offered or ((),) * len(kinds)
        tokens = zip(kinds, texts[start:end], step.tokens, offered, strict=False)
        shown.append(ShownStep(note, tuple(_token(*each, note, offered_texts) for each in tokens)))
    return tuple(step for step in shown if step.tokens)


def _token(
    kind: str, text: str, token: int, offered: Sequence[tuple[int, float]], note: str, texts: Mapping[int, str]
) -> ShownToken:
    """Returns a token with its alternatives; `note` describes its step."""
    drafted = [each for each, _ in offered]
    siblings = [
        (texts[each].replace("\n", "⏎").strip() or "␣", f"drafted with {percent(p)}")
        for each, p in offered
        if each != token
    ][:SIBLINGS]
    if kind == "accepted" and token in drafted:
        place = drafted.index(token)
        note += f"; drafted with {percent(offered[place][1])}, rank {place + 1} of {len(drafted)}"
        kind = "accepted bought" if place else kind
    elif drafted:
        note += f"; {len(drafted)} other tokens were drafted" if len(drafted) > 1 else "; another token was drafted"
    return ShownToken(kind, text, note if drafted else "", tuple(siblings))
