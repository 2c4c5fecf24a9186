"""Draft trees with nodes that hold a known text."""

import contextlib
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from dflash_toolkit import Drafter, SamplingParams, Target, decode, generate
from dflash_toolkit.draft_tree import DraftTree, best_first
from dflash_toolkit.generation import Generation
from dflash_toolkit.runtime import Engine
from dflash_toolkit.runtime.proposer import Draft
from dflash_toolkit.runtime.request import StepShape

Texts = dict[tuple[int, ...], list[int]]  # answers by prompts


def planted(text: Sequence[int], position: int, slots: int, vocabulary: int) -> tuple[Tensor, Tensor]:
    """Returns candidates [slots, 3] after `position` of a text, most of which contain the next token, and their
    log-probabilities, fp32 [slots, 3]."""
    dice = torch.Generator().manual_seed(1000 * len(text) + position)
    candidates = torch.stack([torch.randperm(vocabulary, generator=dice)[:3] for _ in range(slots)])
    for slot, tokens in enumerate(candidates):
        at, place = position + 1 + slot, torch.randint(3, (1,), generator=dice)
        if at < len(text) and text[at] not in tokens and torch.rand(1, generator=dice) < 0.9:
            tokens[place] = text[at]
    return candidates, torch.randn(slots, 3, generator=dice).log_softmax(-1)


@contextlib.contextmanager
def planting(engine: Engine, texts: Texts) -> Iterator[None]:
    """Within, the engine and `generate` grow the same trees, of which some nodes are right."""
    proposer, vocabulary = engine.runner.proposer, engine.vocabulary
    real = proposer._head.children

    def plants(block: int) -> tuple[Tensor, Tensor]:
        found = []
        for row, request in enumerate(engine.scheduler.running):
            text = request.prompt_ids + texts[tuple(request.prompt_ids)]
            found.append(planted(text, int(engine.runner.state.lengths[row]), block - 1, vocabulary))
        candidates, log_probs = map(torch.stack, zip(*found, strict=True))
        return candidates, log_probs

    def children(hidden: Tensor, last: Tensor, block: int, calibration: Tensor, width: int) -> tuple[Tensor, ...]:
        own, _, _ = real(hidden, last, block, calibration, width)
        assert calibration.shape == (block,) and own.shape[:2] == (len(last), block - 1)
        candidates, log_probs = plants(block)
        values, ranks = log_probs[:, :, None].sort(dim=-1, descending=True, stable=True)
        return values[..., :width].contiguous(), ranks[..., :width].int().contiguous(), candidates

    def draft(hidden: Tensor, last: Tensor, block: int) -> Draft:
        candidates, log_probs = plants(block)
        return Draft(candidates.gather(2, log_probs.argmax(-1, keepdim=True))[..., 0])

    def propose_tree(
        target: Target, drafter: Drafter, context: Any, last: int, position: int, nodes: int, depth: int, width: int
    ) -> DraftTree:
        slots = drafter.config.block_size - 1
        (text,) = (list(p) + a for p, a in texts.items() if len(p) + len(a) > position and list(p) == now)
        candidates, log_probs = planted(text, position, slots, vocabulary)
        each = log_probs[:depth, None].expand(-1, 3, -1)
        return best_first(candidates[:depth], each, nodes, width)

    now: list[int] = []
    stream = decode.stream

    def streamed(target: Target, drafter: Drafter | None, prompt: list[int], *more: Any) -> Iterator[Generation]:
        now[:] = prompt
        return stream(target, drafter, prompt, *more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(proposer, "_head", SimpleNamespace(children=children, draft=draft))
        patch.setattr(decode, "propose_tree", propose_tree)
        patch.setattr(decode, "stream", streamed)
        yield


def plain(target: Target, prompts: list[list[int]], params: Sequence[SamplingParams]) -> Texts:
    return {tuple(p): generate(target, None, p, each).tokens for p, each in zip(prompts, params, strict=True)}


def watch(engine: Engine, choose: Any, shapes: list[StepShape]) -> None:
    """Note the shapes that are chosen."""

    def chosen(requests: Any) -> StepShape:
        shapes.append(choose(requests))
        return shapes[-1]

    engine.scheduler.choose_shape = chosen
