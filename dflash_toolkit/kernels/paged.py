"""The paged cache of one layer, which attention reads: in the dtype of the model or in fp8."""

from dataclasses import dataclass

import torch
from torch import Tensor

from .formats import FP8_MAX

FP8 = torch.float8_e4m3fn
LEAST_SCALE = 2.0**-24  # the least power of two in fp16


@dataclass(frozen=True, slots=True)
class PagedKV:
    """The keys and values of one layer of B requests, in pages, and which of them a row may see.

    The lengths are those before the rows that attend; keys and values of the rows themselves are also in the pages.
    """

    cache: Tensor  # [2, slots, G, H]
    lengths: Tensor  # int32 [B]
    table: Tensor  # int32 [B, pages of a request]
    size: int  # positions of a page
    window: int = 0  # a key at a distance of `window` positions or more is not seen; 0 is no window
    # -C: the positions are cut into chunks of C, and a causal row sees only keys of its own chunk
    scales: Tensor | None = None  # [2, G, slots] of an fp8 cache, see `quantized_heads`
    factor: float | None = None  # of the scores; None: H ** -0.5
    soft_cap: float = 0.0  # a score s becomes soft_cap * tanh(s / soft_cap); 0 is no cap
    sinks: Tensor | None = None  # [N], one more score of each head; its value is zero

    @property
    def plain(self) -> bool:
        """Whether a causal row sees every key up to its own in the dtype of the model, as FlashAttention does."""
        return self.window == 0 and self.scales is None and self.soft_cap == 0 and self.sinks is None

    @property
    def score_factor(self) -> float:
        return self.cache.shape[3] ** -0.5 if self.factor is None else self.factor

    def in_window(self, distance: Tensor, position: Tensor) -> Tensor:
        """Returns whether keys at distances from rows at positions are in their window, or chunk."""
        return distance.abs() < self.window if self.window > 0 else distance <= position % -self.window

    def read(self, slots: Tensor) -> Tensor:
        """Returns the keys and the values [2, ..., G, H] of slots, in the dtype of the model."""
        found = self.cache[:, slots]
        return found if self.scales is None else dequantized_heads(found, self.scales.mT[:, slots])


def quantized_heads(heads: Tensor) -> tuple[Tensor, Tensor]:
    """Quantizes each of heads [..., H] to fp8 by its own scale [...], which has the dtype of the heads.

    The scale is the least power of two that maps the largest value into the range of fp8. So scaling is exact in every
    dtype. A head with a value that is not finite gets the scale NaN.
    """
    largest, exponent = torch.frexp(heads.float().abs().amax(-1).clamp(min=FP8_MAX * LEAST_SCALE))
    scales = torch.ldexp(torch.ones_like(largest), exponent - 9 + (largest > FP8_MAX / 512))
    scales = scales.where(heads.isfinite().all(-1), torch.nan)
    return (heads.float() / scales[..., None]).to(FP8), scales.to(heads.dtype)


def dequantized_heads(values: Tensor, scales: Tensor) -> Tensor:
    """Returns heads [..., H] of fp8 values and their scales [...], in the dtype of the scales."""
    return values.to(scales.dtype) * scales[..., None]


def store_heads(cache: Tensor, scales: Tensor | None, slots: Tensor, heads: Tensor) -> None:
    """Writes heads [M, G, H] to slots [M] of cache [slots, G, H], and if it is in fp8 their scales to [G, slots]."""
    if scales is None:
        cache[slots] = heads.to(cache.dtype)
    else:
        cache[slots], scales.mT[slots] = quantized_heads(heads.to(scales.dtype))
