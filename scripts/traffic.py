"""Workloads by name, the jobs that they mean, and the figures of a job. Both engines use this module.

Imports no torch. A client is an engine that reports when tokens arrive; see `bench/workloads.py` and
`peers/vllm_workloads.py`.
"""

import math
import random
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from dflash_toolkit.config import UserError
from dflash_toolkit.evaluation.report.table import Table, number, times
from dflash_toolkit.files import read_json

MIXED_GOAL = 2.0  # most that inter-token p99 may grow while a long prompt arrives
Source = Callable[[int], list[int]]  # returns the given number of prompt tokens, new ones in each call


class Workload(NamedTuple):
    """Equal requests that are sent at the same time.

    `goals` has the usual numbers of requests and, for each, the least ratio to vLLM's speed (None: no goal).
    """

    prompt: int  # tokens
    output: int  # tokens
    goals: dict[int, float | None]
    shared: float = 0.0  # share of the prompt that is the turn before: its prompt and its answer
    arriving: int = 0  # tokens of one more prompt, which arrives while the others decode

    @property
    def context(self) -> int:
        """The longest request in tokens."""
        return max(self.prompt + self.output, self.arriving + 1)

    @property
    def times_prompts(self) -> bool:
        return self.output == 1


WORKLOADS = {
    "chat": Workload(1_000, 250, {1: 1.4, 8: 1.3, 32: 1.2, 64: 1.15, 128: 1.1, 256: 1.1}),
    "retrieval": Workload(8_000, 250, {1: 1.2, 8: 1.15, 32: 1.1}),
    "agent": Workload(32_000, 400, {1: 1.5, 8: 1.3, 16: 1.2}, shared=0.9),
    "summary": Workload(16_000, 300, {1: None, 8: None}),
    "writing": Workload(100, 500, {32: None, 128: None, 256: None}),
    "mixed": Workload(1_000, 250, {8: None, 32: None}, arriving=32_000),
    "first-token-512": Workload(512, 1, {1: 1.0}),
    "first-token-8192": Workload(8_192, 1, {1: 1.0}),
    "first-token-32000": Workload(32_000, 1, {1: 1.0}),
}


class Cell(NamedTuple):
    """A workload at a number of requests."""

    name: str
    workload: Workload
    requests: int

    @property
    def most(self) -> int:
        """Requests that run at the same time."""
        return self.requests + bool(self.workload.arriving)


def cells_of(names: Sequence[str], requests: Sequence[int]) -> list[Cell]:
    """Returns the cells of workloads; `first-token` means all prompt lengths, and always one request.

    Args:
        names: workloads, each alone or with its own numbers of requests, as in chat=1,8.
        requests: numbers of requests of the others; empty takes those of the goals.

    Raises:
        UserError: an unknown name, or a number of requests below 1.
    """
    cells = []
    for entry in names:
        name, given, own = entry.partition("=")
        found = [known for known in WORKLOADS if name in (known, known.removesuffix(f"-{WORKLOADS[known].prompt}"))]
        if not found:
            raise UserError(f"--workload {name!r} is not known; known: {', '.join(WORKLOADS)}, first-token")
        asked = [int(count) if count.isdecimal() else 0 for count in own.split(",")] if given else list(requests)
        if min(asked, default=1) < 1:
            raise UserError(f"the numbers of requests of {entry!r} are {asked}; each must be >= 1")
        for known in found:
            workload = WORKLOADS[known]
            counts = asked if asked and not workload.times_prompts else workload.goals
            cells += [Cell(known, workload, count) for count in counts]
    return list({(cell.name, cell.requests): cell for cell in cells}.values())


def random_tokens(vocabulary: int) -> Source:
    """Returns a source of random tokens."""
    dice = random.Random(0)
    return lambda count: [dice.randrange(8, vocabulary - 8) for _ in range(count)]


def text_tokens(chats: Sequence[list[int]]) -> Source:
    """Returns a source of the given conversations, shuffled and joined; each prompt ends where one of them ends."""
    dice = random.Random(0)

    def prompt(count: int) -> list[int]:
        tokens: list[int] = []
        while len(tokens) < count:
            tokens = dice.choice(chats) + tokens
        return tokens[len(tokens) - count :]

    return prompt


# ---- jobs -----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Answer:
    """A request: its tokens up to now and the times of their arrival in seconds, on one clock."""

    submitted: float = 0.0
    tokens: list[int] = field(default_factory=list)
    arrivals: list[tuple[float, int]] = field(default_factory=list)  # time, number of tokens
    cached: int = 0  # prompt tokens that the prefix cache had
    finished: bool = False
    handle: Any = None  # the client's own

    def add(self, at: float, tokens: Sequence[int]) -> None:
        if tokens:
            self.tokens += tokens
            self.arrivals.append((at, len(tokens)))

    @property
    def first(self) -> float:
        return self.arrivals[0][0]

    @property
    def last(self) -> float:
        return self.arrivals[-1][0]


class Client(Protocol):
    """An engine. Answers never end before `max_tokens`."""

    def submit(self, prompt: list[int], max_tokens: int) -> Answer:
        """Queues a request."""

    def step(self) -> object:
        """Waits for new tokens and adds them to their answers."""

    def cancel(self, answer: Answer) -> None:
        """Discards a request."""


def run_cell(client: Client, cell: Cell, source: Source) -> dict[str, Any]:
    """Runs the job of a cell once and returns its figures."""
    workload = cell.workload
    if workload.arriving:
        return _run_mixed(client, cell, source)
    kept = round(workload.shared * workload.prompt)
    prompts = [source(kept - workload.output if kept else workload.prompt) for _ in range(cell.requests)]
    answers = _decode(client, prompts, workload.output)
    if not kept:
        return figures(answers)
    new = workload.prompt - kept
    turns = [prompt + answer.tokens + source(new) for prompt, answer in zip(prompts, answers, strict=True)]
    return figures(_decode(client, turns, workload.output)) | {"turn_before": figures(answers)}


def _decode(client: Client, prompts: Sequence[list[int]], max_tokens: int) -> list[Answer]:
    answers = [client.submit(prompt, max_tokens) for prompt in prompts]
    while not all(answer.finished for answer in answers):
        client.step()
    return answers


def _run_mixed(client: Client, cell: Cell, source: Source) -> dict[str, Any]:
    """Runs requests that decode; after `output` tokens of each, a long prompt arrives.

    `whole_tokens_per_second` are theirs until it has its first token, `decode_tokens_per_second` those before.
    """
    workload = cell.workload
    limit = workload.context - workload.prompt
    running = [client.submit(source(workload.prompt), limit) for _ in range(cell.requests)]
    prompt = source(workload.arriving)
    while any(len(answer.tokens) < workload.output for answer in running):
        client.step()
    long = client.submit(prompt, 1)
    while not long.finished or any(answer.last <= long.first and not answer.finished for answer in running):
        client.step()
    for answer in running:
        client.cancel(answer)
    ready, began, ended = max(answer.first for answer in running), long.submitted, long.first
    gaps = [(a, b) for answer in running for (a, _), (b, _) in _pairs(answer)]
    quiet = _inter_token([b - a for a, b in gaps if a >= ready and b <= began])
    busy = _inter_token([b - a for a, b in gaps if b > began and a < ended])
    row = {
        "seconds": ended - began,
        "whole_tokens_per_second": _between(running, began, ended) / (ended - began),
        "decode_tokens_per_second": _between(running, ready, began) / (began - ready),
        "first_token_ms": 1e3 * (ended - began), "inter_token_ms": busy, "quiet_inter_token_ms": quiet,
    }  # fmt: skip
    both = busy["p99"] is not None and quiet["p99"]
    return row | {"p99_to_quiet": busy["p99"] / quiet["p99"] if both else None}


# ---- figures --------------------------------------------------------------------------------------------------------


def figures(answers: Sequence[Answer]) -> dict[str, Any]:
    """Returns the figures of answers that were submitted together.

    `decode_tokens_per_second` counts the tokens after the last first token (None: there are none). Tokens of a step
    arrive together: `inter_token_ms` are the times between two arrivals of one answer, and `tokens_per_step` is the
    acceptance length.
    """
    began, ended = min(answer.submitted for answer in answers), max(answer.last for answer in answers)
    ready, tokens = max(answer.first for answer in answers), sum(len(answer.tokens) for answer in answers)
    decoded, steps = _between(answers, ready, ended), sum(len(answer.arrivals) - 1 for answer in answers)
    return {
        "tokens": tokens,
        "tokens_per_step": (tokens - len(answers)) / steps if steps else None,
        "cached_tokens": sum(answer.cached for answer in answers),
        "seconds": ended - began,
        "whole_tokens_per_second": tokens / (ended - began),
        "decoded_tokens": decoded,
        "decode_tokens_per_second": decoded / (ended - ready) if decoded else None,
        "first_token_ms": 1e3 * statistics.median(answer.first - answer.submitted for answer in answers),
        "inter_token_ms": _inter_token([b - a for answer in answers for (a, _), (b, _) in _pairs(answer)]),
    }


def median_run(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns the run that took the median time, with the seconds of all runs."""
    ordered = sorted(runs, key=lambda run: run["seconds"])
    return ordered[(len(ordered) - 1) // 2] | {"every_seconds": [run["seconds"] for run in runs]}


def measure_cells(client: Client, cells: Sequence[Cell], source: Source, repeats: int, way: str) -> Any:
    """Yields the row of each cell, after one run that does not count: it compiles and captures what is missing."""
    for cell in cells:
        run_cell(client, cell, source)
        row = median_run([run_cell(client, cell, source) for _ in range(repeats)])
        workload = cell.workload
        lengths = {"prompt": workload.prompt, "output": workload.output, "arriving": workload.arriving}
        yield {"workload": cell.name, "requests": cell.requests, "way": way, **lengths, **row}


def show(row: dict[str, Any]) -> None:
    """Prints a row as one line to standard error."""
    shown = f"{number(row['whole_tokens_per_second'], 0)} tokens/s, first token {number(row['first_token_ms'], 1)} ms"
    p99 = number(row["inter_token_ms"]["p99"], 1)
    print(f"{row['workload']} x {row['requests']} {row['way']}: {shown}, p99 {p99} ms", file=sys.stderr, flush=True)


def _pairs(answer: Answer) -> Any:
    return zip(answer.arrivals, answer.arrivals[1:], strict=False)


def _between(answers: Sequence[Answer], began: float, ended: float) -> int:
    """Returns the number of tokens that arrived after `began` and not after `ended`."""
    return sum(count for answer in answers for at, count in answer.arrivals if began < at <= ended)


def _inter_token(gaps: Sequence[float]) -> dict[str, float | None]:
    ordered = sorted(gaps)
    return {
        f"p{percent}": 1e3 * ordered[math.ceil(percent / 100 * len(ordered)) - 1] if ordered else None
        for percent in (50, 99)
    }


# ---- comparison -----------------------------------------------------------------------------------------------------


def compare(ours: Path, *peers: Path) -> Table:
    """Returns the ratios of our result and vLLM's, which may be in several files, next to the goals.

    Plain decoding is compared with plain decoding, every other way with vLLM's best, and first tokens with a drafter
    with those with a drafter. The ratio is of whole-job tokens/s, or of the times to the first token; for `mixed` it
    is our inter-token p99 to that without the prompt.

    Raises:
        UserError: a file that is not such a result, or results that were measured differently.
    """
    results = []
    for path in (ours, *peers):
        result, engine = read_json(path), "ours" if path is ours else "vllm"
        if not isinstance(result, dict) or result.get("engine") != engine:
            raise UserError(f"{path} is no result of workloads with engine {engine!r}")
        results.append(result)
    for key in ("gpu", "model", "accept"):
        for path, result in zip(peers, results[1:], strict=True):
            one, other = results[0][key], result[key]
            if one != other:
                raise UserError(
                    f"{key} is {one!r} in {ours} and {other!r} in {path}; compare results of one machine and job"
                )
    theirs = [row for result in results[1:] for row in result["rows"]]
    rows = []
    for row in results[0]["rows"]:
        same = [other for other in theirs if _comparable(row, other)]
        best = min(same, key=_cost, default=None)
        rows.append(_compared(row, best))
    columns = (
        "workload", "requests", "way", "vLLM's", "tokens/s", "vLLM", "ratio", "goal", "first token ms", "vLLM",
        "p99 ms", "vLLM",
    )  # fmt: skip
    return Table("", columns, tuple(rows))


def _cost(row: dict[str, Any]) -> float:
    return (row["inter_token_ms"]["p99"] or math.inf) if row["arriving"] else row["seconds"]  # type: ignore[no-any-return]


def _comparable(row: dict[str, Any], other: dict[str, Any]) -> bool:
    if any(row[name] != other[name] for name in ("workload", "requests", "prompt", "output", "arriving")):
        return False
    plain, decodes = row["way"] == "plain", row["output"] > 1
    return (other["way"] == "plain") == plain or (decodes and not plain)


def _compared(row: dict[str, Any], best: dict[str, Any] | None) -> tuple[str, ...]:
    workload = WORKLOADS.get(row["workload"])
    ratio = best["seconds"] / row["seconds"] if best else None
    if best and not (workload and workload.times_prompts):
        ratio = row["whole_tokens_per_second"] / best["whole_tokens_per_second"]
    goal = workload.goals.get(row["requests"]) if workload and row["way"] != "plain" else None
    shown = "" if goal is None else times(goal)
    if row["arriving"]:
        ratio, shown = row["p99_to_quiet"], f"at most {times(MIXED_GOAL)}"

    def pair(take: Callable[[dict[str, Any]], float | None], digits: int) -> tuple[str, str]:
        return number(take(row), digits), number(take(best) if best else None, digits)

    whole = pair(lambda each: each["whole_tokens_per_second"], 0)
    first = pair(lambda each: each["first_token_ms"], 1)
    p99 = pair(lambda each: each["inter_token_ms"]["p99"], 1)
    head = (row["workload"], str(row["requests"]), row["way"], best["way"] if best else "-")
    return (*head, *whole, times(ratio), shown, *first, *p99)
