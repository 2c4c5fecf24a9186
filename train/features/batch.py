"""Builds the features of a micro batch from rows and their hidden states."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..objective.blocks import PADDING, Features, sent
from ..responses.rows import Row


def batch_of(
    rows: Sequence[Row], hidden: Sequence[Tensor], width: int, device: torch.device, packed: int = 0, pad_to: int = 1
) -> Features:
    """Returns features of `rows` on a device: packed into one row, or padded on the right to a common length.

    Args:
        hidden: [n, W] of each row, whose other tokens are cut; the columns after `width` are the last hidden states.
        packed: length of the packed row; 0 does not pack.
        pad_to: lengths that are not packed are multiples of this.
    """
    ends = [len(h) for h in hidden]
    if packed:
        shape, places, end = (1, packed), [], 0
        for n in ends:
            places.append((0, end))
            end += n
    else:
        longest = max(ends)
        shape, places = (len(rows), longest + -longest % pad_to), [(i, 0) for i in range(len(rows))]
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
    return Features(
        sent(tokens, device), stacked[..., :width], sent(supervised, device), sent(document, device),
        sent(positions, device), stacked[..., width:] if stacked.shape[-1] > width else None,
    )  # fmt: skip
