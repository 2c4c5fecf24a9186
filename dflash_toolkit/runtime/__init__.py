"""The inference engine: continuous batching, paged caches, and one captured step that drafts, verifies and accepts."""

from .engine import Engine, EngineOptions, EngineStats, SyntheticAcceptance

__all__ = ["Engine", "EngineOptions", "EngineStats", "SyntheticAcceptance"]
