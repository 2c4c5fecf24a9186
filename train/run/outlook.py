"""Predicts a run's acceptance length and the gain of more training, from published drafters and from its own points."""

import json
import math
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from dflash_toolkit.config import UserError
from dflash_toolkit.models.dflash.architecture import of_kind

from .cost import duration
from .curve import Point, Value, fit

PUBLISHED = Path(__file__).with_name("curve.json")  # table `training-curve` of scripts/results
AMOUNTS = ("seen_tokens", "response_tokens")  # of a row, in millions
SETS = {"chat": "mt_bench", "maths": "gsm8k"}
BEYOND = 1.5  # factor over the largest measured amount from which a prediction is called extrapolated
BELOW = 0.5  # share of the smallest measured amount below which nothing is predicted
METRICS = "metrics.jsonl"

Line = tuple[str, str, str]  # what, how much, how it was found


class Published:
    """The curves of one target and kind of drafter. Amounts are millions of tokens: seen, and of distinct responses."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.target, self.kind, self.parameters = (rows[0][key] for key in ("target", "kind", "parameters"))
        self.most = [max(row[key] for row in rows) for key in AMOUNTS]
        self.least = [min(row[key] for row in rows) for key in AMOUNTS]
        self.lowest = {name: min(row[key] for row in rows if key in row) for name, key in SETS.items()}
        self.curves = {
            name: fit([Point((row["seen_tokens"], row["response_tokens"]), row[key], row.get(f"{key}_error"))
                       for row in rows if key in row])
            for name, key in SETS.items()
        }  # fmt: skip
        self.drafters = len(rows)

    @property
    def source(self) -> str:
        return f"curve of {self.drafters} {of_kind(self.kind).title} runs of {self.target}"

    def beyond(self, amounts: Iterable[float]) -> str:
        """Returns how far the amounts are outside the measured ones, in words; empty if they are not."""
        times = max(amount / most for amount, most in zip(amounts, self.most, strict=True))
        return f"; extrapolated to {times:,.0f} times its tokens" if times > BEYOND else ""


@cache
def published() -> tuple[Published, ...]:
    """Returns the published curves."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in json.loads(PUBLISHED.read_text(encoding="utf-8"))["rows"]:
        if "seen_tokens" in row:
            groups.setdefault((row["target"], row["kind"]), []).append(row)
    found = []
    for rows in groups.values():
        try:
            found.append(Published(rows))
        except UserError:
            continue  # too few drafters for a curve
    return tuple(found)


def outlook(
    parameters: float, kind: str, seen: float, distinct: float, an_hour: float, world: int, work: Path | None
) -> list[Line]:
    """Returns lines of an estimate on acceptance length: of the run, after another hour, with twice the responses.

    Args:
        parameters: of the target.
        kind: of the drafter.
        seen: response tokens that the run trains on, each epoch counted.
        distinct: response tokens.
        an_hour: response tokens that an hour of training sees.
        world: number of GPUs.
        work: directory of the run's metrics.
    """
    like = min(published(), key=lambda each: (abs(math.log(each.parameters * 1e9 / parameters)), each.kind != kind))
    planned, longer, wider = ([x / 1e6 for x in pair] for pair in
                              ((seen, distinct), (seen + an_hour, distinct), (seen, 2 * distinct)))  # fmt: skip
    own, why = _own(work)
    if any(amount < BELOW * least for amount, least in zip(planned, like.least, strict=True)):
        below = "\n".join(f"below {tau:.2f} ({name})" for name, tau in like.lowest.items())
        lines = [("tokens per step", below, f"fewer tokens than any of {like.drafters} runs of {like.target}")]
    else:
        lines = [
            ("tokens per step", _all({name: each.at(planned) for name, each in like.curves.items()}),
             like.source + like.beyond(planned)),
            ("an hour more", _all({name: each.gain(planned, longer) for name, each in like.curves.items()}, "+"),
             "the same curve and responses"),
            ("twice the data", _all({name: each.gain(planned, wider) for name, each in like.curves.items()}, "+"),
             "the same curve, as many steps"),
        ]  # fmt: skip
    if own:
        last = own[-1]
        measured = f"{last.tau:.2f} +- {last.error:.2f} after {duration(60 * last.amounts[0] / world)}"
        lines.append(("measured so far", measured, f"held-out prompts of this run{why}"))
    if own and not why:
        lines.append(("its next hour", _words(_next_hour(own, world), "+"), f"curve of {len(own)} points of this run"))
    return lines


def point_of_run(work: Path, world: int) -> dict[str, Any]:
    """Returns a finished run's point of its curve, for its record: GPU minutes, and what an hour more would add."""
    rows = [json.loads(line) for line in (work / METRICS).read_text(encoding="utf-8").splitlines()]
    found: dict[str, Any] = {"gpu_minutes": round(rows[-1].get("gpu_minutes", 0.0), 2)} if rows else {}
    points, why = _own(work)
    if points and not why:
        gain = _next_hour(points, world)
        found |= {"points": len(points), "an_hour_more": round(gain.tau, 4), "error": round(gain.error, 4)}
    return found


def _next_hour(points: list[Point], world: int) -> Value:
    last = points[-1].amounts[0]
    return fit(points).gain((last,), (last + 60 * world,))


def _own(work: Path | None) -> tuple[list[Point], str]:
    """Returns the measurements of a run against GPU minutes, and why they have no curve, in words."""
    points = []
    path = work / METRICS if work else None
    for line in path.read_text(encoding="utf-8").splitlines() if path and path.is_file() else ():
        try:
            row = json.loads(line)
            point = Point((float(row["gpu_minutes"]),), row["acceptance_length"], row["acceptance_length_error"])
        except (ValueError, LookupError, TypeError):
            continue  # a step, a torn line, or the run of an earlier version
        if point.amounts[0] > 0 and point.tau and point.error:
            points.append(point)
    try:
        fit(points)
    except UserError as error:
        return points, f"; no curve: {error}"
    return points, ""


def _all(values: dict[str, Value], sign: str = "") -> str:
    return "\n".join(f"{_words(value, sign)} ({name})" for name, value in values.items())


def _words(value: Value, sign: str = "") -> str:
    return f"{sign}{value.tau:.2f} +- {value.error:.2f}"
