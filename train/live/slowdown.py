"""Measures what a trainer costs the engine, from the times of steps while it works and while it pauses."""

from collections import defaultdict

DECAY = 0.999  # decay of the sums with each step: they cover about the last 1,000 steps
LEAST_STEPS = 50  # least steps of each kind from which a number of requests counts
LEAST = 0.2  # cost that is assumed at least, as the two kinds of steps differ by chance too


class Slowdown:
    """Steps of the engine, by the number of requests and whether the trainer worked."""

    def __init__(self) -> None:
        self._sums: defaultdict[tuple[int, bool], list[float]] = defaultdict(lambda: [0.0, 0.0])  # steps, seconds

    def add(self, requests: int, working: bool, seconds: float) -> None:
        """Counts a step."""
        sums = self._sums[requests, working]
        sums[:] = DECAY * sums[0] + 1.0, DECAY * sums[1] + seconds

    @property
    def cost(self) -> float:
        """Share of its steps that the engine loses while the trainer works, in [LEAST, 1]; 1 until it is known."""
        lost = total = 0.0
        for (requests, working), (steps, seconds) in self._sums.items():
            others, pause = self._sums.get((requests, False), (0.0, 0.0))
            if working and min(steps, others) >= LEAST_STEPS:
                lost += seconds - steps * pause / others
                total += seconds
        return min(max(lost / total, LEAST), 1.0) if total else 1.0
