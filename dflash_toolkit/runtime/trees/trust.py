"""Corrects the promises of a request's drafts by its recent acceptance. Without torch."""

import math


class Trust:
    """Discounts the drafts of a request for which the drafter is overconfident.

    All requests share one calibration. If less than half of the promised tokens of a request are accepted, its paths
    are discounted in proportion. While a request has no nodes, its discount slowly decays.
    """

    WEIGHT = 1.0  # initial count of promised and accepted tokens
    DECAY, FORGIVEN = 0.95, 0.99  # weight of earlier steps, after a step with nodes of the request and one without
    HALF = 0.5

    def __init__(self) -> None:
        self._promised = self._accepted = 0.0

    @property
    def log_discount(self) -> float:
        """<= 0; added to the log-probabilities of the first slot, `values[b, 0]` of `draft_children`."""
        came_true = (self._accepted + self.WEIGHT) / (self._promised + self.WEIGHT)
        return math.log(min(1.0, came_true / self.HALF))

    def observe(self, promised: float, accepted: int) -> None:
        """Adds a drafted step.

        Args:
            promised: sum of the path probabilities of the request's verified nodes, without discount.
        """
        decay = self.DECAY if promised else self.FORGIVEN
        self._promised = decay * self._promised + promised
        self._accepted = decay * self._accepted + accepted
