"""The inference engine: continuous batching, paged caches, and one captured step that drafts, verifies and accepts."""

from .engine import Engine, EngineOptions, EngineStats, SyntheticAcceptance
from .loading import load_engine
from .stream import AsyncEngine, EngineClosedError, Progress

__all__ = [
    "AsyncEngine",
    "Engine",
    "EngineClosedError",
    "EngineOptions",
    "EngineStats",
    "Progress",
    "SyntheticAcceptance",
    "load_engine",
]
