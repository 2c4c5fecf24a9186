"""The transfer codes of DSpine: a fixed unit vector for every token, from the target's head."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..dflash.network import Drafter

CHUNK = 8192  # rows of the head at a time
LEAST = 1e-6  # share of the largest variance below which a direction counts as empty


@torch.no_grad()
def make_codes(drafter: Drafter, head: Tensor) -> None:
    """Fills a drafter's codes, and initialises its readouts with the principal directions of the head [V, D]."""
    codes, directions = transfer_space(head, drafter.config.sizes["transfer_rank"])
    fixed = dict(drafter.named_buffers())
    fixed["transfer_codes"].copy_(codes)
    fixed["transfer_ready"].fill_(True)
    for readout in drafter.injection.readouts:  # type: ignore[union-attr]
        readout.weight.copy_(directions)


def transfer_space(head: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Returns codes fp32 [V, R], rounded to bf16 as they are exported, and R principal directions [R, D].

    The rows of the head are normalised and centered, projected on the directions of their largest variance, scaled to
    equal variance, and normalised again.

    Raises:
        ValueError: the rows span fewer than `rank` directions.
    """
    chunks = head.split(CHUNK)

    def normed(rows: Tensor) -> Tensor:
        return F.normalize(rows.float(), dim=1)

    mean = torch.stack([normed(rows).sum(0) for rows in chunks]).sum(0) / len(head)
    spread = torch.zeros(head.shape[1], head.shape[1], device=head.device)
    for rows in chunks:
        centered = normed(rows) - mean
        spread += centered.T @ centered
    variances, vectors = torch.linalg.eigh(spread.double() / len(head))  # ascending
    if (spanned := int((variances > LEAST * variances[-1].clamp(min=1e-12)).sum())) < rank:
        raise ValueError(f"transfer_rank is {rank}, but the rows of the target's head span {spanned} directions")
    variances, directions = variances[-rank:].flip(0).float(), vectors[:, -rank:].flip(1).T.float()
    codes = [F.normalize((normed(rows) - mean) @ directions.T / variances.sqrt(), dim=1) for rows in chunks]
    return torch.cat(codes).bfloat16().float(), directions
