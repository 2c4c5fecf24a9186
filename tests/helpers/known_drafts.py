"""Drafts that contain a known answer, for `generate`, and checks of what it reports."""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import cache

import pytest
import torch
from conftest import VOCAB, make_drafter, make_target
from small_vocabulary import hf_greedy

from dflash_toolkit import Drafter, Target, decode
from dflash_toolkit.decode import propose, propose_tree
from dflash_toolkit.draft_tree import DraftTree, best_first
from dflash_toolkit.generation import Generation
from dflash_toolkit.models.dflash.network import ContextKV

PROMPT = list(b"Speculate, then verify.")
SAMPLINGS = [
    {"temperature": 1.0},
    {"temperature": 0.6, "top_p": 0.9},
    {"temperature": 1.3, "top_k": 20},
    {"temperature": 1.0, "min_p": 0.05},
    {"temperature": 0.8, "top_p": 0.95, "top_k": 50, "min_p": 0.01},
]


@cache
def pair(kind: str = "llama", tied: bool = True) -> tuple[Target, Drafter]:
    target = make_target(kind, tied=tied)
    return target, make_drafter(target)


@cache
def answer(kind: str = "llama", count: int = 64) -> tuple[int, ...]:
    """A long greedy answer that no end-of-sequence token cuts."""
    tokens = hf_greedy(pair(kind)[0], PROMPT, count, eos=(VOCAB,))
    assert len(set(tokens)) > count // 2, "a repetitive answer would hide misplaced tokens"
    return tuple(tokens)


@contextmanager
def drafting(draft_at: Callable[[int], int]) -> Iterator[list[ContextKV]]:
    """Replace the proposed tokens by `draft_at(position)`; the real drafter still runs, with its checks."""
    contexts: list[ContextKV] = []

    def oracle(target: Target, drafter: Drafter, context: ContextKV, last: int, position: int) -> list[int]:
        real = propose(target, drafter, context, last, position)
        contexts.append(context)
        return [draft_at(position + slot) for slot in range(1, len(real) + 1)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode, "propose", oracle)
        yield contexts


def knows(truth: tuple[int, ...], wrong: Collection[int] = ()) -> Callable[[int], int]:
    """Draft the true answer, except at the answer indices in `wrong`."""

    def draft_at(position: int) -> int:
        index = position - len(PROMPT)
        token = truth[index] if index < len(truth) else 0
        return (token + 1) % VOCAB if index in wrong else token

    return draft_at


def check_books(generation: Generation) -> None:
    assert sum(len(step.tokens) for step in generation.steps) + 1 == len(generation.tokens)
    assert [t for step in generation.steps for t in step.tokens] == generation.tokens[1:]
    assert all(0 <= step.accepted <= step.drafted for step in generation.steps)
    if generation.steps:
        assert generation.acceptance_length == (len(generation.tokens) - 1) / len(generation.steps)


@contextmanager
def planting(truth: Collection[int], prompt: int = len(PROMPT), seed: int = 0) -> Iterator[list[ContextKV]]:
    """Draft random trees of three tokens a slot, among them mostly the one that is true there, at any rank.

    The real drafter still runs, with its checks.
    """
    contexts, dice, answer = list[ContextKV](), torch.Generator().manual_seed(seed), list(truth)

    def oracle(
        target: Target,
        drafter: Drafter,
        context: ContextKV,
        last: int,
        position: int,
        nodes: int,
        depth: int,
        width: int,
    ) -> DraftTree:
        real = propose_tree(target, drafter, context, last, position, nodes, depth)
        contexts.append(context)
        slots, size = min(depth, drafter.config.block_size - 1), target.embedding.num_embeddings
        candidates = torch.stack([torch.randperm(size, generator=dice)[:3] for _ in range(slots)])
        for slot, tokens in enumerate(candidates):
            index = position - prompt + slot + 1
            if index < len(answer) and answer[index] not in tokens and torch.rand(1, generator=dice) < 0.9:
                tokens[torch.randint(3, (1,), generator=dice)] = answer[index]
        log_probs = torch.randn(slots, 3, 3, generator=dice).log_softmax(-1)
        tree = best_first(candidates, log_probs, nodes, width)
        assert int(real.depths.max()) <= depth and len(real.tokens) <= nodes
        return tree

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode, "propose_tree", oracle)
        yield contexts
