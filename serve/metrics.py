"""Metrics for Prometheus: vLLM's by its names, types and buckets, and a few of our own.

`examples/deploy/grafana` shows them. A registry of their own keeps two servers in one process apart.
"""

import time
from collections.abc import Iterator, Sequence

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from dflash_toolkit.generation import Step
from dflash_toolkit.runtime.wire import Stats

CONTENT_TYPE = CONTENT_TYPE_LATEST
FIRST_S = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
    160,
    640,
    2560,
)
BETWEEN_S = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.4,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
)
WHOLE_S = (0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)


class _OfEngine:
    """What the engine last said of itself."""

    def __init__(self, model: str) -> None:
        self.stats = Stats()
        self._model = model

    def collect(self) -> Iterator[Metric]:
        stats, named = self.stats, ["model_name"]
        for name, text, value in (
            ("vllm:num_requests_running", "Requests in the batch", stats.running),
            ("vllm:num_requests_waiting", "Requests that wait for a place in it", stats.waiting),
            ("vllm:kv_cache_usage_perc", "Share of the cache's pages that requests hold, 0 to 1", stats.cache_used),
        ):
            gauge = GaugeMetricFamily(name, text, labels=named)
            gauge.add_metric([self._model], value)
            yield gauge
        for name, text, count in (
            (
                "vllm:prefix_cache_queries",
                "Prompt tokens that were looked up in the prefix cache",
                stats.prefix_queries,
            ),
            ("vllm:prefix_cache_hits", "Of them, those that were found", stats.prefix_hits),
            (
                "vllm:num_preemptions",
                "Requests that gave their pages to others, to be computed again",
                stats.preemptions,
            ),
        ):
            counter = CounterMetricFamily(name, text, labels=named)
            counter.add_metric([self._model], count)
            yield counter
        chosen = CounterMetricFamily(
            "dflash:steps_by_draft_length", "Steps of the batch by the tokens drafted a row", labels=[*named, "tokens"]
        )
        for length, steps in sorted(stats.draft_lengths.items()):
            chosen.add_metric([self._model, str(length)], steps)
        yield chosen


class Metrics:
    """What a server has done since it started, counted when it happens.

    `1 + spec_decode_num_accepted_tokens / spec_decode_num_drafts` is the mean acceptance length as vLLM's tools print
    it. `dflash_committed_tokens / dflash_verify_steps` is a little less, and that in an answer's usage: a step whose
    stop token was an accepted draft has no token of the target's own behind it.

    Args:
        model: the name clients ask for, a label of all.
    """

    def __init__(self, model: str = "") -> None:
        self._registry = CollectorRegistry()
        self._engine = _OfEngine(model)
        self._registry.register(self._engine)
        named = ["model_name"]

        def counter(name: str, text: str, *more: str) -> Counter:
            return Counter(name, text, [*named, *more], registry=self._registry)

        def histogram(name: str, text: str, buckets: Sequence[float]) -> Histogram:
            return Histogram(name, text, named, buckets=buckets, registry=self._registry).labels(model)

        self._model = model
        self.waiting = Gauge("dflash_requests_open", "Requests queued or running", registry=self._registry)
        self._success = counter("vllm:request_success", "Answers that ended by themselves", "finished_reason")
        self._prompt = counter("vllm:prompt_tokens", "Prompt tokens of requests that were decoded").labels(model)
        self._answered = counter("vllm:generation_tokens", "Tokens answered").labels(model)
        self._drafts = counter("vllm:spec_decode_num_drafts", "Drafts verified").labels(model)
        self._drafted = counter("vllm:spec_decode_num_draft_tokens", "Tokens drafted").labels(model)
        self._accepted = counter("vllm:spec_decode_num_accepted_tokens", "Drafted tokens accepted").labels(model)
        self._by_position = counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos", "Accepted drafted tokens by their position", "position"
        )
        self._first = histogram("vllm:time_to_first_token_seconds", "From the request to its first token", FIRST_S)
        self._between = histogram("vllm:inter_token_latency_seconds", "From what a step brought to the next", BETWEEN_S)
        self._whole = histogram("vllm:e2e_request_latency_seconds", "From the request to its last token", WHOLE_S)
        outcomes = "Requests by outcome: stop, length, refused, disconnected, error"
        self._requests = Counter("dflash_requests", outcomes, ["outcome"], registry=self._registry)
        self._responses = Counter("dflash:http_responses", "By status", ["status"], registry=self._registry)
        self._steps, self._committed = (
            Counter(f"dflash_{name}", text, registry=self._registry)
            for name, text in (
                ("verify_steps", "Steps of the target, with a draft or without"),
                ("committed_tokens", "Tokens that steps added; by verify_steps, the mean acceptance length"),
            )
        )

    def refused(self, status: int) -> None:
        """Count a request that never reached the model; wrong keys and paths are none."""
        if status in (400, 413, 429):
            self._requests.labels("refused").inc()

    def responded(self, status: int) -> None:
        """Count a response by its status."""
        self._responses.labels(str(status)).inc()

    def prompt(self, tokens: int) -> None:
        """Count a prompt, once whatever the number of its answers, when the first of them begins."""
        self._prompt.inc(tokens)

    def progress(self, clock: "Clock", step: Step | None, answered: int) -> None:
        """Count what a step brought: `answered` tokens that the client gets."""
        self._answered.inc(answered)
        now = time.perf_counter()
        (self._first if clock.last is None else self._between).observe(now - (clock.last or clock.began))
        clock.last = now
        if step is None:
            return
        self._steps.inc()
        self._committed.inc(len(step.tokens))
        if step.drafted:
            self._drafts.inc()
            self._drafted.inc(step.drafted)
            self._accepted.inc(step.accepted)
            for position in range(step.accepted):
                self._by_position.labels(self._model, str(position)).inc()

    def ended(self, clock: "Clock", outcome: str) -> None:
        """Count an answer that is over: stop, length, disconnected or error."""
        self._requests.labels(outcome).inc()
        if outcome in ("stop", "length"):
            self._success.labels(self._model, outcome).inc()
            self._whole.observe(time.perf_counter() - clock.began)

    def render(self, stats: Stats | None = None) -> bytes:
        """The text exposition format; `stats` is what the engine says now."""
        if stats is not None:
            self._engine.stats = stats
        return generate_latest(self._registry)


class Clock:
    """When an answer was asked for, and when it last got something."""

    def __init__(self) -> None:
        self.began = time.perf_counter()
        self.last: float | None = None
