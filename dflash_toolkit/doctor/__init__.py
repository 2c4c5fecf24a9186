"""Why is a drafter accepted badly: `dflash-doctor` and the checks behind it."""

from .cli import examine
from .finding import Finding

__all__ = ["Finding", "examine"]
