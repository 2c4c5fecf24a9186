"""What attention reads: the paged cache of one layer."""

from dataclasses import dataclass

from torch import Tensor


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

    @property
    def plain(self) -> bool:
        """Whether a causal row sees every key up to its own, as FlashAttention computes it."""
        return self.window == 0
