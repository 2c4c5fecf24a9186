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
    from .decode import generate, stream
    from .generation import Generation
    from .models.dflash.checkpoint import load_drafter, save_drafter
    from .models.dflash.config import DrafterConfig
    from .models.dflash.network import Drafter
    from .models.target import Target
    from .sampling import SamplingParams
else:
    __getattr__, __dir__ = lazy_names(__name__)

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
