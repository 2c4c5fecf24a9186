"""The target's hidden states for the rows of a step, online or from memory after the first epoch.

On a CPU every row goes through the target alone, so its features do not depend on the rows beside it: a run resumed at
any step, with or without a cache, sees bit-identical numbers. On a GPU the rows of a step go through together.
"""

import torch
from torch import Tensor

from dflash_toolkit.progress import Progress
from dflash_toolkit.target import Target

from .answers import Row
from .blocks import PADDING, Features

SHARE = 0.4  # of the free memory of a GPU that features may take
FILL_TOKENS = 16384  # of one forward that fills the cache


class FeatureSource:
    """Turns rows into `Features`.

    Args:
        cache_gb: keep up to so many GB of hidden states in host memory; a GPU first fills SHARE of its own.
        pad_to: the common length of a step's rows is a multiple of this.
        packed: put all rows one behind the other into a single one of so many tokens; 0 keeps them apart.
        final: also keep the target's last hidden state, behind the taps; every layer of the target runs then.
    """

    def __init__(
        self,
        target: Target,
        taps: tuple[int, ...],
        max_length: int,
        cache_gb: float,
        pad_to: int = 1,
        packed: int = 0,
        final: bool = False,
    ) -> None:
        self._target = target
        self._taps = taps
        self._final = final
        self._max_length = min(max_length, packed) if packed else max_length
        self._pad_to = pad_to
        self._packed = packed
        self._host_room = int(cache_gb * 2**30)
        self._device_room = 0
        if target.device.type == "cuda":
            self._device_room = int(SHARE * torch.cuda.mem_get_info(target.device)[0])
        self._cache: dict[int, Tensor] = {}

    def __call__(self, rows: list[Row]) -> Features:
        """Features of `rows`, packed, or padded on the right to a common length; on the target's device."""
        hidden = self._hidden(rows)
        ends = [len(h) for h in hidden]
        if self._packed:
            shape, places, end = (1, self._packed), [], 0
            for n in ends:
                places.append((0, end))
                end += n
        else:
            longest = max(ends)
            shape, places = (len(rows), longest + -longest % self._pad_to), [(i, 0) for i in range(len(rows))]
        device = self._target.device
        tokens = torch.zeros(shape, dtype=torch.long)
        document = torch.full_like(tokens, PADDING)
        supervised = torch.zeros_like(tokens, dtype=torch.bool)
        positions = torch.arange(shape[1]).expand(shape).clone()
        stacked = torch.zeros(*shape, hidden[0].shape[1], dtype=hidden[0].dtype, device=device)
        for i, (row, h, (at, start)) in enumerate(zip(rows, hidden, places, strict=True)):
            span = slice(start, start + len(h))
            tokens[at, span] = torch.tensor(row.tokens[: len(h)])
            document[at, span] = i
            for begin, end in row.supervised:
                supervised[at, start + begin : start + min(end, len(h))] = True
            positions[at, span] = torch.arange(len(h))
            stacked[at, span] = h
        split = len(self._taps) * self._target.config.hidden_size
        return Features(
            tokens.to(device), stacked[..., :split], supervised.to(device), document.to(device), positions.to(device),
            stacked[..., split:] if self._final else None,
        )  # fmt: skip

    def fill(self, rows: list[Row]) -> None:
        """Put the features of `rows` into the GPU's memory, in few large forwards, if there is room for all of them."""
        lengths = {row.index: min(len(row.tokens), self._max_length) for row in rows}
        states = len(self._taps) + self._final
        width = states * self._target.config.hidden_size * self._target.embedding.weight.element_size()
        if sum(lengths.values()) * width > self._device_room:
            return
        batch: list[Row] = []
        with Progress("features", len(rows)) as progress:
            for row in sorted(rows, key=lambda row: lengths[row.index]):  # alike in length, so little is padding
                if batch and lengths[row.index] * (len(batch) + 1) > FILL_TOKENS:
                    self._hidden(batch)
                    batch = []
                batch.append(row)
                progress.advance()
            self._hidden(batch)

    def _hidden(self, rows: list[Row]) -> list[Tensor]:
        device = self._target.device
        missing = [row for row in rows if row.index not in self._cache]
        together = [missing] if device.type == "cuda" else [[row] for row in missing]
        fresh: dict[int, Tensor] = {}
        for group in together:
            if group:
                fresh |= self._computed(group)
        for index, hidden in fresh.items():
            size = hidden.numel() * hidden.element_size()
            if size <= self._device_room:
                self._device_room -= size
                self._cache[index] = hidden
            elif size <= self._host_room:
                self._host_room -= size
                self._cache[index] = hidden.cpu()
        return [
            fresh[row.index] if row.index in fresh else self._cache[row.index].to(device, non_blocking=True)
            for row in rows
        ]

    def _computed(self, rows: list[Row]) -> dict[int, Tensor]:
        """One forward; what stands behind a row's end is padding, which no earlier position sees."""
        lengths = [min(len(row.tokens), self._max_length) for row in rows]
        ids = torch.zeros(len(rows), max(lengths), dtype=torch.long)
        for i, (row, n) in enumerate(zip(rows, lengths, strict=True)):
            ids[i, :n] = torch.tensor(row.tokens[:n])
        out = self._target.forward(ids.to(self._target.device), taps=self._taps, final=self._final)
        features = out.features
        assert features is not None
        if out.final is not None:
            features = torch.cat([features, out.final], dim=-1)
        # made under inference mode; autograd wants an ordinary tensor
        return {row.index: features[i, :n].clone() for i, (row, n) in enumerate(zip(rows, lengths, strict=True))}
