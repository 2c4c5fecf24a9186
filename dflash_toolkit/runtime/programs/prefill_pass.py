"""A pass of chunks of prompts through the layers, in slices, so that decoding steps can run between them."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ...models.dflash.config import DrafterConfig
from ...models.spec import AttentionSpec, LayerSpec, MlpSpec, ModelSpec
from ..pace import Pace
from ..prefill_job import PrefillJob
from ..stack import Slices


class PrefillPass:
    """Chunks on their way through the layers; a `device.PrefillPass`.

    Args:
        slices: launches the work.
        operations: floating-point operations of each slice; one more than `slices` yields.
        places: where packed chunks are written: pages [chunks, pages of a request], cache slots [M]. Zeros are the null
            block.

    Attributes:
        scores: those of a single chunk, see `PrefillJob`, on their way to the host.
        done: whether all of it is launched.
    """

    def __init__(
        self,
        slices: Slices[Tensor | None],
        operations: Sequence[float],
        pace: Pace,
        jobs: Sequence[PrefillJob],
        places: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        self._slices, self._operations, self._pace, self._at = slices, operations, pace, 0
        self._counts = [len(job.ids) for job in jobs]
        self._places = places
        self.scores: Tensor | None = None
        self.done = False

    @torch.inference_mode()
    def run(self, seconds: float = math.inf, least: int = 1) -> float:
        """Launches slices for up to `seconds`, but at least `least`. Returns the estimated seconds that they take."""
        end, used = self._at, 0.0
        while end < len(self._operations):
            more = self._pace.seconds(self._operations[end])
            if end - self._at >= least and used + more > seconds:
                break
            used += more
            end += 1
        if end == self._at:
            return 0.0
        with self._pace.slice(sum(self._operations[self._at : end]), sum(self._counts)):
            for _ in range(self._at, end):
                try:
                    next(self._slices)
                except StopIteration as last:
                    self.scores, self.done = last.value, True
        self._at = end
        return used

    @torch.inference_mode()
    def drop(self, index: int) -> None:
        """Writes the rest of a packed chunk to the null block, as its request has lost its pages."""
        assert self._places is not None
        pages, slots = self._places
        pages[index].zero_()
        slots.split(self._counts)[index].zero_()


def operations_of(spec: ModelSpec, config: DrafterConfig | None, jobs: Sequence[PrefillJob]) -> list[float]:
    """Returns the floating-point operations of each slice of `Stack.slices`, and of the drafter's context."""
    rows, d = sum(len(job.ids) for job in jobs), spec.hidden_size
    found = list[float]()
    for layer in spec.layers:
        found += [_attention(layer, jobs), 2.0 * rows * _parameters(layer, d)]
    found[-1] *= len(jobs) / rows  # in the last layer, only the last row of each chunk is computed
    drafter = 0
    if config is not None:
        kv = config.spec()
        drafter = config.feature_size * d + d * kv.kv_values_per_token
    return [*found, 2.0 * rows * drafter]


def _attention(layer: LayerSpec, jobs: Sequence[PrefillJob]) -> float:
    mixer = layer.mixer
    if not isinstance(mixer, AttentionSpec):
        return 0.0
    pairs = 0.0
    for job in jobs:
        keys = job.start + len(job.ids) / 2
        pairs += len(job.ids) * (min(keys, abs(mixer.window)) if mixer.window else keys)
    return 4.0 * mixer.width * pairs


def _parameters(layer: LayerSpec, d: int) -> int:
    """Returns the parameters that a row is multiplied with."""
    widths = layer.ffn.intermediate_size if isinstance(layer.ffn, MlpSpec) else 0
    if experts := layer.routed:
        widths += (experts.top_k + experts.shared) * experts.intermediate_size
    return sum(n * k for n, k in layer.mixer.matrices(d).values()) + (3 * widths + 3 * layer.input_size) * d
