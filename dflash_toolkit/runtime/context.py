"""The drafter's context: keys and values of committed tokens, projected from the target's tapped features.

They are read by a draft, and by whoever finds the pages in the prefix cache; a request that is decoded plainly needs
neither. To compute them for one token takes reading all the weights that make them, as it does for a whole block. So a
plain step only keeps its features, and those of up to a block of tokens are projected at once, later.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .capture import Captures, to_device
from .stack import Decoder, Rows
from .weights import DrafterWeights


class ContextWriter:
    """Writes context at once (`write`) or keeps what it is made of (`keep`) until the row is settled (`settle`).

    Args:
        proposer: the drafter's decoder, whose cache is written.
        lengths, page_table: the batch's, int32 [rows] and [rows, pages].
        room: tokens that a row may owe.
        bucket: how many rows are computed for so many.
    """

    def __init__(
        self,
        drafter: DrafterWeights,
        proposer: Decoder,
        lengths: Tensor,
        page_table: Tensor,
        page_size: int,
        room: int,
        bucket: Callable[[int], int],
        captured: Captures,
    ) -> None:
        self._drafter, self._proposer = drafter, proposer
        self._lengths, self._page_table, self._page_size = lengths, page_table, page_size
        self._room, self._bucket, self._captured = room, bucket, captured
        rows, self._device, cache = len(lengths), lengths.device, proposer.cache
        width = drafter.fc.shape[1]
        # of row r the first `counts[r]` are owed, the newest last
        self._features = torch.zeros(rows, room, width, dtype=cache.dtype, device=self._device)
        self.counts = torch.zeros(rows, dtype=torch.int64, device=self._device)
        self._owed = [0] * rows  # the same, which the host knows without waiting
        self._every = torch.arange(rows, device=self._device)
        self._chosen = torch.zeros(rows, dtype=torch.int64, device=self._device)  # to be settled next
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}

    # ---- parts of a captured pass ----------------------------------------------------------------------------

    def write(self, features: Tensor, rows: Rows, counts: Tensor) -> None:
        """Keys and values of every draft layer for the first `counts[b]` of each row's tokens.

        Args:
            features: [B * S, K * D]; row b * S + k is position `rows.lengths[b]` + k.
            counts: int32 [B].
        """
        drafter, proposer, ops = self._drafter, self._proposer, self._proposer.ops
        eps = drafter.spec.rms_norm_eps
        nothing = torch.zeros(len(features), drafter.spec.hidden_size, dtype=features.dtype, device=features.device)
        _, context = ops.add_rms_norm(nothing, ops.linear_split_k(features, drafter.fc), drafter.hidden_norm, eps)
        kv = ops.linear(context, drafter.context_kv, drafter.context_bias)
        cache, page_size = proposer.cache, rows.page_size
        ops.context_write(
            kv, drafter.k_norms, eps, proposer.rope, rows.lengths, counts, rows.page_table, cache, page_size
        )

    def keep(self, features: Tensor, counts: Tensor) -> None:
        """Features [B, K * D] of a plain step of the first B rows, which committed `counts` int32 [B], 0 or 1 each."""
        rows = len(counts)
        # a row without a request keeps what nobody will ask for
        self._features[self._every[:rows], self.counts[:rows]] = features
        self.counts[:rows] += counts

    def _write_kept(self, size: int) -> None:
        """What the first `size` of the chosen rows owe."""
        chosen = self._chosen[:size]
        counts = self.counts[chosen].int()
        rows = Rows(self._lengths[chosen] - counts, self._page_table[chosen], self._page_size)
        self.write(self._features[chosen].flatten(0, 1), rows, counts)
        self.counts.index_fill_(0, chosen, 0)

    # ---- between passes ----------------------------------------------------------------------------------------

    def before_step(self, rows: int, block: int) -> None:
        """Settle what a step of the first `rows` rows with blocks of `block` tokens cannot go on without."""
        if block > 1 or self._room in self._owed[:rows]:
            self.settle(range(rows))  # all of them: for one row the weights are read as for many
        if block == 1:
            for row in range(rows):
                self._owed[row] += 1

    def settle(self, rows: Sequence[int]) -> None:
        """Write what these rows owe."""
        due = [row for row in rows if self._owed[row]]
        if not due:
            return
        size = self._bucket(len(due))
        # a row that is there twice is written twice, the same
        chosen = [*due, *due[-1:] * (size - len(due))]
        self._chosen[:size].copy_(to_device(chosen, torch.int64, self._device))
        if self._device.type == "cuda":
            self._graph(size).replay()
        else:
            self._write_kept(size)
        for row in due:
            self._owed[row] = 0

    def move(self, source: int, target: int) -> None:
        """Row `target` owes what `source` does, and nothing else."""
        if owed := self._owed[source]:
            self._features[target, :owed].copy_(self._features[source, :owed])
        if owed or self._owed[target]:
            self.counts[target].copy_(self.counts[source])
        self._owed[target] = owed

    def forget(self, row: int) -> None:
        """The row owes nothing: nobody will read what it did not write."""
        if self._owed[row]:
            self.counts[row].zero_()
        self._owed[row] = 0

    def prepare(self, sizes: Sequence[int]) -> bool:
        """Capture the settlement of one of these numbers of rows, none of which owes anything; False if all are."""
        size = next((size for size in sizes if size not in self._graphs), None)
        if size is not None:
            self._graph(size)
        return size is not None

    def _graph(self, size: int) -> Any:
        """The captured settlement of `size` rows; where it is captured now, it has done its work already."""
        if size not in self._graphs:
            self._graphs[size], _ = self._captured(lambda: self._write_kept(size))
        return self._graphs[size]
