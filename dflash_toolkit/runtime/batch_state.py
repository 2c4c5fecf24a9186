"""The batch on the device: each row belongs to the request that the scheduler has put there."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .graphs import to_device
from .request import Request
from .sampler import Sampler
from .stack import Rows, States


@dataclass(frozen=True, slots=True)
class BatchState:
    """State that a step reads and advances. A row without a request is inactive, with length 0 and the null block."""

    lengths: Tensor  # int32 [R], tokens in the cache, before the next block
    last_token: Tensor  # int64 [R], the first token of the next block
    active: Tensor  # bool [R]
    page_table: Tensor  # int32 [R, pages of a request]
    page_size: int
    sampler: Sampler  # parameters and counts of R rows
    states: (
        Tensor  # int32 [2, R]: slots of recurrent states (0: of no request); rows of the last block that were committed
    )
    recurrent: bool  # whether there are such states

    @classmethod
    def empty(
        cls, rows: int, pages: int, page_size: int, device: torch.device, sampler: Sampler, recurrent: bool = False
    ) -> "BatchState":
        def new(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return cls(
            new(rows, dtype=torch.int32),
            new(rows, dtype=torch.int64),
            new(rows, dtype=torch.bool),
            new(rows, pages, dtype=torch.int32),
            page_size,
            sampler,
            new(2, rows, dtype=torch.int32),
            recurrent,
        )

    def rows(self, batch: int, block: int = 1) -> Rows:
        """Returns the blocks of the first `batch` rows, with a copy of their current lengths."""
        states = None
        if self.recurrent:
            slots, stay = self.states[:, :batch]
            states = States(slots, torch.full_like(slots, block), stay)
        return Rows(self.lengths[:batch].clone(), self.page_table[:batch], self.page_size, states=states)

    def stay(self, counts: Tensor) -> None:
        """Stores how many rows [B] of the block were committed."""
        if self.recurrent:
            self.states[1, : len(counts)].copy_(counts)

    def add(self, row: int, request: Request) -> None:
        """Gives a free row to a request. Its known tokens are in its pages."""
        self.sampler.set(row, request.params, request.prompt_ids, request.tokens, request.stop_ids, request.limit)
        self.lengths[row] = len(request.known_ids)
        self.active[row] = True
        if self.recurrent:
            self.states[0, row] = request.state
        self.set_pages(row, request.pages)
        if request.tokens:
            self.last_token[row] = request.tokens[-1]

    def set_pages(self, row: int, pages: Sequence[int]) -> None:
        self.page_table[row, : len(pages)].copy_(to_device(pages, torch.int32, self.page_table.device))

    def move(self, source: int, target: int) -> None:
        """Copies row `source` to row `target`, which is free."""
        for field in (self.lengths, self.last_token, self.page_table):
            field[target].copy_(field[source])
        if self.recurrent:
            self.states[:, target].copy_(self.states[:, source])
        self.sampler.move(source, target)

    def remove(self, row: int) -> None:
        for field in (self.lengths, self.last_token, self.active, self.page_table):
            field[row].zero_()
        if self.recurrent:
            self.states[:, row].zero_()
