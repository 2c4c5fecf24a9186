"""Whose products a stack of layers runs on, this toolkit's or cuBLAS's: measured on this GPU, once.

One answer holds for every number of rows, as a choice by rows would let a batch change an answer's bits. It is kept by
GPU, versions and shape and not by engine, so a target's layers take the same way with a drafter and without.
"""

import functools
import importlib
from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor

from .capture import Captures
from .timing import Times, cached_times, median_seconds, place_of
from .weights import LayerWeights, ModelSpec

ROWS = (16, 128)  # one block, and the most rows that kernels here take
GAIN = 1.02  # of cuBLAS's, for which it must be faster than noise
REPEATS = 5
OWN, CUBLAS = 0, 1

_known: dict[str, Times] = {}  # for a user without a cache on disk


def faster_products(spec: ModelSpec, layers: Sequence[LayerWeights], norm: Tensor, ops: ModuleType) -> ModuleType:
    """`ops` for these layers [norm: D], or on a GPU the same with cuBLAS's products where those are faster."""
    if norm.device.type != "cuda":
        return ops
    by_cublas = importlib.import_module("dflash_toolkit.kernels.cublas")
    shape = (spec.hidden_size, spec.num_heads * spec.head_dim, spec.qkv_rows, spec.intermediate_size, spec.o_bias)
    formats = str(norm.dtype), type(layers[0].o).__name__
    key = ["products", place_of(norm.device), torch.__version__, formats, len(layers), shape]
    if str(key) not in _known:
        _known[str(key)] = cached_times(key, lambda: measure_products(spec, layers, norm, [ops, by_cublas]))
    times = _known[str(key)]
    gain = sum(times[rows, OWN] / times[rows, CUBLAS] for rows in ROWS) / len(ROWS)
    return by_cublas if gain > GAIN else ops


@torch.inference_mode()
def measure_products(
    spec: ModelSpec, layers: Sequence[LayerWeights], norm: Tensor, ways: Sequence[ModuleType]
) -> Times:
    """Seconds of everything behind the attention of all `layers`, for {(rows, number of the way)}.

    All of them one after the other, captured as steps are, so that weights come from memory and the host plays no part.
    """
    captures, times, eps = Captures(norm.device), Times(), spec.rms_norm_eps

    def run(ops: ModuleType, x: Tensor, a: Tensor) -> None:
        for w, following in zip(layers, [*layers[1:], None], strict=True):
            then = (following.input_norm, following.qkv) if following else (norm, None)
            ops.finish_layer(x, a, w.o, w.o_bias, w.post_norm, w.gate_up, w.down, *then, eps)

    for rows in ROWS:
        x = torch.randn(rows, spec.hidden_size, dtype=norm.dtype, device=norm.device)
        a = torch.randn(rows, spec.num_heads * spec.head_dim, dtype=norm.dtype, device=norm.device)
        for number, ops in enumerate(ways):
            graph, _ = captures(functools.partial(run, ops, x, a))
            graph.replay()
            times[rows, number] = median_seconds(graph.replay, norm.device, REPEATS)
    return times
