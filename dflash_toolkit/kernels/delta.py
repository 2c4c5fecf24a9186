"""The states of a gated delta net's requests. Rejected rows of a block leave no trace in them."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class DeltaMemory:
    """The state before a request's last block, and the inputs of that block's rows.

    A block does not change the state. The next block replays the committed rows of the last one, with the arithmetic of
    their first run. So states are never copied, and rejected drafts leave no trace.
    """

    state: Tensor  # fp32 [slots, N, H_k, H_v] of N heads
    window: Tensor  # [slots, T - 1, C], the last inputs of the short convolution before the block
    inputs: Tensor  # [slots, S, C], inputs of the block's rows
    gates: Tensor  # fp32 [slots, S, 2, N], decay factors of the state, and beta, of the block's rows

    @classmethod
    def empty(
        cls, slots: int, rows: int, taps: int, channels: int, heads: int, widths: tuple[int, int],
        dtype: torch.dtype, device: torch.device,
    ) -> "DeltaMemory":  # fmt: skip
        """Returns empty states for `slots` requests and prefixes, and blocks of up to `rows`; `widths`: H_k and H_v."""

        def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        window, inputs = zeros(slots, taps - 1, channels, dtype=dtype), zeros(slots, rows, channels, dtype=dtype)
        return cls(zeros(slots, heads, *widths), window, inputs, zeros(slots, rows, 2, heads))

    @property
    def rows(self) -> int:
        """The number of rows of the longest block."""
        return self.inputs.shape[1]

    def of_layers(self, layers: int) -> "list[DeltaMemory]":
        """Returns the memories of layers, if this one has the slots of all, layer by layer."""
        parts = (self.state, self.window, self.inputs, self.gates)
        return [DeltaMemory(*each) for each in zip(*(part.chunk(layers) for part in parts), strict=True)]


@dataclass(frozen=True, slots=True)
class TreeInputs:
    """Inputs of a layer, or of all layers, for M rows of trees, kept until some of them are accepted."""

    inputs: Tensor  # [M, C], or [layers, M, C]
    gates: Tensor  # fp32 [M, 2, N], or [layers, M, 2, N], as those of a block's rows

    def of_layer(self, layer: int) -> "TreeInputs":
        return TreeInputs(self.inputs[layer], self.gates[layer])
