"""Rows that a run skips, counted by reason."""

from collections import Counter
from dataclasses import dataclass, field

from ..config import UserError


@dataclass(slots=True)
class Skipped:
    """Counts skipped rows by reason, and keeps the first row of each reason."""

    strict: bool = False  # raise UserError instead
    option: str | None = "prompts.strict"  # its name
    counts: Counter[str] = field(default_factory=Counter)
    first: dict[str, str] = field(default_factory=dict)

    def add(self, reason: str, where: str) -> None:
        """Counts a row; details of the reason, in parentheses, do not count as another reason."""
        if self.strict:
            raise UserError(f"{where}: {reason}" + (f"; {self.option}=false skips such rows" if self.option else ""))
        reason = reason.partition(" (")[0]
        self.counts[reason] += 1
        self.first.setdefault(reason, where)

    def __str__(self) -> str:
        return ", ".join(f"{n} {reason} (first: {self.first[reason]})" for reason, n in sorted(self.counts.items()))
