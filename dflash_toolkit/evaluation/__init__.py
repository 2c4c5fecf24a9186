"""Measure a drafter: how much the target accepts, how much faster that is, and whether it is lossless.

`decoders.py` decodes, `measure.py` counts, `run.py` goes through prompt sets, `journal.py` lets a killed run
continue, `report.py` holds the results, `schema.py` says in what form, `bootstrap.py` how sure they are. `sweeps.py`,
`recall.py`, `distribution.py` and `energy.py` measure what is asked for besides. `tables.py`, `plots.py`,
`markdown.py` and `page.py` show them, `files.py` writes them, `publish.py` tells others; `cli.py` is `dflash-eval`,
`check.py` its limits, `compare.py` (statistics in `paired.py`, what is shown in `comparison.py`) its comparisons.
"""

from typing import TYPE_CHECKING

from ..lazy import lazy_names
from ..threads import wait_passively

wait_passively()  # before anything here imports torch

if TYPE_CHECKING:
    from ..acceptance import Acceptance
    from .decoders import EnginePair, ReferencePair
    from .files import write_report
    from .measure import EncodedPrompt, held_out_acceptance
    from .report import Report
    from .run import evaluate
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
