"""Diagnoses low acceptance of a drafter: `dflash-doctor` and its checks."""

from typing import TYPE_CHECKING

from ..lazy import lazy_names
from ..threads import wait_passively

wait_passively()  # before anything here imports torch

if TYPE_CHECKING:
    from .examination import examine
    from .finding import Finding
else:
    __getattr__, __dir__ = lazy_names(__name__)

__all__ = ["Finding", "examine"]
