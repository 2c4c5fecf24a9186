"""dflash-toolkit: train a DFlash block drafter, prove that it is lossless, serve it.

Shape legend, used in every docstring and trailing comment:
B batch, T context tokens, A anchors (= blocks), S block size, L draft layers, K tapped target layers, D hidden,
N query heads, G key/value heads, H head dim, V vocabulary, R supervised rows of a loss.
"""

from .checkpoint import load_drafter, save_drafter
from .config import UserError
from .decode import Generation, SamplingParams, generate, stream
from .drafter import Drafter, DrafterConfig
from .target import Target

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
