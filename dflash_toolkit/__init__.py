"""dflash-toolkit: train a DFlash block drafter, prove that it is lossless, serve it.

Shape legend, used in every docstring and trailing comment:
B batch, T context tokens, A anchors (= blocks), S block size, L draft layers, K tapped target layers, D hidden,
N query heads, G key/value heads, H head dim, V vocabulary, R supervised rows of a loss.
"""

from typing import TYPE_CHECKING

from .lazy import lazy_names

if TYPE_CHECKING:
    from .checkpoint import load_drafter, save_drafter
    from .config import UserError
    from .decode import Generation, generate, stream
    from .drafter import Drafter, DrafterConfig
    from .sampling import SamplingParams
    from .target import Target
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            ".checkpoint": ["load_drafter", "save_drafter"],
            ".config": ["UserError"],
            ".decode": ["Generation", "generate", "stream"],
            ".drafter": ["Drafter", "DrafterConfig"],
            ".sampling": ["SamplingParams"],
            ".target": ["Target"],
        },
    )

__version__ = "0.1.0"
__all__ = [
    "Drafter",
    "DrafterConfig",
    "Generation",
    "SamplingParams",
    "Target",
    "UserError",
    "generate",
    "load_drafter",
    "save_drafter",
    "stream",
]
