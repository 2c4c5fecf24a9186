"""The states of a gated delta net's requests. Rejected rows of a block leave no trace in them."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class DeltaMemory:
    """The state before a request's last block, and what the rows of that block do to it.

    A block changes no state. When the next one comes, as many of its rows as stayed are run once more (replay), in the
    arithmetic of their first run; so a state takes no copies, and rejected drafts leave no trace.
    """

    state: Tensor  # fp32 [slots + kept, N, H_k, H_v] of N heads
    window: Tensor  # [slots + kept, T - 1, C], the last inputs of the short convolution before the block
    inputs: Tensor  # [slots, S, C], those of the block's rows
    gates: Tensor  # fp32 [slots, S, 2, N], factors that the state decays by, and beta, of the block's rows

    @classmethod
    def empty(
        cls, slots: int, rows: int, taps: int, channels: int, heads: int, widths: tuple[int, int],
        dtype: torch.dtype, device: torch.device, kept: int = 0,
    ) -> "DeltaMemory":  # fmt: skip
        """States of so many requests before their first token, for blocks of up to `rows`; `widths` are H_k and H_v.

        After them there is room for the states of `kept` prefixes, which run no blocks.
        """

        def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        window, inputs = zeros(slots + kept, taps - 1, channels, dtype=dtype), zeros(slots, rows, channels, dtype=dtype)
        return cls(zeros(slots + kept, heads, *widths), window, inputs, zeros(slots, rows, 2, heads))

    @property
    def rows(self) -> int:
        """Rows of the longest block."""
        return self.inputs.shape[1]
