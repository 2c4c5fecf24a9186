"""Turns of conversations, which extend, branch and are rendered differently, for targets with recurrent layers."""

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from conftest import LONG_RUN
from engines import alone, counted, knowing, make_engine, prompts_of
from faulty_device import FaultyDevice
from hypothesis import given, settings
from hypothesis import strategies as st
from recurrent_engines import pair
from table_device import BLOCK, SHAPES, SIZE, TableDevice, drain, failing, request_of, scheduled, truth

from dflash_toolkit import SamplingParams
from dflash_toolkit.runtime.pages import PagePool
from dflash_toolkit.runtime.recurrent import ANSWER_PAGES, PROMPT_PAGES, RecurrentStates
from dflash_toolkit.runtime.request import Request
from dflash_toolkit.runtime.scheduler import Scheduler

PAGE = 4
WAYS = [("qwen3_5", 0, 1), ("qwen3_5", 7, 1), ("qwen3_5", 15, 3), ("qwen3_5_moe", 0, 1), ("qwen3_5_moe", 15, 3)]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("kind", "nodes", "width"), WAYS)
@settings(max_examples=20 if LONG_RUN else 2, deadline=None)
@given(st.integers(0, 2**32))
def test_a_recurrent_turn_computes_its_new_part_and_few_pages(kind: str, nodes: int, width: int, seed: int) -> None:
    """At most ANSWER_PAGES + 1 pages are computed again; 320 tokens with pages of 64."""
    dice, (target, drafter) = random.Random(seed), pair(kind)
    options = {"max_num_batched_tokens": dice.choice([14, 32, 64]), "kv_cache_tokens": 4000, "prefix_states": 40}
    engine = make_engine(target, drafter, draft_tree=nodes, draft_tree_width=width, **options)
    rows, talks = counted(engine), [list[int](), list[int]()]
    for _ in range(8):
        number, new = dice.randrange(2), [dice.randrange(256) for _ in range(dice.randrange(1, 25))]
        prompt = talks[number] + new
        params = SamplingParams(max_tokens=dice.randrange(1, 40), ignore_eos=True)
        stops = tuple(range(0, 256, 9)) if dice.random() < 0.4 else ()
        params, every = replace(params, stop_token_ids=stops), dice.randrange(2, 9)
        text = alone(target, None, prompt, params).tokens
        knowing(engine, {tuple(prompt): text}, lambda position, every=every: position % every == 0)
        rows.clear()
        request, most = engine.submit(prompt, params), dice.choice([9, 100])
        while not request.finished and len(request.tokens) < most:
            engine.step()
        engine.cancel(request)
        assert request.tokens == text[: len(request.tokens)]
        assert request.cached_tokens >= len(talks[number]) - (ANSWER_PAGES + 1) * PAGE
        assert rows["drafter"] == rows["target"] == len(prompt) - request.cached_tokens
        talks[number] = prompt + request.tokens * (dice.random() < 0.7)  # without its answer, as for thoughts
    engine.pool.check()
    assert engine.pool.available == engine.pool.capacity


@pytest.mark.parametrize("device_type", [TableDevice, FaultyDevice])
@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.sampled
def test_random_conversations_find_only_states_of_their_text(depth: int, device_type: type[TableDevice]) -> None:
    """The device is a table. It may fail, before or after its work."""
    dice, hits = random.Random(depth), 0
    for seed in range(12 if LONG_RUN else 5):
        rows, spare = dice.randrange(1, 5), dice.choice([1, 3, 40])
        pool = PagePool(dice.choice([60, 400]), SIZE, range(1 + rows, 1 + rows + spare))
        device = device_type(depth, random.Random(seed))
        device.recurrent = True
        scheduler = scheduled(
            device, pool=pool, max_num_seqs=rows, max_num_batched_tokens=14, prefix_cache=True, recurrent=True
        )
        scheduler.choose_shape = lambda requests: dice.choice(SHAPES)
        talks: list[Request] = [request_of([i], 9) for i in range(3)]
        for request in talks:
            scheduler.add(request)
        for _ in range(400):
            for i, last in enumerate(talks):
                if last.finished:
                    text = last.prompt_ids + last.tokens
                    cut = dice.choice([len(text), len(text), len(last.prompt_ids), dice.randrange(1, len(text))])
                    prompt = text[: min(cut, 100)] + [dice.randrange(97) for _ in range(dice.randrange(1, 9))]
                    assert last.error is None and last.tokens == truth(last.prompt_ids, last.limit)
                    talks[i] = request_of(prompt, dice.randrange(1, 40))
                    scheduler.add(talks[i])
                    hits += last.cached_tokens > 0
            if dice.random() < 0.02:
                scheduler.cancel(talks[0])
                talks[0] = request_of([1, 2], 30)
                scheduler.add(talks[0])
            scheduler.advance()
            pool.check()
        drain(scheduler)
        assert not device.mistakes and pool.available == pool.capacity
        assert sorted([*pool._free_states, *pool._states]) == list(range(1, 1 + rows + spare))
    assert hits > 4 * (seed + 1)


def recurrent(device: TableDevice, pool: PagePool, *requests: Request, rows: int) -> Scheduler:
    device.recurrent = True
    return scheduled(device, *requests, pool=pool, block=BLOCK, max_num_seqs=rows, prefix_cache=True, recurrent=True)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("calls", [["read", "read"], ["copy_states"]])
def test_a_fault_drops_snapshots_of_states(calls: list[str], seed: int) -> None:
    """The results of a step are lost, or the copy itself fails, before its work."""
    device, pool, request = TableDevice(1, random.Random(seed)), PagePool(99, SIZE, [2, 3, 4]), request_of([1, 2], 20)
    scheduler = recurrent(device, pool, request, rows=1)
    while request.length < 8:  # the next block may reach 16 tokens
        scheduler.advance()
    failing(device, failures := [*calls])
    drain(scheduler)
    again = request_of([1, 2, *truth([1, 2], 20), 5], 9)
    scheduler.add(again)
    drain(scheduler)
    assert not failures and not device.mistakes and not again.error
    assert (request.tokens, again.tokens) == (truth([1, 2], 20), truth(again.prompt_ids, 9))
    assert sorted([*pool._free_states, *pool._states]) == [1, 2, 3, 4]


def test_snapshots_leave_a_slot_for_every_request() -> None:
    device, pool = TableDevice(1), PagePool(99, SIZE, [4])
    requests = [request_of([i, 2], 60) for i in range(2)]
    scheduler, late = recurrent(device, pool, *requests, rows=3), request_of([7, 7], 5)
    states, held, states_at_start = scheduler.table.states, list[int](), list[int]()
    real, assign = states.snapshot, states.assign

    def snapshot(running: Sequence[Request]) -> None:
        real(running)
        held.append(sum(request.snapshot is not None for request in running))
        if held[-1] and not max(held[:-1], default=0):
            scheduler.add(late)

    def assigned(request: Request, *more: int) -> None:
        assign(request, *more)
        states_at_start.append(request.state)

    states.snapshot, states.assign = snapshot, assigned  # type: ignore[method-assign]
    drain(scheduler)
    assert max(held) == 1 and len(states_at_start) == 3 and all(states_at_start)
    assert all(request.tokens == truth(request.prompt_ids, request.limit) for request in (*requests, late))


def test_states_are_kept_before_the_end_of_a_template() -> None:
    """The last tokens of a prompt, such as those that begin thoughts, are missing in the next prompt."""
    states = RecurrentStates(TableDevice(), PagePool(9, 64, [2]), 1, recurrent=True, prefix_cache=True)
    for tokens, kept in ((64 + 8, (64,)), (64 + 7, ()), (128 + 64, (128,)), (200, (192,))):
        request = request_of(list(range(tokens)), 5)
        states.assign(request, 0, 0, tokens)
        assert request.keep_states_at == kept
        states.release(request)


def test_states_within_long_prompts_use_free_slots_only() -> None:
    device, pool = TableDevice(0), PagePool(400, SIZE, [2, 3, 4])
    scheduler = recurrent(device, pool, rows=1)
    span = PROMPT_PAGES * SIZE
    prompt = [i % 97 for i in range(5 * span + 3)]
    for tail, cached in (([], 0), ([5], 5 * span), ([6], 5 * span)):
        request = request_of([*prompt, *tail], 2)
        scheduler.add(request)
        drain(scheduler)
        assert request.cached_tokens == cached
    ends = [node.key[1][-1] for node in pool._states.values()]
    assert len(ends) == 3 and prompt[span - 1] in ends, "the first stays longest, as others share it"
    other = request_of([*prompt[: span + 9], 0, 0], 2)
    scheduler.add(other)
    drain(scheduler)
    assert other.cached_tokens == span


def test_a_full_batch_keeps_the_ends_of_prompts_and_answers() -> None:
    """The next turn begins with either; the default number of states has room for both."""
    target, _ = pair()
    engine, params = make_engine(target, None, max_num_seqs=2), SamplingParams(max_tokens=30, ignore_eos=True)
    prompts = prompts_of(9, 13)
    answers = [got.tokens for got in engine.generate(prompts, params)]
    for told, cached in ((0, 8 + 12), (30, 32 + 32)):
        before = engine.stats.cached_prompt_tokens
        turns = [prompt + answer[:told] + [5, 6] for prompt, answer in zip(prompts, answers, strict=True)]
        engine.generate(turns, SamplingParams(max_tokens=1))
        assert engine.stats.cached_prompt_tokens - before == cached


@pytest.mark.parametrize("depth", [0, 1])
def test_the_last_token_of_an_answer_may_end_a_page_with_states(depth: int) -> None:
    device, pool, request = TableDevice(depth), PagePool(99, SIZE, [2, 3]), request_of([1, 2, 3], 14)
    device.recurrent = True
    scheduler = scheduled(device, request, pool=pool, max_num_seqs=1, prefix_cache=True, recurrent=True)
    drain(scheduler)
    again = request_of([1, 2, 3, *truth([1, 2, 3], 14), 5], 2)
    scheduler.add(again)
    drain(scheduler)
    assert again.cached_tokens == 16 == ANSWER_PAGES * SIZE and not device.mistakes


def test_a_second_turn_of_32000_tokens_computes_few_again() -> None:
    pool, first = PagePool(9000, SIZE, range(2, 40)), [i * i % 97 for i in range(28_800)]
    scheduler = scheduled(
        device := TableDevice(),
        pool=pool,
        max_num_seqs=1,
        max_num_batched_tokens=8192,
        prefix_cache=True,
        recurrent=True,
    )
    for prompt, tokens in ((first, 21), ([*first, *truth(first, 21), *range(3_200)], 1)):
        request = request_of(prompt, tokens)
        scheduler.add(request)
        drain(scheduler)
    assert len(first) + 21 - request.cached_tokens <= (ANSWER_PAGES + 1) * SIZE and not device.mistakes
