"""How sure a drafter may be taken to be, measured on answers to held-out prompts before it is exported."""

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from dflash_toolkit.calibration import Calibration
from dflash_toolkit.draft_tree import WIDTH
from dflash_toolkit.generation import Generation
from dflash_toolkit.models.dflash.network import ContextKV, Drafter
from dflash_toolkit.models.target import Target

BLOCKS = 512  # that are drafted, at most
LIKELY = 1e-3  # less probable tokens are no nodes of trees


@torch.inference_mode()
def calibrate(target: Target, drafter: Drafter, answers: Sequence[tuple[list[int], Generation]]) -> Calibration | None:
    """Fitted to the nodes of draft trees over the target's own greedy answers whose parents are accepted.

    Blocks are drafted where steps of decoding began, of long answers where every so many did.

    Args:
        drafter: in the target's dtype, on its device.
        answers: prompts, and what the target said.

    Returns:
        None where no answer is long enough for a block, or what the drafter finds more probable is accepted less, as of
        one that was hardly trained.
    """
    every = -(-sum(len(answer.steps) for _, answer in answers) // BLOCKS) or 1
    found = [pair for prompt, answer in answers for pair in judged_nodes(target, drafter, prompt, answer, every)]
    if not found:
        return None
    log_probs, slots, accepted = (torch.tensor(part) for part in zip(*found, strict=True))
    cold = Calibration.cold(drafter.config.block_size - 1)
    fitted = cold.refit(log_probs.double().exp(), slots, accepted)
    return fitted if fitted.slope > 0 else None


def judged_nodes(
    target: Target, drafter: Drafter, prompt: list[int], answer: Generation, every: int
) -> Iterator[tuple[float, int, bool]]:
    """Log-probability and slot of each judged node, and whether it was accepted."""
    tokens, config = prompt + answer.tokens, drafter.config
    anchors, at = list[int](), len(prompt)
    for step in answer.steps:
        anchors.append(at)
        at += len(step.tokens)
    anchors = [anchor for anchor in anchors[::every] if anchor + 1 < len(tokens)]
    if not anchors:
        return
    features = target.forward(torch.tensor([tokens], device=target.device), taps=config.target_layer_ids).features
    assert features is not None
    positions = torch.arange(len(tokens) + config.block_size, device=target.device)[None]
    context = drafter.context_kv(features.to(drafter.dtype), positions[:, : len(tokens)])
    for anchor in anchors:
        ids = torch.full((1, config.block_size), config.mask_token_id, device=target.device)
        ids[0, 0] = tokens[anchor]
        keys, values = ([part[:, :, :anchor] for part in parts] for parts in (context.keys, context.values))
        before = ContextKV(keys, values, context.positions[:, :anchor])
        hidden = drafter(
            target.embed(ids).to(drafter.dtype), positions[:, anchor : anchor + config.block_size], before
        )[0, 1:]
        candidates, log_probs = drafter.conditional(hidden, target.head(hidden.to(target.dtype)), tokens[anchor])
        yield from _judged(candidates.cpu(), log_probs.cpu(), tokens[anchor + 1 :])


def _judged(candidates: Tensor, log_probs: Tensor, following: list[int]) -> Iterator[tuple[float, int, bool]]:
    parent = 0
    for slot, token in enumerate(following[: len(candidates)], 1):
        values, ranks = log_probs[slot - 1, parent].sort(descending=True, stable=True)
        likely = max(1, int((values[:WIDTH] > math.log(LIKELY)).sum()))
        taken = None
        for value, rank in zip(values[:likely].tolist(), ranks[:likely].tolist(), strict=True):
            hit = int(candidates[slot - 1, rank]) == token
            taken = rank if hit else taken
            yield value, slot, hit
        if taken is None:
            return
        parent = taken
