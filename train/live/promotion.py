"""Decides which version of a drafter is served: promotion by held-out records, rollback by live acceptance.

Every look at the data is a chance to be wrong. The k-th look since the last decision may be wrong with the probability
`LEVEL` * 6 / (pi k)^2, which sum to `LEVEL`: about that of one look at two standard errors.
"""

import math
from collections import deque
from dataclasses import dataclass, field

from dflash_toolkit.evaluation.stats.bootstrap import student_quantile

from ..run.held_out import Evaluation

LEVEL = 0.023  # probability of a wrong decision, one-sided: two standard errors
WINDOW = 512  # newest requests of each kind that are compared
LEAST = 16  # requests of a kind from which it is compared


def sure_after(looks: int) -> float:
    """Returns the quantile that a difference must exceed at look number `looks`, counted from 1."""
    return 1.0 - LEVEL * 6.0 / (math.pi * looks) ** 2


@dataclass(slots=True)
class Promotion:
    """Promotes a candidate that is better on the held-out records than the served drafter."""

    looks: int = 0  # since the last promotion

    def judge(self, candidate: Evaluation, served: Evaluation) -> bool:
        """Returns whether to serve the candidate. Both evaluations are of the same records, so they are paired."""
        self.looks += 1
        better = candidate.clearly_better_than(served, sure_after(self.looks))
        if better:
            self.looks = 0
        return better


@dataclass(slots=True)
class LiveAcceptance:
    """The acceptance of one version, by kind of request.

    Requests of one kind are similar: the same API key, or prompts of similar length. Only equal kinds are compared, as
    the mixture of traffic may change at the same time as the drafter.
    """

    kinds: dict[str, deque[tuple[int, int]]] = field(default_factory=dict)  # (tokens, steps) of the newest requests
    requests: int = 0  # so far

    def add(self, kind: str, tokens: int, steps: int) -> None:
        """Counts a finished request: the tokens that its steps committed."""
        if steps:
            self.requests += 1
            self.kinds.setdefault(kind, deque(maxlen=WINDOW)).append((tokens, steps))

    @property
    def tau(self) -> float:
        """Tokens per step of all requests; NaN without any."""
        pairs = [pair for some in self.kinds.values() for pair in some]
        steps = sum(count for _, count in pairs)
        return sum(tokens for tokens, _ in pairs) / steps if steps else math.nan

    def evaluation(self, kind: str) -> Evaluation:
        tokens, steps = zip(*self.kinds[kind], strict=True)
        return Evaluation(0, (kind,) * len(tokens), tokens, steps)


@dataclass(slots=True)
class Rollback:
    """Notices that a version accepts less than the one before it. It looks after LEAST requests, twice as many, ..."""

    looks: int = 0

    def judge(self, new: LiveAcceptance, old: LiveAcceptance) -> bool:
        """Returns whether to serve the old version again. Without kinds that both have seen often, the result is False.

        The difference is the mean over these kinds, weighted by the requests of the new version.
        """
        both = [k for k, some in new.kinds.items() if len(some) >= LEAST and len(old.kinds.get(k, ())) >= LEAST]
        if not both or new.requests < LEAST << self.looks:
            return False
        self.looks += 1
        weights = [len(new.kinds[kind]) for kind in both]
        pairs = [(new.evaluation(kind), old.evaluation(kind)) for kind in both]
        total = sum(weights)
        change = sum(w * (mine.tau - theirs.tau) for w, (mine, theirs) in zip(weights, pairs, strict=True)) / total
        errors = (math.hypot(mine.standard_error, theirs.standard_error) for mine, theirs in pairs)
        error = math.hypot(*(w * each for w, each in zip(weights, errors, strict=True))) / total
        return change < -student_quantile(sure_after(self.looks), LEAST - 1) * error
