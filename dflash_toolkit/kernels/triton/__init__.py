"""Kernels in Triton."""

from typing import Any

from triton.runtime import jit

_update_hash = jit.DependenciesFinder._update_hash


def _update_hash_with_constants(self: Any, function: Any) -> None:
    """Adds a called function to the cache key of its caller, with the constants that it reads.

    Triton 3.7 and earlier merge the constants before they compute the function's key, which finds them. So the key of a
    caller depended on which kernels were launched earlier, and kernels that were compiled ahead were compiled again.
    """
    _ = function.cache_key
    _update_hash(self, function)


jit.DependenciesFinder._update_hash = _update_hash_with_constants
