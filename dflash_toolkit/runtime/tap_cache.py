"""Keeps the taps of all tokens in the pages of the cache, for training on what was served.

The drafter's context K/V is computed from the taps of committed tokens; a cache next to it keeps the taps themselves.
They share the pages, so a prefix hit has its taps too, and a captured step writes them.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..kernels.reference import slots_of
from .graphs import to_device

PAGES = 16  # pages that are read together; a long answer would need much memory at once


class TapCache:
    """The taps of the tokens in all pages.

    Args:
        width: K*D, values of a token.
    """

    def __init__(self, num_pages: int, page_size: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self.page_size = page_size
        self._taps = torch.zeros(num_pages * page_size, width, dtype=dtype, device=device)

    @property
    def on_gpu(self) -> bool:
        return self._taps.is_cuda

    def nbytes(self, tokens: int) -> int:
        """Returns the bytes of the taps of some tokens."""
        return tokens * self._taps.shape[1] * self._taps.itemsize

    def write(self, features: Tensor, lengths: Tensor, counts: Tensor, page_table: Tensor) -> None:
        """Writes the first `counts[b]` rows of each request; the others go to the null block.

        Args:
            features: [B * S, K * D]; row b * S + k is position `lengths[b]` + k.
            lengths, counts: int32 [B].
            page_table: int32 [B, pages of a request].
        """
        steps = torch.arange(len(features) // len(lengths), device=lengths.device)
        slots = slots_of(lengths[:, None] + steps, page_table, self.page_size)
        slots = torch.where(steps < counts[:, None], slots, 0)
        self._taps.index_copy_(0, slots.flatten(), features)

    @torch.no_grad()
    def read(self, pages: Sequence[int], count: int) -> Tensor:
        """Starts to copy the taps of the first `count` tokens in `pages` to the host, after earlier work.

        Returns:
            [count, K * D], in pinned memory for a GPU; complete after the device's current work.
        """
        on_gpu = self._taps.is_cuda
        found = torch.empty(count, self._taps.shape[1], dtype=self._taps.dtype, pin_memory=on_gpu)
        for start, part in zip(range(0, len(pages), PAGES), found.split(PAGES * self.page_size), strict=False):
            part.copy_(self.of_pages(pages[start : start + PAGES])[: len(part)], non_blocking=on_gpu)
        return found

    def of_pages(self, pages: Sequence[int]) -> Tensor:
        """Returns the taps of all tokens in some pages, [pages * page_size, K * D] on the device."""
        held = to_device(pages, torch.int64, self._taps.device)
        return self._taps.unflatten(0, (-1, self.page_size))[held].flatten(0, 1)
