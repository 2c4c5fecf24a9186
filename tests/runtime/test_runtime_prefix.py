"""A turn of a conversation computes what the prefix cache lacks: its new part and at most one page."""

import random

import pytest
from conftest import LONG_RUN
from engines import alone, counted, knowing, make_engine, pair, prompts_of
from hypothesis import given, settings
from hypothesis import strategies as st
from table_device import SIZE

from dflash_toolkit import SamplingParams
from dflash_toolkit.runtime.pages import PagePool


@pytest.mark.parametrize("nodes", [0, 12])
@settings(max_examples=20 if LONG_RUN else 2, deadline=None)
@given(st.integers(0, 2**32))
def test_a_turn_computes_its_new_part_and_at_most_a_page(nodes: int, seed: int) -> None:
    """Blocks are accepted across pages; answers end at their limit, at a stop token, or when they are cancelled."""
    dice, (target, drafter) = random.Random(seed), pair()
    chunks = dice.choice([7, 16, 64])
    engine = make_engine(target, drafter, draft_tree=nodes, kv_cache_tokens=4000, max_num_batched_tokens=chunks)
    rows, page = counted(engine), engine.options.page_size
    talks: list[list[int]] = [[], []]
    for _ in range(8):
        number, new = dice.randrange(2), [dice.randrange(256) for _ in range(dice.randrange(1, 25))]
        prompt = talks[number] + new
        stops = tuple(range(0, 256, 9)) if dice.random() < 0.4 else ()
        params = SamplingParams(max_tokens=dice.randrange(1, 30), stop_token_ids=stops)
        text, every = alone(target, None, prompt, params).tokens, dice.randrange(2, 9)
        knowing(engine, {tuple(prompt): text}, lambda position, every=every: position % every == 0)
        rows.clear()
        request, most = engine.submit(prompt, params), dice.choice([3, 100])
        while not request.finished and len(request.tokens) < most:
            engine.step()
        engine.cancel(request)
        assert request.tokens == text[: len(request.tokens)]
        known = max(len(talks[number]) - page, 0)
        assert len(new) <= rows["target"] <= len(prompt) - known
        assert rows["drafter"] == rows["target"] == len(prompt) - request.cached_tokens
        talks[number] = prompt + request.tokens


def test_salts_separate_prefixes_and_change_no_answer() -> None:
    (prompt,), (target, drafter) = prompts_of(22), pair()
    engine, params = make_engine(target, drafter), SamplingParams(max_tokens=9)
    expected = alone(target, None, prompt, params).tokens
    found = []
    for salt in ("", "a", "b", "a", "", "b", "a" * 9):
        request = engine.submit(prompt, params, cache_salt=salt)
        while engine.step():
            pass
        assert request.tokens == expected
        found.append(request.cached_tokens)
    assert found == [0, 0, 0, 20, 20, 20, 0]


def test_pages_of_all_salts_are_evicted_in_one_order() -> None:
    pool, tokens = PagePool(7, SIZE), list(range(2 * SIZE))
    pages = {salt: pool.allocate(2) for salt in ("b", "", "a")}
    for salt, own in pages.items():
        pool.publish(tokens, own, salt)
        pool.release(own)
    for salt in ("b", "", "a"):
        for left in (1, 0):
            assert pool.allocate(1) == pages[salt][left : left + 1]
        assert pool.match(tokens, 2 * SIZE, salt) == []
        pool.check()
