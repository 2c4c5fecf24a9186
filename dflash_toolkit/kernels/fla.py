"""Loads `flash-linear-attention` if it is installed (PyPI, extra `linear-attention`)."""

import functools
import importlib
import importlib.util
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


@functools.cache
def delta_rule() -> Callable[..., Any] | None:
    """Returns its gated delta rule in chunks, or None; warns once if it is installed and cannot be loaded."""
    if importlib.util.find_spec("fla") is None:
        return None
    try:
        rule: Callable[..., Any] = importlib.import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
        return rule
    except (ImportError, OSError, AttributeError, RuntimeError) as error:
        warnings.warn(f"fla is installed but cannot be loaded ({error}); the delta rule does not use it", stacklevel=2)
        return None


def chunk_rule(
    q: Tensor, k: Tensor, v: Tensor, gates: Tensor, state: Tensor, slots: Tensor, starts: Tensor, counts: Tensor
) -> Tensor:
    """Computes `chunk_rule` of triton/delta_chunk.py with `flash-linear-attention`, for comparisons."""
    rule, at = delta_rule(), slots.long()
    assert rule is not None
    before = state[at]
    known, any_rows = ((each > 0)[:, None, None, None] for each in (starts, counts))
    begun = torch.where(known, before, 0.0)
    out, after = rule(q, k, v, g=gates[0], beta=gates[1], initial_state=begun, output_final_state=True)
    state.index_copy_(0, at, torch.where(any_rows, after, before))
    return out.flatten(0, 1).flatten(1)
