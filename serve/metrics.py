"""Metrics for Prometheus: vLLM's names, types and buckets, and a few of our own.

`examples/deploy/grafana` shows them. Each server has its own registry, so one process can run two servers.
"""

import asyncio
import contextlib
import itertools
import time
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from dflash_toolkit.acceptance import prompt_length_group
from dflash_toolkit.generation import Step
from dflash_toolkit.runtime.wire import Stats

CONTENT_TYPE = CONTENT_TYPE_LATEST
FIRST_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75,
    1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560,
)  # fmt: skip
BETWEEN_S = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3,
    0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80,
)  # fmt: skip
WHOLE_S = (0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)


MOST_KEYS = 64  # API keys with counts of their own
GROUPS = {"prompt_length": "prompt_tokens", "api_key": "api_key"}  # and the label of a group


def _family(kind: Any, name: str, text: str, labels: Sequence[str], rows: Iterable[tuple[Any, float]]) -> Metric:
    """Returns a metric with a value for each row: the values of its labels, and its own."""
    family: Any = kind(name, text, labels=labels)
    for values, amount in rows:
        family.add_metric(list(map(str, values)), amount)
    return family


class _EngineCollector:
    """Collects the engine's last statistics."""

    def __init__(self, model: str) -> None:
        self.stats = Stats()
        self._model = model

    def collect(self) -> Iterator[Metric]:
        stats, model = self.stats, self._model
        hits, queries = stats.prefix_hits, stats.prefix_queries
        rows = sum(rows * steps for rows, steps in stats.step_rows.items())
        gauges = (
            ("vllm:num_requests_running", "Requests in the batch", stats.running),
            ("vllm:num_requests_waiting", "Requests that wait for a place in it", stats.waiting),
            ("vllm:kv_cache_usage_perc", "Share of the cache's pages that requests hold, 0 to 1", stats.cache_used),
            ("dflash:prefix_cache_hit_rate",
             "Share of the prompt tokens since the start that the prefix cache had, 0 to 1", hits / (queries or 1)),
        )  # fmt: skip
        counters = (
            ("vllm:prefix_cache_queries", "Prompt tokens that were looked up in the prefix cache", queries),
            ("vllm:prefix_cache_hits", "Of them, those that were found", hits),
            ("vllm:num_preemptions", "Requests that gave their pages to others, to be computed again",
             stats.preemptions),
            ("dflash:rows_verified", "Rows that the target read in steps, padding included", rows),
        )  # fmt: skip
        for kind, metrics in ((GaugeMetricFamily, gauges), (CounterMetricFamily, counters)):
            for name, text, value in metrics:
                yield _family(kind, name, text, ["model_name"], [([model], value)])
        yield from _of_drafter(stats)
        for name, text, label, counts in (
            ("steps_by_draft_length", "Steps of the batch by the tokens drafted a row", "tokens", stats.draft_lengths),
            ("steps_by_rows", "Steps of the batch by the rows that the target read", "rows", stats.step_rows),
            ("tree_steps_by_rows", "Of them, those over draft trees: their budgets", "rows", stats.tree_rows),
            ("tree_nodes_per_pos", "Nodes of draft trees that the target verified, by their position", "position",
             dict(enumerate(stats.tree_nodes))),
            ("tree_nodes_accepted_per_pos", "Of them, those that it accepted", "position",
             dict(enumerate(stats.tree_nodes_accepted))),
        ):  # fmt: skip
            each = (([model, value], count) for value, count in sorted(counts.items()))
            yield _family(CounterMetricFamily, f"dflash:{name}", text, ["model_name", label], each)


class _Histogram:
    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds, self.counts, self.sum = bounds, [0] * (len(bounds) + 1), 0.0

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(self.bounds, seconds)] += 1
        self.sum += seconds


class _Counts:
    """Counts prompt tokens and drafts."""

    __slots__ = ("accepted", "cached", "drafted", "drafts", "prompt")

    def __init__(self) -> None:
        self.prompt = self.cached = self.drafts = self.drafted = self.accepted = 0

    def add(self, step: Step) -> None:
        self.drafts += 1
        self.drafted += step.drafted
        self.accepted += step.accepted

    def items(self) -> Iterator[tuple[str, str, int]]:
        """Yields name, description and value of the counters."""
        yield "prompt_tokens", "Prompt tokens of requests that were decoded", self.prompt
        yield "prompt_tokens_cached", "Of them, those from the prefix cache, which were not computed", self.cached
        yield "spec_decode_num_drafts", "Drafts verified", self.drafts
        yield "spec_decode_num_draft_tokens", "Tokens drafted", self.drafted
        yield "spec_decode_num_accepted_tokens", "Drafted tokens accepted", self.accepted


def _of_drafter(stats: Stats) -> Iterator[Metric]:
    """Yields the drafter's version and, if it is trained, the state of its trainer."""
    target, drafter = stats.versions
    values: dict[str, tuple[str, float]] = {
        "target_version": ("How often the weights of the target were replaced", target),
        "drafter_version": ("How often the weights of the drafter were replaced", drafter),
    }
    counts: dict[str, tuple[str, float]] = {}
    if (state := stats.adaptation) is not None:
        values["adapt_running"] = "1 while the drafter is trained, 0 if its trainer has ended", state.error is None
        values["adapt_requests"] = "Requests that the trainer keeps in memory", state.requests
        values["adapt_bytes"] = "Bytes of them", state.bytes
        values["adapt_busy_share"] = "Share of the last minute in which the trainer worked", state.busy_share
        counts["adapt_steps"] = "Training steps of the drafter", state.steps
        counts["adapt_promotions"] = "Versions that were better on held-out requests", state.promotions
        counts["adapt_rollbacks"] = "Versions that were withdrawn", state.rollbacks
        if (length := state.held_out_acceptance_length) is not None:
            name, text = "dflash:adapt_held_out_acceptance_length", "Tokens per step on held-out requests"
            yield _family(GaugeMetricFamily, name, text, ["version"], [([drafter], length)])
    for name, text, place in (
        ("version_steps", "Verifications by the drafter's version", 0),
        ("version_tokens", "Tokens of them; divided by the steps they are the acceptance length", 1),
    ):
        rows = [([version], both[place]) for version, both in sorted(stats.by_version.items())]
        yield _family(CounterMetricFamily, f"dflash:{name}", text, ["version"], rows)
    for name, (text, value) in values.items():
        yield GaugeMetricFamily(f"dflash:{name}", text, value=value)
    for name, (text, value) in counts.items():
        yield CounterMetricFamily(f"dflash:{name}", text, value=value)


class _StepCollector:
    """Counts every step of every answer.

    Counts plain numbers and converts them when they are read: the library's own metrics take a lock for every count.
    """

    def __init__(self, model: str) -> None:
        self._model = model
        self.answered = self.steps = self.committed = 0
        self.all = _Counts()
        self.groups: dict[str, dict[str, _Counts]] = {kind: {} for kind in GROUPS}
        self.by_position: list[int] = []
        self.first, self.between = _Histogram(FIRST_S), _Histogram(BETWEEN_S)

    def counts_of(self, prompt_tokens: int, key: str) -> list[_Counts]:
        """Returns the counts of all groups to which an answer belongs.

        Args:
            key: number of the API key; empty: the server has none.
        """
        chosen = {"prompt_length": prompt_length_group(prompt_tokens)}
        if key:
            chosen["api_key"] = key if int(key) < MOST_KEYS else "other"
        return [self.all, *(self.groups[kind].setdefault(group, _Counts()) for kind, group in chosen.items())]

    def step(self, step: Step, groups: Iterable[_Counts]) -> None:
        self.steps += 1
        self.committed += len(step.tokens)
        if step.drafted:
            for counts in groups:
                counts.add(step)
            by_position = self.by_position
            if len(by_position) < step.accepted:
                by_position += [0] * (step.accepted - len(by_position))
            for position in range(step.accepted):
                by_position[position] += 1

    def collect(self) -> Iterator[Metric]:
        model, named = [self._model], ["model_name"]
        for name, text, count in (("generation_tokens", "Tokens answered", self.answered), *self.all.items()):
            yield _family(CounterMetricFamily, f"vllm:{name}", text, named, [(model, count)])
        for kind, label in GROUPS.items():
            families: dict[str, CounterMetricFamily] = {}
            for group, counts in sorted(self.groups[kind].items()):
                for name, text, count in counts.items():
                    own = f"dflash:{name}_by_{kind}"
                    families.setdefault(own, CounterMetricFamily(own, text, labels=[*named, label]))
                    families[own].add_metric([*model, group], count)
            yield from families.values()
        name, text = "vllm:spec_decode_num_accepted_tokens_per_pos", "Accepted drafted tokens by their position"
        rows = (([*model, position], count) for position, count in enumerate(self.by_position))
        yield _family(CounterMetricFamily, name, text, [*named, "position"], rows)
        steps, tokens = "Steps of the target, with a draft or without", "Tokens that steps added"
        tokens += "; by verify_steps, the mean acceptance length"
        for name, text, count in (
            ("dflash_verify_steps", steps, self.steps),
            ("dflash_committed_tokens", tokens, self.committed),
        ):
            yield CounterMetricFamily(name, text, value=count)
        for name, text, times in (
            ("vllm:time_to_first_token_seconds", "From the request to its first token", self.first),
            ("vllm:inter_token_latency_seconds", "From what a step brought to the next", self.between),
        ):
            histogram = HistogramMetricFamily(name, text, labels=named)
            bounds = [*(str(float(bound)) for bound in times.bounds), "+Inf"]
            buckets = list(zip(bounds, itertools.accumulate(times.counts), strict=True))
            histogram.add_metric(model, buckets, times.sum)
            yield histogram


class Metrics:
    """Counts what a server has done since it started.

    `1 + spec_decode_num_accepted_tokens / spec_decode_num_drafts` is the mean acceptance length as vLLM's tools print
    it. `dflash_committed_tokens / dflash_verify_steps`, which an answer's usage also has, is a little less: a step
    whose stop token was an accepted draft adds no token of the target's own.

    Args:
        model: the served name, a label of all metrics.
    """

    def __init__(self, model: str = "") -> None:
        self._registry = CollectorRegistry()
        self._engine = _EngineCollector(model)
        self._steps = _StepCollector(model)
        self._registry.register(self._steps)
        named = ["model_name"]

        def counter(name: str, text: str, *more: str) -> Counter:
            return Counter(name, text, [*named, *more], registry=self._registry)

        def histogram(name: str, text: str, buckets: Sequence[float]) -> Histogram:
            return Histogram(name, text, named, buckets=buckets, registry=self._registry).labels(model)

        self._model = model
        self.waiting = Gauge("dflash_requests_open", "Requests queued or running", registry=self._registry)
        self._success = counter("vllm:request_success", "Answers that ended by themselves", "finished_reason")
        self._whole = histogram("vllm:e2e_request_latency_seconds", "From the request to its last token", WHOLE_S)
        outcomes = "Requests by outcome: stop, length, refused, disconnected, error"
        self._requests = Counter("dflash_requests", outcomes, ["outcome"], registry=self._registry)
        self._responses = Counter("dflash:http_responses", "By status", ["status"], registry=self._registry)

    def refused(self, status: int) -> None:
        """Counts a request that never reached the model; wrong keys and paths do not count."""
        if status in (400, 413, 429):
            self._requests.labels("refused").inc()

    def responded(self, status: int) -> None:
        """Counts a response by its status."""
        self._responses.labels(str(status)).inc()

    def clock(self, prompt_tokens: int, key: str) -> "Clock":
        """Returns the clock of an answer that begins; `key` is the number of its API key, or empty."""
        return Clock(self._steps.counts_of(prompt_tokens, key))

    def prompt(self, clock: "Clock", tokens: int, cached: int) -> None:
        """Counts a prompt when its first answer begins, once for all of its answers.

        Args:
            cached: tokens from the prefix cache.
        """
        for counts in clock.counts:
            counts.prompt += tokens
            counts.cached += cached

    def progress(self, clock: "Clock", step: Step | None, answered: int) -> None:
        """Counts a step and the `answered` tokens that the client gets."""
        counts, now = self._steps, time.perf_counter()
        counts.answered += answered
        (counts.first if clock.last is None else counts.between).observe(now - (clock.last or clock.began))
        clock.last = now
        if step is not None:
            counts.step(step, clock.counts)

    def ended(self, clock: "Clock", outcome: str) -> None:
        """Counts an answer that has ended: stop, length, disconnected or error."""
        self._requests.labels(outcome).inc()
        if outcome in ("stop", "length"):
            self._success.labels(self._model, outcome).inc()
            self._whole.observe(time.perf_counter() - clock.began)

    def own(self) -> bytes:
        """Encodes the counts of this process for `render` in another."""
        return msgspec.msgpack.encode(_plain(self._registry.collect()))

    def render(self, stats: Stats | None = None, others: Sequence[bytes] = ()) -> bytes:
        """Returns the metrics in Prometheus's text format.

        Args:
            stats: the engine's current statistics.
            others: `own` of the other front-end processes.
        """
        if stats is not None:
            self._engine.stats = stats
        shown = CollectorRegistry()
        shown.register(self._engine)
        families = (msgspec.msgpack.decode(other, type=list[_Family]) for other in others)
        shown.register(_SumCollector([_plain(self._registry.collect()), *families]))
        return generate_latest(shown)


class _Family(msgspec.Struct, array_like=True):
    """A metric as front-end processes exchange it."""

    name: str
    text: str
    kind: str
    samples: list[tuple[str, dict[str, str], float]]


def _plain(metrics: Iterable[Metric]) -> list[_Family]:
    return [
        _Family(m.name, m.documentation, m.type, [(one.name, one.labels, one.value) for one in m.samples])
        for m in metrics
    ]


class _SumCollector:
    """Sums the metrics of several front-end processes."""

    def __init__(self, fronts: Sequence[list[_Family]]) -> None:
        self._fronts = fronts

    def collect(self) -> Iterator[Metric]:
        found: dict[str, Metric] = {}
        values: dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], float]] = {}
        for family in itertools.chain.from_iterable(self._fronts):
            found.setdefault(family.name, Metric(family.name, family.text, family.kind))
            sums = values.setdefault(family.name, {})
            for name, labels, value in family.samples:
                place = name, tuple(labels.items())
                if name.endswith("_created"):  # a time
                    sums[place] = min(sums.get(place, value), value)
                else:
                    sums[place] = sums.get(place, 0.0) + value
        for name, metric in found.items():
            for (sample, labels_of), value in values[name].items():
                metric.add_sample(sample, dict(labels_of), value)
            yield metric


async def serve_counts(metrics: Metrics, path: Path) -> asyncio.Server:
    """Serves the counts of this process on a Unix socket while the result is referenced."""

    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(metrics.own())
        writer.close()

    return await asyncio.start_unix_server(answer, path)


async def fetch_counts(path: Path) -> bytes | None:
    """Returns the counts of the process that listens on a Unix socket; None if it has ended."""
    with contextlib.suppress(OSError):
        reader, writer = await asyncio.open_unix_connection(path)
        with contextlib.closing(writer):
            return await reader.read()
    return None


class Clock:
    """Holds the time of a request and of the last tokens of its answer, and where it is counted."""

    def __init__(self, counts: Sequence[_Counts]) -> None:
        self.began = time.perf_counter()
        self.last: float | None = None
        self.counts = counts
