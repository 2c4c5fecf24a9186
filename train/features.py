"""The target's hidden states for a batch of rows, online or from memory after the first epoch.

Every row goes through the target alone, so its features do not depend on the batch it is in: a run resumed at any
step, with or without a cache, sees bit-identical numbers.
"""

import torch
from torch import Tensor

from dflash_toolkit.target import Target

from .answers import Row
from .blocks import PADDING, Features


class FeatureSource:
    """Turns rows into `Features`; keeps up to `cache_gb` of hidden states in host memory."""

    def __init__(
        self, target: Target, taps: tuple[int, ...], max_length: int, cache_gb: float, pad_to: int = 1
    ) -> None:
        self._target = target
        self._taps = taps
        self._max_length = max_length
        self._pad_to = pad_to
        self._room = int(cache_gb * 2**30)
        self._cache: dict[int, Tensor] = {}

    def __call__(self, rows: list[Row]) -> Features:
        """Features of `rows`, padded on the right to a common length, on the target's device."""
        hidden = [self._hidden(row) for row in rows]
        longest = max(len(h) for h in hidden)
        longest += -longest % self._pad_to
        device = self._target.device
        tokens = torch.zeros(len(rows), longest, dtype=torch.long)
        document = torch.full_like(tokens, PADDING)
        supervised = torch.zeros_like(tokens, dtype=torch.bool)
        stacked = torch.zeros(len(rows), longest, hidden[0].shape[1], dtype=hidden[0].dtype, device=device)
        for i, (row, h) in enumerate(zip(rows, hidden, strict=True)):
            n = len(h)
            tokens[i, :n] = torch.tensor(row.tokens[:n])
            document[i, :n] = i
            supervised[i, row.prompt_tokens : n] = True
            stacked[i, :n] = h
        positions = torch.arange(longest).expand(len(rows), -1)
        return Features(tokens.to(device), stacked, supervised.to(device), document.to(device), positions.to(device))

    def _hidden(self, row: Row) -> Tensor:
        if (cached := self._cache.get(row.index)) is not None:
            return cached.to(self._target.device, non_blocking=True)
        ids = torch.tensor([row.tokens[: self._max_length]], device=self._target.device)
        features = self._target.forward(ids, taps=self._taps).features
        assert features is not None
        # made under inference mode; autograd wants an ordinary tensor
        hidden = features[0].clone()
        size = hidden.numel() * hidden.element_size()
        if size <= self._room:
            self._room -= size
            self._cache[row.index] = hidden.cpu()
        return hidden
