"""The engine's answers equal those of `decode.py`, in any batch."""

import math
import re
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import EOS, LONG_RUN, make_drafter, make_target
from engines import ROPES, SAMPLINGS, alone, check, check_drafts, knowing, make_engine, pair, prompts_of, same
from hypothesis import example, given, settings
from hypothesis import strategies as st
from small_vocabulary import hf_greedy
from torch import Tensor

from dflash_toolkit import SamplingParams, UserError, generate
from dflash_toolkit.runtime import SyntheticAcceptance
from dflash_toolkit.runtime.graphs import no_collection
from dflash_toolkit.runtime.prefill_job import PrefillJob
from dflash_toolkit.runtime.programs.prefill_pass import PrefillPass
from dflash_toolkit.runtime.runner import StepRunner
from dflash_toolkit.runtime.stack import Rows

# ---- the same as decode.py ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "mistral", "qwen3_moe", "Gemma 2", "Granite"])
def test_ragged_batches_equal_generate_row_by_row(kind: str) -> None:
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (19, 1, 12, 9, 16, 2)]
    engine = make_engine(*pair(kind))
    check(engine, pair(kind), prompts_of(1, 5, 17, 33, 40, 8), *params)
    engine.pool.check()
    assert engine.pool.available == engine.pool.capacity
    assert engine.stats.requests == 6 and engine.stats.generated_tokens == sum(p.max_tokens for p in params)


@pytest.mark.parametrize(("window", "causal"), [(2, False), (12, None), (12, True), (200, False)])
def test_drafters_with_windows_draft_as_generate_does(window: int, causal: bool | None) -> None:
    """Prompts and answers are longer than most windows."""
    target, _ = pair()
    kinds = (*["sliding_attention"] * 4, "full_attention")
    drafter = make_drafter(target, layers=5, layer_types=kinds, sliding_window=window, is_causal=causal)
    params = SamplingParams(max_tokens=16)
    check_drafts(make_engine(target, drafter), (target, drafter), prompts_of(1, 17, 40), params)


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
def test_greedy_answers_are_those_of_hugging_face(kind: str) -> None:
    target, drafter = pair(kind)
    prompts = prompts_of(3, 21, 9)
    answers = make_engine(target, drafter).generate(prompts, SamplingParams(max_tokens=30))
    assert [got.tokens for got in answers] == [hf_greedy(target, prompt, 30) for prompt in prompts]


@pytest.mark.parametrize("params", SAMPLINGS, ids=["filters", "hot", "penalties", "bias", "logprobs", "least"])
@pytest.mark.sampled
def test_sampled_answers_equal_generate_alone_and_in_batches(params: SamplingParams) -> None:
    first, *rest = prompts_of(4, 19, 7)
    prompts, all_params = [first, first, *rest], [SamplingParams(max_tokens=24), *[params] * 3]
    for prompt, each, got in zip(prompts, all_params, make_engine(*pair()).generate(prompts, all_params), strict=True):
        expected = alone(*pair(), prompt, each)
        assert same(got, expected)
        assert [t.chosen for t in got.logprobs] == pytest.approx([t.chosen for t in expected.logprobs], abs=1e-4)
        assert [[i for i, _ in t.best] for t in got.logprobs] == [[i for i, _ in t.best] for t in expected.logprobs]


ACCEPTED = [SamplingParams(max_tokens=24), *SAMPLINGS[:4], SAMPLINGS[5]]


@pytest.mark.parametrize(
    ("every", "kind", "params"),
    [*((3, "llama", each) for each in ACCEPTED), (5, "qwen3_moe", ACCEPTED[1]), (1000, "llama", ACCEPTED[3])],
)  # fmt: skip
@pytest.mark.sampled
def test_accepted_drafts_change_the_steps_and_nothing_else(params: SamplingParams, every: int, kind: str) -> None:
    target, drafter = pair(kind)
    prompts = prompts_of(4, 19, 7, 26)
    plain = make_engine(target, None).generate(prompts, params)
    engine = make_engine(target, drafter)
    answers = {tuple(p): g.tokens for p, g in zip(prompts, plain, strict=True)}
    knowing(engine, answers, lambda position: position % every == 0)
    drafted = engine.generate(prompts, params)
    for got, expected in zip(drafted, plain, strict=True):
        assert (got.tokens, got.finish_reason) == (expected.tokens, expected.finish_reason)
        assert len(got.logprobs) == len(expected.logprobs)
    assert sum(len(g.steps) for g in drafted) < sum(len(g.steps) for g in plain) / (1.5 if every == 3 else 2)
    steps, stats = [step for g in drafted for step in g.steps], engine.stats
    assert stats.accepted == sum(step.accepted for step in steps)
    assert stats.drafted == sum(step.drafted for step in steps) and stats.steps == len(steps)
    assert stats.outcomes == Counter((step.drafted, step.accepted) for step in steps)


@pytest.mark.parametrize("index", range(1, 10))  # a whole block and its borders
def test_a_block_ends_an_answer_where_plain_decoding_does(index: int) -> None:
    target, drafter = pair()
    (prompt,) = prompts_of(9)
    text = generate(target, None, prompt, SamplingParams(max_tokens=20)).tokens
    params = SamplingParams(max_tokens=20, stop_token_ids=(text[index],))
    expected = generate(target, None, prompt, params)
    for block in (2, 5, 8):
        engine = make_engine(target, drafter, num_speculative_tokens=block - 1)
        knowing(engine, {tuple(prompt): text}, lambda position: False)
        got = engine.generate([prompt, prompt], [params, SamplingParams(max_tokens=index)])
        assert got[0].tokens == expected.tokens and got[0].finish_reason == "stop"
        assert got[1].tokens == text[:index] and (got[1].finish_reason == "length" or text[index - 1] == EOS)
        engine.pool.check()


@pytest.mark.parametrize("room", [1, 2, 7, 8, 9])
def test_an_answer_ends_exactly_at_the_context_limit(room: int) -> None:
    models, params, prompts = pair(limit=64), SamplingParams(ignore_eos=True), prompts_of(64 - room) * 2
    check(make_engine(*models, max_num_seqs=2), models, prompts, params)
    assert len(generate(*models, prompts[0], params).tokens) == room


@pytest.mark.parametrize("kind", sorted(ROPES.keys() - {"default"}))
def test_scaled_rope_is_that_of_hugging_face(kind: str) -> None:
    rope = {"rope_type": kind, "rope_theta": 1e4, "original_max_position_embeddings": 32}
    target = make_target(rope_parameters=rope | ROPES[kind])
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    check(make_engine(target, None), (target, None), prompts_of(50), params)


@pytest.mark.parametrize("scale", [1.0, 6.0])
def test_biased_and_scaled_drafters_draft_as_the_reference(scale: float) -> None:
    target = make_target()
    drafter = make_drafter(target, attention_bias=True, input_embedding_scale=scale)
    for name, parameter in drafter.named_parameters():
        if name.endswith("bias"):
            parameter.data.normal_(std=0.5)
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    for prompt in prompts_of(9, 14, seed=7):
        check(make_engine(target, drafter), (target, drafter), [prompt], params)


# ---- pages -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
def test_a_prefix_hit_brings_target_and_draft_pages(kind: str) -> None:
    (prefix, *tails) = prompts_of(24, 5, 9, 1)
    engine, params = make_engine(*pair(kind)), SamplingParams(max_tokens=12)
    for tail in tails:
        check(engine, pair(kind), [prefix + tail], params)  # steps too: the drafter sees the same
    assert engine.stats.cached_prompt_tokens == 2 * 24
    check(engine, pair(kind), [prefix], params)
    assert engine.stats.cached_prompt_tokens == 2 * 24 + 20, "the last token must be computed, so its page is not taken"


def test_an_answer_is_part_of_the_prefix_of_the_next_turn() -> None:
    (prompt, more), engine = prompts_of(10, 6), make_engine(*pair())
    first = engine.generate([prompt], SamplingParams(max_tokens=15, ignore_eos=True))[0]
    check(engine, pair(), [prompt + first.tokens + more], SamplingParams(max_tokens=15))
    assert engine.stats.cached_prompt_tokens == 24  # 24 tokens were written, in pages of 4


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
def test_requests_preempted_for_pages_lose_no_token(kind: str) -> None:
    target, drafter = pair(kind)
    prompts = prompts_of(30, 25, 40, 12, 33)
    params = [SamplingParams(max_tokens=24, ignore_eos=True, temperature=0.7 * (i % 2), seed=i) for i in range(5)]
    engine = make_engine(target, drafter, kv_cache_tokens=140)
    got = engine.generate(prompts, params)
    assert engine.stats.preemptions > 0
    for prompt, each, answer in zip(prompts, params, got, strict=True):
        assert answer.tokens == generate(target, None, prompt, each).tokens
    engine.pool.check()


@settings(max_examples=20 if LONG_RUN else 4, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 25), st.integers(0, 12)), min_size=1, max_size=7),
    st.integers(1, 4),
    st.sampled_from([120, 300, 1200]),
    st.sets(st.integers(0, 6)),
)
@example([(20, 25, 0), (30, 25, 0), (9, 25, 0), (14, 25, 0)], 2, 1200, {0, 3})  # a running one and a waiting one
@pytest.mark.slow
def test_random_arrivals_and_cancels_change_no_answer(
    arrivals: Sequence[tuple[int, int, int]], max_num_seqs: int, cache_tokens: int, cancelled: set[int]
) -> None:
    target, drafter = pair()
    engine = make_engine(target, drafter, max_num_seqs=max_num_seqs, kv_cache_tokens=cache_tokens)
    prompts = prompts_of(*(length for length, _, _ in arrivals), seed=7)
    params = [SamplingParams(max_tokens=count, ignore_eos=True) for _, count, _ in arrivals]
    requests = {}
    for turn in range(2000):
        for i, (_, _, when) in enumerate(arrivals):
            if when == turn:
                requests[i] = engine.submit(prompts[i], params[i])
            if i in cancelled and when + 3 <= turn < when + 5:  # the second time changes nothing
                engine.cancel(requests[i])
        if not engine.step() and turn > 12:
            break
    for i, prompt in enumerate(prompts):
        got, expected = requests[i].tokens, generate(target, None, prompt, params[i]).tokens
        assert got == expected[: len(got)] and (len(got) < len(expected)) == requests[i].cancelled
    engine.pool.check()
    assert engine.pool.available == engine.pool.capacity


# ---- the rest ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("synthetic", "expected"), [({"rate": 0.8}, (1 - 0.8**8) / 0.2), ({"mean_length": 3.4}, 3.4), ({"rate": 0.0}, 1.0)]
)
@pytest.mark.slow
def test_synthetic_acceptance_length_matches_its_option(synthetic: dict[str, float], expected: float) -> None:
    engine = make_engine(*pair(), synthetic=SyntheticAcceptance(**synthetic), kv_cache_tokens=2000)
    tokens = 200 if expected > 1 else 40  # fewer suffice without randomness
    answers = engine.generate(prompts_of(*[5] * 8), SamplingParams(max_tokens=tokens, ignore_eos=True))
    length = sum(len(g.tokens) - 1 for g in answers) / sum(len(g.steps) for g in answers)
    assert length == pytest.approx(expected, rel=0.08)


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], {}, "the prompt is empty"),
        ([1] * 512, {}, "the prompt has 512 tokens; the context limit is 512"),
        ([1, 300], {}, r"the prompt holds token 300; the target's embedding has rows 0\.\.299"),
        ([1], {"logit_bias": ((300, 1.0),)}, "logit_bias names token 300"),
    ],
)
def test_requests_that_cannot_be_served_are_refused(prompt: list[int], params: dict[str, Any], message: str) -> None:
    engine = make_engine(*pair())
    with pytest.raises(UserError, match=message):
        engine.submit(prompt, SamplingParams(**params))
    assert engine.scheduler.idle


def test_a_context_larger_than_the_cache_is_refused_or_cut(
    caplog: pytest.LogCaptureFixture,
) -> None:
    models = pair()
    for tokens, limit, line in (
        (100, 93, r"kv_cache_tokens is 100 and a request of 93 tokens \(max_model_len\) needs 101 .*; raise "
         "kv_cache_tokens, or lower max_model_len to 92$"),
        (8, None, "kv_cache_tokens is 8 and a request of 2 tokens .* needs 10 .*; raise kv_cache_tokens$"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=line):
            make_engine(*models, kv_cache_tokens=tokens, max_model_len=limit)
    engine = make_engine(*models, kv_cache_tokens=97)
    assert engine.context_limit == engine.capacity.context_limit == 92
    assert re.search("92 tokens.*kv_cache_tokens is 97", caplog.text)
    (answer,) = engine.generate([[1] * 40], SamplingParams(ignore_eos=True))
    assert len(answer.tokens) == 52, "and such a one is served"
    caplog.clear()
    make_engine(*models), make_engine(*models, kv_cache_tokens=100, max_model_len=92)
    assert not caplog.records


def test_a_refused_prompt_queues_nothing() -> None:
    engine = make_engine(make_target(), None)
    with pytest.raises(UserError, match="token 999"):
        engine.generate([[1], [2], [999]], SamplingParams(max_tokens=3))
    with pytest.raises(ValueError, match="shorter"):
        engine.generate([[1], [2]], [SamplingParams(max_tokens=3)])
    assert engine.scheduler.idle and engine.pool.available == engine.pool.capacity


def test_an_interrupted_batch_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(make_target(), None)
    real, turns = engine.step, iter(range(3))
    monkeypatch.setattr(engine, "step", lambda: real() if next(turns, None) is not None else _interrupt())
    with pytest.raises(KeyboardInterrupt):
        engine.generate([[1], [2]], SamplingParams(max_tokens=50, ignore_eos=True))
    assert engine.scheduler.idle and engine.pool.available == engine.pool.capacity


def _interrupt() -> bool:
    raise KeyboardInterrupt


def test_padding_changes_nothing_that_a_prefill_writes() -> None:
    """Pages hold NaN, which earlier requests may leave."""
    target, drafter = pair("qwen3")
    ids, more = prompts_of(21, 6, seed=9)
    pages = [7, 3, 9, 5, 8, 6, 2]

    def caches(run: Callable[[Any, list[int], int], Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        runner = make_engine(target, drafter).runner
        both = [runner.verifier.stack.cache, runner.proposer.stack.cache]
        for kept in both:
            kept.fill_(math.nan)
        hidden = [run(runner, ids, 0), run(runner, more, len(ids))]
        page = torch.arange(both[0].shape[2]) // runner.page_size
        return hidden, [cache[:, :, page > 0] for cache in both]  # padding may go into the null block

    def unpadded(runner: Any, ids: list[int], start: int) -> Tensor:
        runner.start_prefill([PrefillJob(ids, start, pages)]).run()
        return runner.prefills.last_hidden

    def padded(runner: Any, ids: list[int], start: int) -> Tensor:
        runner.prefills.place(PrefillJob(ids, start, pages))
        return runner.prefills.padded(64)

    (one, kept), (other, written) = caches(unpadded), caches(padded)
    torch.testing.assert_close([one, kept], [other, written], rtol=1e-4, atol=1e-5, equal_nan=True)
    assert all(cache.isfinite().any() for cache in kept)


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe", "qwen3_next"])
def test_batched_prefill_writes_the_same_as_single_prefills(kind: str) -> None:
    """Pages hold NaN; one prompt continues an earlier chunk; each leaves the state of its last token."""
    target, drafter = pair(kind)
    prompts = prompts_of(21, 6, 13, seed=9)
    pages, states = [[7, 3, 9, 5, 8, 6, 2], [10, 11, 12], [13, 14, 15, 16]], [1, 3, 2]
    begun = 8  # tokens of the first prompt that are there

    def caches(run: Callable[[Any, list[PrefillJob]], Tensor]) -> tuple[Tensor, list[Tensor]]:
        runner = make_engine(target, drafter, max_num_seqs=4).runner
        both = [runner.verifier.stack.cache, runner.proposer.stack.cache]
        for kept in (*both, *(part for memory in runner._memories for part in (memory.state, memory.window))):
            kept.fill_(math.nan)
        runner.start_prefill([PrefillJob(prompts[0][:begun], 0, pages[0], states[0])]).run()
        starts = [begun, 0, 0]
        each = zip(prompts, starts, pages, states, strict=True)
        hidden = run(runner, [PrefillJob(prompt[start:], start, *at) for prompt, start, *at in each])
        page = torch.arange(both[0].shape[2]) // runner.page_size
        found = [cache[:, :, page > 0] for cache in both]  # padding may go into the null block
        return hidden, found + [part[1:] for memory in runner._memories for part in (memory.state, memory.window)]

    def each(runner: Any, chunks: list[PrefillJob]) -> Tensor:
        found = []
        for chunk in chunks:
            runner.start_prefill([chunk]).run()
            found.append(runner.prefills.last_hidden)
        return torch.cat(found)

    def together(runner: Any, chunks: list[PrefillJob]) -> Tensor:
        runner.start_prefill(chunks).run()
        return runner.prefills.last_hidden[: len(chunks)]

    def packed(runner: Any, chunks: list[PrefillJob]) -> Tensor:
        runner.prefills.packed(chunks).run()
        return runner.prefills.last_hidden

    one = caches(each)
    for batched in (together, packed)[: 1 if kind == "qwen3_next" else 2]:
        torch.testing.assert_close(caches(batched), one, rtol=1e-3, atol=1e-4, equal_nan=True)
    assert one[0].isfinite().all() and all(cache.isfinite().any() for cache in one[1])


@pytest.mark.parametrize("tapped", [False, True])
def test_the_last_layer_computes_the_last_row_of_a_chunk(tapped: bool) -> None:
    """All its rows if its output is a feature of the drafter; the state of the last row is the same."""
    runner = make_engine(*pair("qwen3"), max_num_seqs=4).runner
    verifier, ids = runner.verifier, prompts_of(21)[0]
    last, rows = len(runner.target.spec.layers) - 1, list[int]()
    verifier._taps = (last,) if tapped else (0,)
    place = Rows(torch.zeros(1).int(), torch.arange(1, 7)[None].int(), runner.page_size)
    everything, features = verifier.forward(torch.tensor(ids), place)
    finish = verifier.stack._finish
    verifier.stack._finish = lambda i, x, *rest: (i != last or rows.append(len(x)), finish(i, x, *rest))[1]
    found, other = verifier.forward(torch.tensor(ids), replace(place, wanted=torch.tensor([len(ids) - 1])))
    assert rows == ([21, 1] if tapped else [1])
    torch.testing.assert_close([found, other], [everything[-1:], features], rtol=1e-4, atol=1e-5)


def in_slices(runner: StepRunner) -> None:
    """Makes every slice of a prompt longer than a decoding step."""
    runner.pace.rate, runner.pace.step_s = 1.0, 1e-9


@pytest.mark.parametrize("packs", [False, True])
def test_slices_of_a_pass_have_the_bits_of_a_whole(packs: bool) -> None:
    """Other passes run between two slices."""
    target, drafter = pair("qwen3")
    prompts = prompts_of(21, 17, 13, seed=9) if packs else prompts_of(40, seed=9)
    jobs = [PrefillJob(prompt, 0, range(1 + 12 * i, 13 + 12 * i), 1 + i) for i, prompt in enumerate(prompts)]
    found = []
    for sliced in (False, True):
        runner = make_engine(target, drafter, max_num_seqs=4).runner
        assert runner.proposer is not None
        work = runner.prefills.packed(jobs) if packs else runner.prefills.unpadded(jobs[0])
        slices = 0
        if sliced:
            in_slices(runner)
        while not work.done:
            if sliced:
                runner.start_prefill([PrefillJob(prompts_of(9)[0], 0, range(100, 103))]).run()
            assert work.run(0.0 if sliced else math.inf) > 0 or not sliced
            slices += 1
        assert slices == (1 + 2 * len(runner.target.spec.layers) if sliced else 1)
        pages = slice(runner.page_size, 40 * runner.page_size)
        caches = [stack.cache[:, :, pages] for stack in (runner.verifier.stack, runner.proposer.stack)]
        found.append([runner.prefills.last_hidden, *caches])
    torch.testing.assert_close(*found, rtol=0, atol=0)


def test_a_dropped_chunk_writes_nothing_more() -> None:
    """Its pages belong to another request; the other chunks of its pass do not change."""
    prompts = prompts_of(21, 17, 13, seed=9)
    jobs = [PrefillJob(prompt, 0, range(1 + 12 * i, 13 + 12 * i)) for i, prompt in enumerate(prompts)]
    found = []
    for drops in (False, True):
        runner = make_engine(*pair("qwen3"), max_num_seqs=4).runner
        in_slices(runner)
        caches = [runner.verifier.stack.cache.unflatten(2, (-1, 4)), runner.proposer.stack.cache.unflatten(2, (-1, 4))]
        work = runner.prefills.packed(jobs)
        work.run(0.0)
        if drops:
            work.drop(1)
            for cache in caches:
                cache[:, :, 13:25] = 7.0
        work.run()
        if drops:
            assert all((cache[:, :, 13:25] == 7.0).all() for cache in caches)
        kept = [cache[:, :, pages] for cache in caches for pages in (slice(1, 13), slice(25, 37))]
        found.append([runner.prefills.last_hidden[[0, 2]], *kept])
    torch.testing.assert_close(*found, rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_next"])
def test_answers_do_not_depend_on_slices_of_prompts(kind: str) -> None:
    """A prompt takes several turns, in which other requests decode, end and are cancelled."""
    target, drafter = pair(kind)
    prompts, params = prompts_of(40, 9, 70, 25, 33, seed=3), SamplingParams(max_tokens=20, ignore_eos=True)
    engine = make_engine(target, drafter, max_num_seqs=4, max_num_batched_tokens=64)
    in_slices(engine.runner)
    first = engine.submit(prompts[0], params)
    while len(first.tokens) < 3:
        engine.step()
    requests = [engine.submit(prompt, params) for prompt in prompts[1:]]
    steps = 0
    while not requests[1].tokens:
        engine.step()
        steps += 1
        if steps == 2:
            engine.cancel(requests[0])
    assert steps > 2 * len(engine.runner.target.spec.layers)
    while not all(request.finished for request in requests[1:]):
        engine.step()
    for prompt, request in zip(prompts, (first, None, *requests[1:]), strict=True):
        if request is not None:
            assert request.tokens == alone(target, None, prompt, params).tokens


def test_chunks_are_not_padded_beyond_the_context() -> None:
    target, drafter = pair("qwen3")
    engine = make_engine(target, drafter, max_num_seqs=12, max_model_len=128)
    runner = engine.runner
    prompts = prompts_of(120, 11, 12, seed=4)
    pages = [list(range(1 + 40 * i, 1 + 40 * i + runner.pages_per_request)) for i in range(3)]
    alone, length = list[Tensor](), 116
    for prompt, at in zip(prompts, pages, strict=True):
        for start in range(0, len(prompt), length):
            runner.start_prefill([PrefillJob(prompt[start : start + length], start, at)]).run()
        assert runner.prefills.last_hidden is not None
        alone.append(runner.prefills.last_hidden.clone())
    assert length + 64 > runner.reach
    chunks = [
        PrefillJob(prompts[0][length:], length, pages[0]),
        *(PrefillJob(p, 0, at) for p, at in zip(prompts[1:], pages[1:], strict=True)),
    ]
    runner.start_prefill(chunks).run()
    assert runner.prefills.last_hidden is not None
    torch.testing.assert_close(runner.prefills.last_hidden, torch.cat(alone))


def test_many_short_prompts_at_once_are_answered_as_each_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    target, drafter = pair("qwen3")
    passes = list[int]()
    real = StepRunner.start_prefill

    def counted(runner: StepRunner, chunks: Sequence[PrefillJob]) -> PrefillPass:
        passes.append(len(chunks))
        return real(runner, chunks)

    monkeypatch.setattr(StepRunner, "start_prefill", counted)
    prompts, short = prompts_of(*range(3, 27), seed=5), SamplingParams(max_tokens=9, ignore_eos=True)
    engine = make_engine(target, drafter, max_num_seqs=12, max_num_batched_tokens=128)
    assert [got.tokens for got in engine.generate(prompts, short)] == [
        make_engine(target, None).generate([prompt], short)[0].tokens for prompt in prompts
    ]
    assert len(passes) > 2 and max(passes) > 3


@pytest.mark.parametrize("drafted", [7, None])
def test_an_unused_engine_is_freed_at_once(drafted: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its memory is free at once: otherwise a second engine would fail until the first is collected."""
    runners: weakref.WeakSet[StepRunner] = weakref.WeakSet()
    init = StepRunner.__init__

    def noted(self: StepRunner, *args: Any, **named: Any) -> None:
        runners.add(self)
        init(self, *args, **named)

    monkeypatch.setattr(StepRunner, "__init__", noted)
    models = pair()
    with no_collection():
        engine = make_engine(*models, num_speculative_tokens=drafted, prefix_cache=True)
        assert list(runners) == [engine.runner], "the one that measures what passes take is gone"
        engine.generate(prompts_of(4, 9), SamplingParams(max_tokens=9))
        left = weakref.ref(engine)
        del engine
        assert left() is None and not runners
