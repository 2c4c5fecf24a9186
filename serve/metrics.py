"""Counters for Prometheus, in a registry of their own so that two servers in one process do not mix."""

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, generate_latest

from .answer import Answer

CONTENT_TYPE = CONTENT_TYPE_LATEST


class Metrics:
    """What a server has done since it started.

    `committed_tokens / verify_steps` is the mean acceptance length, as in an answer's usage. `accepted / verify_steps
    + 1` is more: a step whose stop token was an accepted one has no token of the target's own behind it.
    """

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.waiting = Gauge("dflash_requests_open", "Requests queued or running", registry=self._registry)
        outcomes = "Requests by outcome: stop, length, refused, disconnected, error"
        self._requests = Counter("dflash_requests", outcomes, ["outcome"], registry=self._registry)
        self._counters = {
            name: Counter(f"dflash_{name}", text, registry=self._registry)
            for name, text in (
                ("prompt_tokens", "Prompt tokens of requests that were decoded"),
                ("completion_tokens", "Tokens answered"),
                ("verify_steps", "Calls of the target that verified a draft"),
                ("drafted_tokens", "Tokens proposed by the drafter"),
                ("accepted_tokens", "Proposed tokens that the target took"),
                ("committed_tokens", "Tokens that verify steps added; by verify_steps, the mean acceptance length"),
            )
        }

    def refused(self) -> None:
        """Count a request that never reached the model."""
        self._requests.labels("refused").inc()

    def ended(self, answer: Answer, outcome: str) -> None:
        """Count a request that did, finished or not."""
        self._requests.labels(outcome).inc()
        for name, amount in (
            ("prompt_tokens", answer.prompt_tokens),
            ("completion_tokens", answer.completion_tokens),
            ("verify_steps", answer.verify_steps),
            ("drafted_tokens", answer.drafted),
            ("accepted_tokens", answer.accepted),
            ("committed_tokens", answer.committed),
        ):
            self._counters[name].inc(amount)

    def render(self) -> bytes:
        """The text exposition format."""
        return generate_latest(self._registry)
