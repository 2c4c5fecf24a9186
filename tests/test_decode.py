"""Decoding loses nothing: the drafter decides how fast an answer comes, never which answer."""

import itertools
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import EOS, MASK, VOCAB, Clock, make_dflash2, make_drafter, make_target
from hypothesis import given, settings
from hypothesis import strategies as st
from known_drafts import PROMPT, SAMPLINGS, answer, check_books, drafting, knows, pair, planting
from small_vocabulary import (
    SMALL_PROMPT,
    SMALL_SAMPLINGS,
    check_answers,
    dflash2_of_few,
    exact_answers,
    hf_greedy,
    likely_draft,
    small_vocabulary_pair,
)
from transformers import AutoModelForCausalLM, BloomConfig

from dflash_toolkit import Drafter, SamplingParams, Target, UserError, decode, generate, stream
from dflash_toolkit.decode import propose, propose_tree
from dflash_toolkit.generation import Generation
from dflash_toolkit.kernels.reference import choose, filtered_probabilities
from dflash_toolkit.models.dflash.network import SampledDraft
from dflash_toolkit.sampling import Grammar

# ---- greedy --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_greedy_answer_is_that_of_hf_generate(kind: str, tied: bool) -> None:
    target, drafter = pair(kind, tied)
    expected = hf_greedy(target, PROMPT, 24)
    for count in (1, 2, 8, 9, 24):
        for helper in (None, drafter):
            generation = generate(target, helper, PROMPT, SamplingParams(max_tokens=count))
            assert generation.tokens == expected[:count]
            ended = len(expected) <= count and expected[-1] == EOS
            assert generation.finish_reason == ("stop" if ended else "length")
            check_books(generation)


@pytest.mark.parametrize("size", [2, 3, 5, 8, 16])
def test_every_block_size_gives_the_same_answer(size: int) -> None:
    target, drafter = pair()
    resized = Drafter(drafter.config.with_block_size(size))
    resized.load_state_dict(drafter.state_dict())
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    assert generate(target, resized, PROMPT, params).tokens == list(answer()[:40])
    with drafting(knows(answer())):
        generation = generate(target, resized, PROMPT, params)
    assert generation.tokens == list(answer()[:40])
    assert len(generation.steps) == math.ceil(39 / size), "a perfect draft commits a whole block a step"


@given(wrong=st.sets(st.integers(0, 40)), count=st.integers(1, 40), kind=st.sampled_from(["llama", "qwen2", "qwen3"]))
@settings(max_examples=25, deadline=None, derandomize=True)
def test_a_step_commits_the_correct_prefix_of_the_draft_and_one_more(wrong: set[int], count: int, kind: str) -> None:
    target, drafter = pair(kind)
    truth = answer(kind)
    with drafting(knows(truth, wrong)):
        generation = generate(target, drafter, PROMPT, SamplingParams(max_tokens=count, ignore_eos=True))

    expected, done = [], 1  # the prefill gives the first token
    while done < count:
        drafted = min(drafter.config.block_size - 1, count - done - 1)
        accepted = next((i for i in range(drafted) if done + i in wrong), drafted)
        expected.append((drafted, accepted, truth[done : done + accepted + 1]))
        done += accepted + 1
    assert [(s.drafted, s.accepted, s.tokens) for s in generation.steps] == expected
    assert generation.tokens == list(truth[:count])
    assert generation.finish_reason == "length"
    check_books(generation)


@pytest.mark.parametrize("wrong", [set(), {2, 9, 10, 11, 17}, set(range(64))], ids=["none", "some", "all"])
def test_the_draft_context_holds_only_committed_tokens(wrong: set[int]) -> None:
    target, drafter = pair()
    with drafting(knows(answer(), wrong)) as contexts:
        generation = generate(target, drafter, PROMPT, SamplingParams(max_tokens=30, ignore_eos=True))
    ids = torch.tensor([PROMPT + generation.tokens])
    for context in contexts:
        count = context.length
        features = target.forward(ids[:, :count], taps=drafter.config.target_layer_ids).features
        with torch.inference_mode():
            fresh = drafter.context_kv(features, torch.arange(count)[None])
        assert torch.equal(context.positions, fresh.positions)
        for grown, whole in zip(context.keys + context.values, fresh.keys + fresh.values, strict=True):
            torch.testing.assert_close(grown, whole, rtol=1e-4, atol=1e-4)


# ---- where an answer ends ------------------------------------------------------------------------------


@pytest.mark.parametrize("index", range(1, 18))
def test_the_earliest_stop_token_in_a_block_ends_the_answer(index: int) -> None:
    target, drafter = pair()
    truth = answer()
    stops = truth[index + 3], truth[index]
    end = min(map(truth.index, stops))  # the first occurrence of the earliest
    params = SamplingParams(max_tokens=40, stop_token_ids=stops)
    with drafting(knows(truth)):
        generation = generate(target, drafter, PROMPT, params)
    assert generation.tokens == list(truth[: end + 1]) == hf_greedy(target, PROMPT, 40, eos=(EOS, *stops))
    assert generation.finish_reason == "stop"
    check_books(generation)
    # full blocks of eight, then the part of the last one that was committed
    full, rest = divmod(end, 8)
    assert [s.accepted for s in generation.steps] == [7] * full + [rest] * (rest > 0)
    assert generate(target, None, PROMPT, params).tokens == generation.tokens


def test_every_eos_id_stops_unless_ignore_eos() -> None:
    target, drafter = make_target(), pair()[1]
    truth = answer()
    target.model.generation_config.eos_token_id = [EOS, truth[6]]
    end = truth.index(truth[6])
    assert set(target.stop_token_ids) == {EOS, truth[6]}
    plain = SamplingParams(max_tokens=20)
    assert generate(target, drafter, PROMPT, plain).tokens == list(truth[: end + 1])
    on = SamplingParams(max_tokens=20, ignore_eos=True)
    assert generate(target, drafter, PROMPT, on).tokens == list(truth[:20])
    own = SamplingParams(max_tokens=20, ignore_eos=True, stop_token_ids=(truth[6],))
    assert generate(target, drafter, PROMPT, own).finish_reason == "stop", "the caller's stop ids still count"


@pytest.mark.parametrize("room", [1, 2, 3, 8, 9, 17])
def test_an_answer_ends_exactly_at_the_context_limit(room: int) -> None:
    target = make_target(limit=len(PROMPT) + room)
    drafter = make_drafter(target)
    params = SamplingParams(max_tokens=512, ignore_eos=True)
    answers = [generate(target, helper, PROMPT, params) for helper in (None, drafter)]
    with drafting(knows(answer())):
        answers.append(generate(target, drafter, PROMPT, params))
    for generation in answers:
        assert generation.tokens == list(answer()[:room])
        assert generation.finish_reason == "length"


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ([], "prompt is empty"),
        ([5] * 16, r"prompt has 16 tokens.*limit is 16"),
        ([5] * 17, r"prompt has 17 tokens.*limit is 16"),
        ([1, -1, 2], rf"token -1;.*0\.\.{VOCAB - 1}"),
        ([1, VOCAB, 2], rf"token {VOCAB};.*0\.\.{VOCAB - 1}"),
    ],
    ids=["empty", "no room for an answer", "too long", "negative", "beyond the vocabulary"],
)
def test_a_prompt_that_cannot_be_answered_is_refused(prompt: list[int], said: str) -> None:
    with pytest.raises(UserError, match=said):
        generate(make_target(limit=16), None, prompt)


def test_a_prompt_may_have_the_first_and_last_token_id() -> None:
    decode.check_prompt([VOCAB - 1, 0], 3, VOCAB)


# ---- streaming and bookkeeping -------------------------------------------------------------------------


def test_streaming_yields_growing_prefixes_of_the_answer() -> None:
    target, drafter = pair()
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    with drafting(knows(answer(), {4, 15})):
        growing = stream(target, drafter, PROMPT, params)
        seen = [(list(g.tokens), g.finish_reason, len(g.steps)) for g in growing]
    for (shorter, reason, _), (longer, _, _) in itertools.pairwise(seen):
        assert reason is None and len(shorter) < len(longer) and longer[: len(shorter)] == shorter
    assert seen[-1][0] == list(answer()[:30]) and seen[-1][1] == "length"
    assert [steps for _, _, steps in seen] == list(range(len(seen))), "one yield for the prefill, one a step"


def test_time_is_counted_from_where_a_forward_pass_began(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    target, _ = pair()
    monkeypatch.setattr(decode, "time", SimpleNamespace(perf_counter=clock))
    monkeypatch.setattr(target, "forward", clock.costs(3, target.forward))
    found = generate(target, None, PROMPT, SamplingParams(max_tokens=5, ignore_eos=True))
    assert (found.prefill_s, found.decode_s) == (3, 3 * 4)


def test_acceptance_length_without_steps_is_none() -> None:
    generation = generate(pair()[0], None, PROMPT, SamplingParams(max_tokens=1))
    assert generation.steps == [] and generation.acceptance_length is None


# ---- sampling ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=lambda s: "-".join(f"{k}{v}" for k, v in s.items()))
def test_a_sampled_answer_is_the_same_with_a_drafter_and_without(sampling: dict[str, float]) -> None:
    target, drafter = pair()
    for seed in range(2):
        params = SamplingParams(max_tokens=24, seed=seed, ignore_eos=True, **sampling)
        plain = generate(target, None, PROMPT, params)
        assert generate(target, drafter, PROMPT, params).tokens == plain.tokens
        with drafting(knows(tuple(plain.tokens), wrong={2, 7, 8, 16})):
            helped = generate(target, drafter, PROMPT, params)
        assert helped.tokens == plain.tokens
        assert max(step.accepted for step in helped.steps) == 7
        check_books(helped)


def test_seeds_give_different_answers_and_no_seed_those_of_0() -> None:
    params = [SamplingParams(temperature=1.0, max_tokens=8, **seed) for seed in ({}, *({"seed": i} for i in range(4)))]
    unseeded, *seeded = (generate(*pair(), PROMPT, each).tokens for each in params)
    assert unseeded == seeded[0] and len(set(map(tuple, seeded))) == 4


@pytest.mark.slow
def test_sampled_tokens_follow_the_distribution_of_the_target() -> None:
    target, drafter = small_vocabulary_pair(8)
    sampling = {"temperature": 1.0}
    joint = exact_answers(target, **sampling)
    params = [SamplingParams(max_tokens=4, seed=seed, ignore_eos=True, **sampling) for seed in range(250)]
    with drafting(likely_draft(joint)):
        answers = [generate(target, drafter, SMALL_PROMPT, each) for each in params]
    check_answers(answers, joint, exact_answers(target, temperature=2.0))


# ---- sampled drafts ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_answers_with_sampled_drafts_follow_the_filtered_target() -> None:
    target, drafter = small_vocabulary_pair(8, dflash2_of_few)
    sampling = {"temperature": 0.7, "top_p": 0.85, "top_k": 6}
    params = [SamplingParams(max_tokens=4, seed=seed, ignore_eos=True, **sampling) for seed in range(250)]
    answers = [generate(target, drafter, SMALL_PROMPT, each, "probabilistic") for each in params]
    check_answers(answers, exact_answers(target, **sampling), exact_answers(target, temperature=1.4))


@pytest.mark.parametrize("sampling", SMALL_SAMPLINGS)
def test_drafts_sampled_from_the_target_are_all_accepted(sampling: dict[str, float]) -> None:
    """p / q is 1. A verifier without q accepts a draft with probability p alone, hardly one in two here."""
    target, drafter = small_vocabulary_pair(8)

    def of_the_target(*given: Any) -> SampledDraft:
        tokens, rows = list(growing.tokens), []
        for uniform in torch.rand(2, 1, dtype=torch.float64):
            logits = target.forward(torch.tensor([SMALL_PROMPT + tokens]), logits="last").logits[0]
            rows.append(filtered_probabilities(logits, **sampling))
            tokens.append(int(choose(rows[-1], uniform)))
        return SampledDraft(torch.tensor(tokens[-2:]), torch.arange(8).expand(2, -1), torch.cat(rows))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode, "propose_sampled", of_the_target)
        for seed in range(5):
            params = SamplingParams(max_tokens=11, seed=seed, ignore_eos=True, **sampling)
            answer = stream(target, drafter, SMALL_PROMPT, params, "probabilistic")
            growing = next(answer)
            *_, growing = answer
            assert [(step.drafted, step.accepted) for step in growing.steps] == [(2, 2)] * 3 + [(0, 0)]


def test_sampled_drafts_depend_on_seed_and_position() -> None:
    target, drafter = pair()
    again = {"temperature": 0.9, "top_k": 40, "max_tokens": 20}

    def answer(seed: int, method: Any = "probabilistic", helper: Drafter | None = drafter, **other: Any) -> Generation:
        return generate(target, helper, PROMPT, SamplingParams(seed=seed, **again | other), method)

    first = answer(3)
    check_books(first)
    left = 20 - 1
    for step in first.steps:
        assert step.drafted == min(7, left - 1), "the bonus token needs no draft"
        left -= len(step.tokens)
    assert (first.tokens, first.steps) == (answer(3).tokens, answer(3).steps)
    assert first.tokens != answer(4).tokens and first.steps != answer(3, "greedy").steps
    assert answer(3, helper=None).tokens == answer(3, "greedy").tokens, "without drafts there is one rule"
    ways = [answer(3, method, temperature=0.0) for method in ("greedy", "probabilistic")]
    assert ways[0].steps == ways[1].steps, "so there is at temperature 0"


def test_no_token_ends_an_answer_before_min_tokens(target: Target, drafter: Drafter) -> None:
    every = tuple(range(0, 256, 2))
    for least in (0, 1, 5, 20):
        params = SamplingParams(max_tokens=40, stop_token_ids=every, min_tokens=least)
        answer = generate(target, drafter, [1, 2, 3], params)
        assert answer.tokens == generate(target, None, [1, 2, 3], params).tokens
        *before, last = answer.tokens
        assert len(before) >= least and last in every and not {*before[:least]} & {*every}
    with pytest.raises(ValueError, match=r"min_tokens is 3; it must be in 0\.\.2"):
        SamplingParams(max_tokens=2, min_tokens=3)
    with pytest.raises(ValueError, match="min_tokens is set"):
        SamplingParams(min_tokens=3, grammar=Grammar("regex", "a+"))


# ---- draft trees ---------------------------------------------------------------------------------------


def check_trees_were_walked(generations: list[Generation]) -> None:
    accepted = [step.accepted for each in generations for step in each.steps]
    assert 0 in accepted and max(accepted) >= 3
    for each in generations:
        check_books(each)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "qwen3_moe"])
def test_greedy_answers_with_trees_are_those_of_hf_generate(kind: str) -> None:
    target, drafter = pair(kind)
    dice, found = torch.Generator().manual_seed(1), []
    for seed in range(2):
        prompt = torch.randint(250, (3 + 4 * seed,), generator=dice).tolist()
        expected = hf_greedy(target, prompt, 20)
        for nodes in (1, 6, 40):
            params = SamplingParams(max_tokens=20)
            with planting(expected, len(prompt), seed + nodes):
                found.append(generate(target, drafter, prompt, params, draft_tree=nodes))
            assert found[-1].tokens == expected
    check_trees_were_walked(found)


def test_greedy_answers_with_the_drafters_own_trees_are_those_without(target: Target) -> None:
    for drafter in (make_drafter(target), make_dflash2(target)):
        assert generate(
            target, drafter, PROMPT, SamplingParams(max_tokens=24, ignore_eos=True), draft_tree=20
        ).tokens == (list(answer()[:24]))


@pytest.mark.parametrize("make", [make_drafter, make_dflash2])
def test_the_tree_of_width_one_is_the_chain(target: Target, make: Callable[..., Drafter]) -> None:
    drafter = make(target)
    for seed in range(5):
        ids = torch.randint(250, (1, 9), generator=torch.Generator().manual_seed(seed))
        features = target.forward(ids[:, :8], taps=drafter.config.target_layer_ids).features
        with torch.inference_mode():
            given = target, drafter, drafter.context_kv(features, torch.arange(8)[None]), int(ids[0, 8]), 8
            tree = propose_tree(*given, nodes=7, width=1)
            assert tree.tokens.tolist() == propose(*given)
            assert tree.parents.tolist() == list(range(7)) and tree.depths.tolist() == list(range(1, 8))
            wide = propose_tree(*given, nodes=40)
            assert len(wide.tokens) == 40 and (wide.log_probs <= 0).all()


def test_the_probability_of_a_node_is_the_drafters_of_its_path(target: Target) -> None:
    hidden, logits = torch.randn(7, 32), 3 * torch.randn(7, VOCAB)
    for drafter in (make_drafter(target), make_dflash2(target)):
        with torch.inference_mode():
            candidates, log_probs = drafter.conditional(hidden, logits, anchor=5)
            unary, best = drafter.candidates(logits)
            first = logits.log_softmax(-1)
            selector = drafter.candidate_selector
            for slot, place in ((0, 3), (4, 2)):
                before = 5 if slot == 0 else int(candidates[slot - 1, place])
                if selector is None:
                    expected = first[slot, best[slot]]
                else:
                    given = hidden[None, slot, None], unary[None, slot, None], best[None, slot, None]
                    expected = selector(*given, torch.tensor([[before]]))[0][0, 0].log_softmax(-1)
                torch.testing.assert_close(log_probs[slot, place], expected)


def test_only_accepted_nodes_enter_the_draft_context() -> None:
    target, drafter = pair()
    with planting(answer()) as contexts:
        generation = generate(target, drafter, PROMPT, SamplingParams(max_tokens=30, ignore_eos=True), draft_tree=24)
    ids = torch.tensor([PROMPT + generation.tokens])
    for context in contexts:
        features = target.forward(ids[:, : context.length], taps=drafter.config.target_layer_ids).features
        with torch.inference_mode():
            fresh = drafter.context_kv(features, torch.arange(context.length)[None])
        assert torch.equal(context.positions, fresh.positions)
        for grown, whole in zip(context.keys + context.values, fresh.keys + fresh.values, strict=True):
            torch.testing.assert_close(grown, whole, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("full_layers", [0, 2], ids=["all", "some"])
def test_a_node_sees_as_far_as_its_layers_window(full_layers: int) -> None:
    target = make_target("qwen2", use_sliding_window=True, sliding_window=8, max_window_layers=full_layers)
    drafter = make_drafter(target)
    for prompt in (PROMPT, PROMPT[:3]):
        truth = hf_greedy(target, prompt, 30, eos=(VOCAB,))
        with planting(truth, len(prompt)):
            found = generate(target, drafter, prompt, SamplingParams(max_tokens=30, ignore_eos=True), draft_tree=24)
        assert found.tokens == truth
        check_trees_were_walked([found])


@pytest.mark.parametrize("index", [1, 2, 3, 5, 8, 13])
def test_stop_token_and_limit_end_an_answer_anywhere_in_a_tree(index: int) -> None:
    target, drafter = pair()
    truth = answer()
    end = truth.index(truth[index])
    for seed in range(2):
        with planting(truth, seed=seed):
            params = SamplingParams(max_tokens=40, stop_token_ids=(truth[index],))
            found = generate(target, drafter, PROMPT, params, draft_tree=30)
            assert (found.tokens, found.finish_reason) == (list(truth[: end + 1]), "stop")
            check_books(found)
            params = SamplingParams(max_tokens=index, ignore_eos=True)
            found = generate(target, drafter, PROMPT, params, draft_tree=30)
            assert (found.tokens, found.finish_reason) == (list(truth[:index]), "length")
            check_books(found)


@pytest.mark.parametrize(
    "sampling",
    [*SAMPLINGS, {"temperature": 0.9, "repetition_penalty": 1.3, "min_tokens": 9, "logprobs": 2}],
    ids=lambda s: "-".join(f"{k}{v}" for k, v in s.items()),
)
@pytest.mark.sampled
def test_a_sampled_answer_is_the_same_with_trees_and_without(sampling: dict[str, Any]) -> None:
    target, drafter = pair()
    found = []
    for seed in range(3):
        params = SamplingParams(max_tokens=24, seed=seed, **sampling)
        plain = generate(target, None, PROMPT, params)
        with planting(plain.tokens, seed=seed):
            found.append(generate(target, drafter, PROMPT, params, draft_tree=24))
        assert (found[-1].tokens, found[-1].finish_reason) == (plain.tokens, plain.finish_reason)
        ours, theirs = ([each.chosen for each in answer.logprobs] for answer in (found[-1], plain))
        assert ours == pytest.approx(theirs, abs=1e-4) and len(ours) == len(plain.tokens) * ("logprobs" in sampling)
    check_trees_were_walked(found)


@pytest.mark.slow
def test_tokens_sampled_along_trees_follow_the_target() -> None:
    target, drafter = small_vocabulary_pair(8)
    sampling = {"temperature": 1.0}
    params = [SamplingParams(max_tokens=4, seed=seed, ignore_eos=True, **sampling) for seed in range(250)]
    answers = [generate(target, drafter, SMALL_PROMPT, each, draft_tree=6) for each in params]
    check_answers(answers, exact_answers(target, **sampling), exact_answers(target, temperature=2.0))


def bloom() -> Target:
    """Its attention depends on the number of tokens between two, whatever positions it gets."""
    config = BloomConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        n_layer=3,
        n_head=4,
        max_position_embeddings=64,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=EOS,
    )
    return Target(AutoModelForCausalLM.from_config(config, dtype=torch.float32), name="tiny-bloom")


def test_chains_of_a_target_that_takes_no_tree_are_its_drafts() -> None:
    """Of a shorter chain as much is drafted as it has nodes."""
    for target in (make_target("qwen3_5"), bloom()):
        drafter, params = make_drafter(target, taps=1), SamplingParams(max_tokens=12, ignore_eos=True)
        drafted = generate(target, drafter, PROMPT, params)
        with planting(drafted.tokens):
            short = generate(target, drafter, PROMPT, params, draft_tree=3, draft_tree_width=1)
        whole = generate(target, drafter, PROMPT, params, draft_tree=40, draft_tree_width=1)
        assert whole.steps == drafted.steps and whole.tokens == short.tokens == drafted.tokens
        assert max(step.drafted for step in short.steps) == 3 and max(step.accepted for step in short.steps) > 0


def test_a_target_that_takes_no_tree_is_refused_in_one_line() -> None:
    target, drafter = bloom(), pair()[1]
    with pytest.raises(UserError, match=r"draft tree.*use chains") as caught:
        generate(target, drafter, PROMPT, draft_tree=8, draft_tree_width=2)
    assert "\n" not in str(caught.value)
    assert generate(target, None, PROMPT, SamplingParams(max_tokens=2), draft_tree=8).tokens, "nothing is drafted"


def test_draft_trees_refuse_sampled_drafts() -> None:
    with pytest.raises(UserError, match="draft_sample_method greedy"):
        generate(*pair(), PROMPT, SamplingParams(temperature=1.0), "probabilistic", draft_tree=8)


# ---- parts of a step -----------------------------------------------------------------------------------


def test_a_block_is_the_anchor_and_masks(target: Target, drafter: Drafter, monkeypatch: pytest.MonkeyPatch) -> None:
    features = target.forward(torch.tensor([[1, 2, 3]]), taps=drafter.config.target_layer_ids).features
    embed, blocks = target.embed, list[list[int]]()
    monkeypatch.setattr(target, "embed", lambda ids: blocks.extend(ids.tolist()) or embed(ids))
    with torch.inference_mode():
        propose(target, drafter, drafter.context_kv(features, torch.arange(3)[None]), 5, 3)
    assert blocks == [[5, *[MASK] * 7]]


def test_each_row_is_edited_by_the_tokens_before_it() -> None:
    """One row after another, one token after another."""
    params = SamplingParams(
        repetition_penalty=2.0, presence_penalty=0.3, frequency_penalty=0.2, logit_bias=((4, 0.5), (5, -0.5)),
        min_tokens=3, begin_suppress_tokens=(1, 2),
    )  # fmt: skip
    bias, stops, seen = dict(params.logit_bias), {0, 3, 9}, set()  # the vocabulary has no token 9
    for seed in range(60):
        dice = torch.Generator().manual_seed(seed)
        logits = torch.randn(4, 8, generator=dice)
        prompt, *parts = (torch.randint(8, (n,), generator=dice).tolist() for n in (3, seed % 3, 3))
        answer, draft = parts
        expected = []
        for i, row in enumerate(logits.tolist()):
            written = answer + draft[:i]
            for token, value in enumerate(row):
                if token in prompt + written:
                    value = value / 2 if value > 0 else value * 2
                value += bias.get(token, 0.0) - 0.3 * (token in written) - 0.2 * written.count(token)
                banned = (token in stops and len(written) < 3) or (token in (1, 2) and not written)
                row[token] = -math.inf if banned else value
            expected.append(row.index(max(row)))
        assert decode.choices(logits, prompt + answer, answer, draft, params, stops).tolist() == expected
        seen |= {*expected}
    assert seen == set(range(8))
