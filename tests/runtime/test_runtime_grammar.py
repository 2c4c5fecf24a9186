"""Grammars in the engine: answers equal those of `decode.py`, in any batch."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from conftest import EOS, LONG_RUN
from engines import check, knowing, make_engine, pair, prompts_of, same
from grammars import CASES, NO_SPACE, WAYS, params_of
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_toolkit import SamplingParams, UserError, generate
from dflash_toolkit.runtime import Engine, SyntheticAcceptance
from dflash_toolkit.runtime.programs.context import Part
from dflash_toolkit.runtime.sampler import Mode
from dflash_toolkit.sampling import Grammar, GrammarError

DEAD_END = Grammar("grammar", 'root ::= [a-z]{3} y\ny ::= y "d"')
# all ways to choose, with a grammar and without
MIXED = [
    *(params_of(grammar, **way) for (grammar, _), way in zip(CASES.values(), itertools.cycle(WAYS))),
    SamplingParams(max_tokens=18),
    SamplingParams(max_tokens=18, temperature=1.0, seed=4),
    SamplingParams(max_tokens=18, presence_penalty=0.4, logprobs=2),
    SamplingParams(grammar=CASES["regex"][0], max_tokens=18),
    SamplingParams(grammar=CASES["choice"][0], max_tokens=5, logprobs=1, temperature=1.2, seed=9),
]


def run_late(engine: Engine) -> Engine:
    """Works as on a GPU, where a step is launched before the previous results are read."""
    engine.runner.depth = 1
    return engine


@pytest.mark.parametrize(("drafts", "late"), [(False, False), (True, True)])
def test_mixed_batch_equals_generate_row_by_row(drafts: bool, late: bool) -> None:
    target, drafter = pair()
    models = target, drafter if drafts else None
    engine = make_engine(*models, max_num_seqs=len(MIXED))
    check(run_late(engine) if late else engine, models, prompts_of(*range(3, 3 + len(MIXED))), *MIXED)
    engine.pool.check()


@pytest.mark.parametrize("every", [2, 1000])
def test_accepted_drafts_change_the_steps_and_nothing_else(every: int) -> None:
    target, drafter = pair()
    params = [replace(params, logprobs=None) for params in MIXED]
    prompts = prompts_of(*range(3, 3 + len(params)))
    plain = make_engine(target, None, max_num_seqs=4).generate(prompts, params)
    engine = make_engine(target, drafter, max_num_seqs=4)
    knowing(engine, {tuple(p): g.tokens for p, g in zip(prompts, plain, strict=True)}, lambda at: at % every == 0)
    drafted = engine.generate(prompts, params)
    assert [(g.tokens, g.finish_reason) for g in drafted] == [(g.tokens, g.finish_reason) for g in plain]
    assert sum(len(g.steps) for g in drafted) < sum(len(g.steps) for g in plain) / (1.2 if every == 2 else 2)
    assert engine.stats.accepted == sum(step.accepted for g in drafted for step in g.steps)
    assert engine.stats.drafted == sum(step.drafted for g in drafted for step in g.steps)


@settings(max_examples=20 if LONG_RUN else 4, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(0, len(MIXED) - 1), st.integers(0, 9)), min_size=1, max_size=7),
    st.integers(1, 4),
    st.sampled_from([150, 300, 1200]),
    st.booleans(),
)
@pytest.mark.slow
def test_random_arrivals_do_not_mix_up_answers(
    arrivals: Sequence[tuple[int, int, int]], max_num_seqs: int, cache_tokens: int, late: bool
) -> None:
    target, drafter = pair()
    engine = make_engine(target, drafter, max_num_seqs=max_num_seqs, kv_cache_tokens=cache_tokens)
    if late:
        run_late(engine)
    prompts = prompts_of(*(length for length, _, _ in arrivals), seed=7)
    pending = [(turn, prompt, replace(MIXED[which], max_tokens=24))
               for prompt, (_, which, turn) in zip(prompts, arrivals, strict=True)]  # fmt: skip
    requests = []
    for turn in range(2000):
        for when, prompt, params in pending:
            if when == turn:
                requests.append((engine.submit(prompt, params), prompt, params))
        if not engine.step() and turn > 9:
            break
    assert len(requests) == len(arrivals)
    for request, prompt, params in requests:
        # a draw on the border between two tokens falls to either side: blocks of other lengths round otherwise
        assert any(request.tokens == generate(target, drafts, prompt, params).tokens for drafts in (None, drafter))
    engine.pool.check()


def test_a_preempted_answer_continues_in_its_grammar() -> None:
    target, drafter = pair()
    params = [SamplingParams(grammar=Grammar("regex", f"[{c}]{{40}}"), temperature=1.0, seed=i, max_tokens=60)
              for i, c in enumerate(("a-f", "0-9", "x-z", "a-z"))]  # fmt: skip
    prompts = prompts_of(30, 25, 40, 12)
    engine = make_engine(target, drafter, kv_cache_tokens=140)
    answers = engine.generate(prompts, params)
    assert engine.stats.preemptions > 0
    for prompt, each, answer in zip(prompts, params, answers, strict=True):
        assert answer.tokens == generate(target, None, prompt, each).tokens and answer.tokens[-1] == EOS


def test_each_answer_of_a_prompt_has_its_own_matcher() -> None:
    target, drafter = pair()
    engine, params = make_engine(target, drafter), SamplingParams(grammar=CASES["regex"][0], temperature=1.5, seed=0)
    first = engine.request([1, 2, 3], params)
    requests = [first, *(first.with_seed(seed) for seed in (1, 2))]
    for request in requests:
        engine.scheduler.add(request)
    while engine.step():
        pass
    answers = [request.tokens for request in requests]
    assert answers == [generate(target, None, [1, 2, 3], replace(params, seed=seed)).tokens for seed in range(3)]
    assert len({tuple(answer) for answer in answers}) == 3


@pytest.mark.parametrize("late", [False, True])
def test_a_dead_end_of_a_grammar_ends_one_request(late: bool) -> None:
    target, drafter = pair()
    engine = make_engine(target, drafter)
    if late:
        run_late(engine)
    prompts, plain = prompts_of(5, 6, 7), SamplingParams(max_tokens=20)
    requests = [
        engine.submit(p, s) for p, s in zip(prompts, (plain, SamplingParams(grammar=DEAD_END), MIXED[0]), strict=True)
    ]
    while engine.step():
        pass
    assert isinstance(requests[1].error, GrammarError) and requests[1].finished and len(requests[1].tokens) == 3
    for i, params in ((0, plain), (2, MIXED[0])):
        assert same(requests[i].generation, generate(target, drafter, prompts[i], params))
    assert engine.pool.available == engine.pool.capacity
    with pytest.raises(GrammarError, match="allows no token"):
        engine.generate(prompts[:1], SamplingParams(grammar=DEAD_END))


def parts_of(engine: Engine, params: list[SamplingParams], monkeypatch: pytest.MonkeyPatch) -> set[tuple[str, Mode]]:
    ran: set[tuple[str, Mode]] = set()
    real = engine.runner.blocks.run

    def run(part: Part) -> Any:
        ran.add((part.kind, part.mode))
        return real(part)

    monkeypatch.setattr(engine.runner.blocks, "run", run)
    engine.generate(prompts_of(*range(4, 4 + len(params))), params)
    return ran


def test_a_batch_without_a_grammar_runs_no_masked_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, sampled = SamplingParams(max_tokens=5), SamplingParams(max_tokens=5, temperature=1.0)
    assert parts_of(make_engine(*pair()), [plain] * 2, monkeypatch) == {("step", Mode.GREEDY)}
    ran = parts_of(make_engine(*pair()), [plain, sampled], monkeypatch)
    assert {mode for kind, mode in ran if kind == "choose"} == {Mode.GREEDY, Mode.SAMPLED}


def test_a_grammar_changes_no_bit_of_other_requests() -> None:
    target, drafter = pair()
    prompts = prompts_of(9, 12, 5)
    params = [
        SamplingParams(max_tokens=20, logprobs=5),
        SamplingParams(max_tokens=20, logprobs=5, temperature=1.0),
    ]
    alone = make_engine(target, drafter).generate(prompts[:2], params)
    together = make_engine(target, drafter).generate(prompts, [*params, params_of(CASES["schema"][0])])
    for one, other in zip(alone, together, strict=False):
        assert same(one, other) and one.logprobs == other.logprobs


@pytest.mark.parametrize(
    ("grammar", "options", "message"),
    [
        (Grammar("json", "{"), {}, "the JSON schema is not valid JSON"),
        (Grammar("regex", "a"), {"synthetic": SyntheticAcceptance(rate=0.5)}, "synthetic acceptance"),
    ],
)
def test_a_grammar_that_cannot_be_used_is_refused_at_once(
    grammar: Grammar, options: dict[str, Any], message: str
) -> None:
    engine = make_engine(*pair(), **options)
    with pytest.raises(UserError, match=message):
        engine.submit([1], SamplingParams(grammar=grammar))
    assert engine.scheduler.idle


def test_json_may_contain_white_space() -> None:
    """No logit is biased; only the grammar applies."""
    target, drafter = pair()
    params = SamplingParams(grammar=CASES["schema"][0], max_tokens=60)
    assert NO_SPACE and params.logit_bias == ()
    check(make_engine(target, drafter), (target, drafter), prompts_of(4, 8), params)
