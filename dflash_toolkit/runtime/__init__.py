"""The inference engine: continuous batching, paged caches, and one captured step that drafts, verifies and accepts."""

from typing import TYPE_CHECKING

from ..lazy import lazy_names

if TYPE_CHECKING:
    from .client import AsyncEngine, EngineClient
    from .connection import EngineClosedError, Progress, RequestFailedError, Responses
    from .engine import Engine, EngineStats
    from .load import load_engine
    from .options import EngineOptions, SyntheticAcceptance
    from .request import Request
else:
    __getattr__, __dir__ = lazy_names(__name__)

__all__ = [
    "AsyncEngine",
    "Engine",
    "EngineClient",
    "EngineClosedError",
    "EngineOptions",
    "EngineStats",
    "Progress",
    "Request",
    "RequestFailedError",
    "Responses",
    "SyntheticAcceptance",
    "load_engine",
]
