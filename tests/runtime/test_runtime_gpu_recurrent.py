"""Targets with recurrent layers on a GPU in bf16: turns of conversations, and what trees do to penalties."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from gpu_engines import LIMIT, VOCAB, knowing, make_engine, pair, prompts_of

from dflash_toolkit import SamplingParams
from dflash_toolkit.generation import Generation
from dflash_toolkit.kernels.triton import delta
from dflash_toolkit.runtime import Engine
from dflash_toolkit.runtime.recurrent import ANSWER_PAGES

pytestmark = pytest.mark.gpu
PAGE = 64
SPAN = ANSWER_PAGES * PAGE  # states of answers are kept after its multiples
WAYS: list[dict[str, Any]] = [{}, {"draft_tree": 15, "draft_tree_width": 1}, {"draft_tree": 15, "draft_tree_width": 8}]
ROOM: dict[str, Any] = {"prefix_cache": True, "prefix_states": 200, "kv_cache_tokens": 32 * LIMIT}
IDS = ["blocks", "chains", "trees"]


def kept(engine: Engine) -> dict[tuple[int, ...], list[torch.Tensor]]:
    """Returns the states that are kept, by the tokens of their page."""
    found = {}
    for slot, node in engine.pool._states.items():
        parts = [part[slot] for memory in engine.runner._memories for part in (memory.state, memory.window)]
        found[node.key[1]] = [part.clone() for part in parts]
    return found


@pytest.mark.parametrize("way", WAYS, ids=IDS)
@pytest.mark.parametrize("kind", ["qwen3_5", "qwen3_5_moe"])
def test_turns_continue_from_states_with_the_bits_of_plain_decoding(kind: str, way: dict[str, Any]) -> None:
    """Answers cross pages after which states are kept. The third turn lacks the second answer, as for thoughts."""
    target, drafter = pair(kind)
    params, more = SamplingParams(max_tokens=200, ignore_eos=True), prompts_of(24, seed=2)
    turns, answers = [prompts_of(24)], list[list[list[int]]]()
    plain, drafting = (make_engine(target, drafts, **ROOM, **how) for drafts, how in ((None, {}), (drafter, way)))
    for turn in range(3):
        answers.append([g.tokens for g in plain.generate(turns[turn], params)])
        told = answers[turn] if turn == 0 else [[] for _ in more]
        turns.append([a + b + c[:90] for a, b, c in zip(turns[turn], told, more, strict=True)])
    knowing(drafting, [*turns[0], *turns[1], *turns[2]], [*answers[0], *answers[1], *answers[2]])
    for prompts, expected in zip(turns[:3], answers, strict=True):
        assert [g.tokens for g in drafting.generate(prompts, params)] == expected
    cached = [engine.stats.cached_prompt_tokens for engine in (plain, drafting)]
    assert cached[0] == cached[1]
    begun = sum(max(len(p) + 199 - SPAN - PAGE, 0) for p in turns[0]) + sum(max(len(p) - PAGE - 9, 0) for p in turns[1])
    assert cached[0] >= begun
    ours, theirs = kept(drafting), kept(plain)
    assert ours.keys() == theirs.keys() and len(ours) > 24
    assert all(torch.equal(a, b) for page in ours for a, b in zip(ours[page], theirs[page], strict=True))


def test_a_turn_of_8000_tokens_computes_its_new_part() -> None:
    """States within the prompt are kept after its chunks; one that continues after some of them finds its states."""
    target, drafter = pair("qwen3_5", limit=16384)
    prompt = torch.randint(0, VOCAB - 1, (8000,), generator=torch.Generator().manual_seed(8)).tolist()
    params = SamplingParams(max_tokens=300, ignore_eos=True)
    room: dict[str, Any] = {"prefix_cache": True, "prefix_states": 40, "kv_cache_tokens": 24000, "max_num_seqs": 2}
    engine = make_engine(target, drafter, max_num_batched_tokens=2048, **room)
    (first,) = engine.generate([prompt], params)
    cached = engine.stats.cached_prompt_tokens
    second = prompt + first.tokens + prompt[:100]
    (again,) = engine.generate([second], params)
    assert engine.stats.cached_prompt_tokens - cached >= len(prompt) + 299 - SPAN - PAGE
    cached = engine.stats.cached_prompt_tokens
    (branch,) = engine.generate([prompt[:4500] + prompt[:100]], params)
    assert engine.stats.cached_prompt_tokens - cached == 4096
    assert all(len(got.tokens) == 300 for got in (first, again, branch))


def test_copies_of_states_are_compiled_at_the_start() -> None:
    """Otherwise the first answer of some length would wait for the compiler."""
    kernels = delta._delta_inputs_kernel, delta._delta_rule_kernel

    def compiled() -> list[int]:
        return [len(cache[0]) for kernel in kernels for cache in kernel.device_caches.values()]

    engine = make_engine(*pair("qwen3_next"), **ROOM)
    before = compiled()
    for rows in (0, 1, 7):
        engine.runner.copy_states(1, 2, rows)
    assert compiled() == before and min(before) > 0


@pytest.mark.parametrize("way", WAYS[1:], ids=IDS[1:])
@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe", "qwen3_next", "qwen3_5", "qwen3_5_moe"])
def test_penalties_and_logprobs_over_trees_equal_plain_ones(kind: str, way: dict[str, Any]) -> None:
    target, drafter = pair(kind)
    prompts, base = prompts_of(32), SamplingParams(max_tokens=48, ignore_eos=True, logprobs=3)
    edits: list[dict[str, Any]] = [
        {"repetition_penalty": 1.3}, {"presence_penalty": 0.6, "frequency_penalty": 0.3},
        {"logit_bias": ((5, 4.0), (7, -3.0)), "temperature": 0.8, "top_p": 0.9, "seed": 3}, {},
    ]  # fmt: skip
    each = [replace(base, **edits[i % 4]) for i in range(len(prompts))]
    plain = make_engine(target, None).generate(prompts, each)
    engine = make_engine(target, drafter, **way)
    knowing(engine, prompts, [g.tokens for g in plain])
    drafted = engine.generate(prompts, each)
    assert [g.tokens for g in drafted] == [g.tokens for g in plain]
    assert sum(engine.runner.tree_rows.values()) > 0
    assert sum(len(g.steps) for g in drafted) < 32 * 47 / 1.5, "drafts were accepted"
    for ours, theirs in zip(drafted, plain, strict=True):
        assert_scores_equal(ours, theirs)


def assert_scores_equal(ours: Generation, theirs: Generation) -> None:
    for a, b in zip(ours.logprobs, theirs.logprobs, strict=True):
        assert a.chosen == pytest.approx(b.chosen, abs=1e-3)
        assert [token for token, _ in a.best] == [token for token, _ in b.best]
        assert [value for _, value in a.best] == pytest.approx([value for _, value in b.best], abs=1e-3)
