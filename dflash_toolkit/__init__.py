"""dflash-toolkit: train a DFlash block drafter, prove that it is lossless, serve it.

Shape legend, used in every docstring and trailing comment:
B batch, T context tokens, A anchors (= blocks), S block size, L draft layers, K tapped target layers, D hidden,
N query heads, G key/value heads, H head dim, V vocabulary, R supervised rows of a loss.
"""

from typing import TYPE_CHECKING

from .lazy import lazy_names
from .version import __version__ as __version__

if TYPE_CHECKING:
    from .config import UserError
    from .decode import Generation, generate, stream
    from .models.dflash.checkpoint import load_drafter, save_drafter
    from .models.dflash.network import Drafter, DrafterConfig
    from .models.target import Target
    from .sampling import SamplingParams
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            ".models.dflash.checkpoint": ["load_drafter", "save_drafter"],
            ".config": ["UserError"],
            ".decode": ["Generation", "generate", "stream"],
            ".models.dflash.network": ["Drafter", "DrafterConfig"],
            ".sampling": ["SamplingParams"],
            ".models.target": ["Target"],
        },
    )

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
