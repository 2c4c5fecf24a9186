"""Measures a drafter: how much the target accepts, how much faster that is, and whether it is lossless.

`measure/` decodes and counts, `stats/` says how sure figures are, `report/` holds results and shows them. `cli.py` is
`dflash-eval`, `check.py` its limits, `compare.py` its comparisons, `protocols.py` the published measurements.
"""

from typing import TYPE_CHECKING

from ..lazy import lazy_names
from ..threads import wait_passively

wait_passively()  # before anything here imports torch

if TYPE_CHECKING:
    from ..acceptance import Acceptance
    from .measure.measurement import EncodedPrompt, held_out_acceptance
    from .measure.pairs import EnginePair, ReferencePair
    from .measure.run import evaluate
    from .report.files import write_report
    from .report.results import Report
else:
    __getattr__, __dir__ = lazy_names(__name__)

__all__ = [
    "Acceptance",
    "EncodedPrompt",
    "EnginePair",
    "ReferencePair",
    "Report",
    "evaluate",
    "held_out_acceptance",
    "write_report",
]
