"""Compares a drafter's probabilities with what the target accepts, to calibrate them."""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .calibration import Calibration
from .draft_tree import WIDTH
from .generation import Generation
from .models.dflash.network import ContextKV, Drafter
from .models.target import Target

BLOCKS = 512  # maximum number of drafted blocks
LIKELY = 1e-3  # minimum probability of a node


class JudgedNode(NamedTuple):
    """A node of a draft tree with an accepted parent."""

    log_prob: float  # the drafter's, for its token after its parent
    slot: int  # 1..S-1
    accepted: bool
    best: bool  # the most probable token after its parent, which a chain would hold


def calibrate(target: Target, drafter: Drafter, answers: Sequence[tuple[list[int], Generation]]) -> Calibration | None:
    """Returns the fit to the nodes that `judge` finds, see `fit`."""
    return fit(judge(target, drafter, answers), drafter.config.block_size - 1)


def fit(nodes: Sequence[JudgedNode], slots: int) -> Calibration | None:
    """Fits a calibration; None without nodes, or if more probable tokens are accepted less often, as with a drafter
    that was hardly trained."""
    if not nodes:
        return None
    log_probs, at, accepted, _ = (torch.tensor(part) for part in zip(*nodes, strict=True))
    fitted = Calibration.cold(slots).refit(log_probs.double().exp(), at, accepted)
    return fitted if fitted.slope > 0 else None


@torch.inference_mode()
def judge(target: Target, drafter: Drafter, answers: Sequence[tuple[list[int], Generation]]) -> list[JudgedNode]:
    """Returns the nodes with accepted parents of draft trees over the target's own greedy answers, block by block.

    A block starts where a decoding step started; of many steps only every n-th is used.

    Args:
        drafter: in the target's dtype, on its device.
        answers: prompts and the target's answers.
    """
    every = -(-sum(len(answer.steps) for _, answer in answers) // BLOCKS) or 1
    return [node for prompt, answer in answers for node in judged_nodes(target, drafter, prompt, answer, every)]


def judged_nodes(
    target: Target, drafter: Drafter, prompt: list[int], answer: Generation, every: int
) -> Iterator[JudgedNode]:
    """Yields the nodes of one answer, from every `every`-th step."""
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
        place = positions[:, anchor : anchor + config.block_size]
        states = drafter(target.embed(ids).to(drafter.dtype), place, before, tokens=ids)[0, 1:]
        logits = target.head(drafter.for_head(states).to(target.dtype))
        candidates, log_probs = drafter.conditional(states, logits, tokens[anchor], target.head_weight)
        yield from _judged(candidates.cpu(), log_probs.cpu(), tokens[anchor + 1 :])


def _judged(candidates: Tensor, log_probs: Tensor, following: list[int]) -> Iterator[JudgedNode]:
    parent = 0
    for slot, token in enumerate(following[: len(candidates)], 1):
        values, ranks = log_probs[slot - 1, parent].sort(descending=True, stable=True)
        likely = max(1, int((values[:WIDTH] > math.log(LIKELY)).sum()))
        taken = None
        for place, (value, rank) in enumerate(zip(values[:likely].tolist(), ranks[:likely].tolist(), strict=True)):
            hit = int(candidates[slot - 1, rank]) == token
            taken = rank if hit else taken
            yield JudgedNode(value, slot, hit, place == 0)
        if taken is None:
            return
        parent = taken
