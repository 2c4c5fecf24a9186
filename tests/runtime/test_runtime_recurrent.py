"""Gated delta nets in the engine: states follow their requests through arrivals, ends, faults and preemptions."""

import contextlib
import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES
from conftest import LONG_RUN, make_drafter, make_target
from engines import alone, around_prefills, check, knowing, make_engine, prompts_of
from recurrent_engines import any_shapes, pair
from small_vocabulary import hf_greedy
from torch import Tensor
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNorm

from dflash_toolkit import SamplingParams, Target, UserError, generate
from dflash_toolkit.kernels import reference
from dflash_toolkit.kernels.delta import DeltaMemory
from dflash_toolkit.models.spec import ModelSpec
from dflash_toolkit.runtime import EngineOptions, Request, load_engine, step_times
from dflash_toolkit.runtime import engine as engine_module
from dflash_toolkit.runtime.prefill_job import PrefillJob
from dflash_toolkit.runtime.request import StepShape
from dflash_toolkit.runtime.step_times import measure_steps
from dflash_toolkit.runtime.timing import shapes_to_measure
from dflash_toolkit.runtime.weights import TargetWeights

EVENTS = 10_000 if LONG_RUN else 250
LONG = SamplingParams(max_tokens=30, ignore_eos=True)
SHORT = replace(LONG, max_tokens=18)
WAYS = [(0, 1), (7, 1), (15, 3)]  # nodes and width: blocks, chains, trees


@pytest.mark.parametrize("kind", ["qwen3_next", "qwen3_5_moe"])  # the tests below use qwen3_5
def test_ragged_batches_equal_generate_and_hugging_face(kind: str) -> None:
    """Prompts shorter than the convolution, and prompts of several chunks."""
    target, drafter = pair(kind)
    prompts = prompts_of(1, 5, 17, 33, 2, 8)
    check(make_engine(target, drafter), (target, drafter), prompts, *[SamplingParams(max_tokens=n) for n in (13, 1, 9)])
    plain = make_engine(target, None).generate(prompts, SamplingParams(max_tokens=12))
    assert [got.tokens for got in plain] == [hf_greedy(target, prompt, 12) for prompt in prompts]


@pytest.mark.parametrize(("every", "params"), [(3, replace(SHORT, temperature=0.9, seed=5)), (1000, SHORT)])
def test_accepted_drafts_change_the_steps_and_nothing_else(every: int, params: SamplingParams) -> None:
    target, drafter = pair()
    prompts = prompts_of(4, 19, 7, 26)
    plain = make_engine(target, None).generate(prompts, params)
    engine = make_engine(target, drafter)
    answers = {tuple(p): g.tokens for p, g in zip(prompts, plain, strict=True)}
    knowing(engine, answers, lambda position: position % every == 0)
    drafted = engine.generate(prompts, params)
    assert [got.tokens for got in drafted] == [got.tokens for got in plain]
    assert sum(len(g.steps) for g in drafted) < sum(len(g.steps) for g in plain) / 1.5


@pytest.mark.parametrize("nodes", [0, 15], ids=["blocks", "chains"])
@pytest.mark.parametrize("index", [2, 6, 11])
def test_a_draft_ends_an_answer_where_plain_decoding_does(index: int, nodes: int) -> None:
    target, drafter = pair()
    (prompt,) = prompts_of(9)
    text = alone(target, None, prompt, SamplingParams(max_tokens=16, ignore_eos=True)).tokens
    params = SamplingParams(max_tokens=16, stop_token_ids=(text[index],))
    engine = make_engine(target, drafter, draft_tree=nodes, draft_tree_width=1)
    knowing(engine, {tuple(prompt): text}, lambda position: False)
    # the third takes over the row of one of the others
    ends = [params, SamplingParams(max_tokens=index, ignore_eos=True), SamplingParams(max_tokens=16, ignore_eos=True)]
    got = engine.generate([prompt] * 3, ends)
    assert got[0].tokens == text[: text.index(text[index]) + 1] and got[0].finish_reason == "stop"
    assert got[1].tokens == text[:index] and got[2].tokens == text
    assert len(got[2].steps) == 2, "whole drafts were taken"
    assert engine.stats.cached_prompt_tokens == 2 * 8, "the others go on from what the first has left"


def test_prompts_with_a_common_prefix_use_kept_states() -> None:
    """A conversation with blocks accepted across the page after which a state is kept; then what several have in
    common: its state is kept when it is seen for the second time."""
    target, drafter = pair()
    (first, more, *tails), (common,) = prompts_of(13, 6, 9, 5, 7), prompts_of(18, seed=3)
    engine = make_engine(target, drafter, prefix_states=9)
    begun = alone(target, None, first, LONG).tokens
    prompts = [first, first + begun + more, *(common + tail for tail in tails), first + begun + more]
    found = [0, 32, 0, 0, 16, 48]
    for prompt, cached in zip(prompts, found, strict=True):
        text = hf_greedy(target, prompt, 30)
        assert text == alone(target, drafter, prompt, LONG).tokens
        knowing(engine, {tuple(prompt): text}, lambda position: position % 5 == 0)
        before = engine.stats.cached_prompt_tokens
        (got,) = engine.generate([prompt], LONG)
        assert got.tokens == text and len(got.steps) < 20
        assert engine.stats.cached_prompt_tokens - before == cached
    engine.pool.check()


@pytest.mark.parametrize(("states", "cached"), [(0, 0), (1, 0), (2, 24)])
def test_states_are_kept_for_as_many_prompts_as_fit(states: int, cached: int) -> None:
    target, drafter = pair()
    engine = make_engine(target, drafter, prefix_states=states)
    assert {len(memory.state) for memory in engine.runner._memories} == {1 + engine.runner.max_num_seqs + states}
    prompts = prompts_of(9, 17, 9)
    prompts[2] = prompts[0]
    for prompt in (*prompts, prompts[1]):
        (got,) = engine.generate([prompt], SHORT)
        assert got.tokens == alone(target, None, prompt, SHORT).tokens
    assert engine.stats.cached_prompt_tokens == cached


@pytest.mark.parametrize("cache_tokens", [120, 1200])
def test_arrivals_cancels_and_preemptions_change_no_answer(cache_tokens: int) -> None:
    target, drafter = pair()
    engine = make_engine(target, drafter, kv_cache_tokens=cache_tokens)
    prompts = prompts_of(30, 25, 9, 14, 33)
    expected = [alone(target, None, prompt, LONG).tokens for prompt in prompts]
    knowing(engine, {tuple(p): t for p, t in zip(prompts, expected, strict=True)}, lambda position: position % 4 == 0)
    requests: list[Request] = []
    for turn in range(400):
        if turn % 3 == 0 and len(requests) < len(prompts):
            requests.append(engine.submit(prompts[len(requests)], LONG))
        if turn == 8:  # one that runs, in a row before others
            engine.cancel(requests[0])
        if not engine.step() and len(requests) == len(prompts):
            break
    assert [request.tokens for request in requests[1:]] == expected[1:]
    assert (engine.stats.preemptions > 0) == (cache_tokens == 120)


@pytest.mark.parametrize(("nodes", "width"), WAYS, ids=["blocks", "chains", "trees"])
def test_random_events_leave_every_request_its_own_states(
    nodes: int, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in test_runtime_scheduler.py, on a device that computes: rows move, states are kept, folded and taken over."""
    dice = random.Random(3)
    kinds = ["linear_attention", "full_attention", "linear_attention"]
    target = ARCHITECTURES["Qwen3.5"].target(num_hidden_layers=3, layer_types=kinds)
    drafter, shared = make_drafter(target, taps=1, layers=1), prompts_of(14, seed=4)[0]
    prompts = [shared[: dice.randrange(1, 14)] + tail for tail in prompts_of(*[3] * 12, seed=5)]
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    texts = {tuple(prompt): generate(target, None, prompt, params).tokens for prompt in prompts}
    options = {"max_num_seqs": 4, "kv_cache_tokens": 100, "prefix_states": 2, "draft_tree": nodes}
    options["draft_tree_width"] = width
    if nodes:
        times = list(itertools.product((1, 2, 4), (1, 2, 4, 8)))
        monkeypatch.setattr(engine_module, "cached_times", lambda *args: dict.fromkeys(times, 1.0))
        options["num_speculative_tokens"] = None
    engine = make_engine(target, drafter, **options)
    knowing(engine, texts, lambda position: position % 7 in (2, 3))
    if nodes:
        any_shapes(engine, dice)
    alive: list[Request] = []
    cancelled = 0
    for _ in range(EVENTS):
        action = dice.random()
        if action < 0.3:
            limit = replace(params, max_tokens=dice.choice([1, 9, 24, 24]))
            alive.append(engine.submit(dice.choice(prompts), limit, priority=dice.choice([0, 0, 1])))
        elif action < 0.35 and (unfinished := [r for r in alive if not r.finished and not r.cancelled]):
            engine.cancel(dice.choice(unfinished))
            cancelled += 1
        else:
            engine.step()
        engine.pool.check()
    while engine.step():
        pass
    ended = [request for request in alive if not request.cancelled]
    assert len(ended) == len(alive) - cancelled and all(request.finished for request in ended)
    for request in ended:
        assert request.tokens == texts[tuple(request.prompt_ids)][: request.limit]
    assert min(cancelled, engine.stats.preemptions, engine.stats.cached_prompt_tokens) > EVENTS / 100


@pytest.mark.parametrize(("place", "nodes", "width"), [("prefill", 0, 1), *(("decode", n, w) for n, w in WAYS)])
def test_a_partial_failure_leaves_no_wrong_state(place: str, nodes: int, width: int) -> None:
    """The device raises after it has done the work."""
    target, drafter = pair()
    engine = make_engine(target, drafter, draft_tree=nodes, draft_tree_width=width)
    runner, calls = engine.runner, 0

    def count() -> None:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise RuntimeError("a kernel's own")

    @contextlib.contextmanager
    def raises(jobs: Sequence[PrefillJob]) -> Iterator[None]:
        yield
        count()

    if place == "prefill":
        around_prefills(runner, raises)
    else:
        real = runner.decode
        runner.decode = lambda *arguments: (real(*arguments), count())[0]  # type: ignore[method-assign]
    prompts = prompts_of(24, 5, 40)
    assert [got.tokens for got in engine.generate(prompts, SHORT)] == [
        alone(target, None, prompt, SHORT).tokens for prompt in prompts
    ]
    assert calls > 4


def test_padding_of_a_prompt_touches_no_state() -> None:
    """States that other requests left do not affect it."""
    ids, more = prompts_of(21, 2, seed=9)
    pages = [7, 3, 9, 5, 8, 6, 2]

    def memories(padded: bool) -> list[DeltaMemory]:
        runner = make_engine(*pair()).runner
        found = [mixer.memory for mixer in runner.verifier.stack._mixers if hasattr(mixer, "memory")]
        for memory in found:
            memory.state.fill_(torch.nan)
            memory.window.fill_(torch.nan)
        for chunk, start in ((ids, 0), (more, len(ids))):
            if padded:
                runner.prefills.place(PrefillJob(chunk, start, pages, 2))
                runner.prefills.padded(64)
            else:
                runner.start_prefill([PrefillJob(chunk, start, pages, 2)]).run()
        return found

    for one, other in zip(memories(True), memories(False), strict=True):
        for ours, theirs in ((one.state, other.state), (one.window, other.window)):
            torch.testing.assert_close(ours[2], theirs[2], rtol=1e-4, atol=1e-5)
            assert ours[2].isfinite().all() and ours[[0, 1, 3]].isnan().all()


@pytest.mark.parametrize(("nodes", "width"), WAYS, ids=["blocks", "chains", "trees"])
def test_padded_rows_of_a_step_touch_no_state(nodes: int, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A captured step has room for five requests and for more rows than their chains have."""
    target, drafter = pair()
    how = {"draft_tree": nodes, "draft_tree_width": width}
    engine = make_engine(target, drafter, max_num_seqs=5, prefix_states=0, **how)
    prompts = prompts_of(6, 19)
    for memory in engine.runner._memories:
        memory.state.fill_(torch.nan)
    monkeypatch.setattr(engine.runner.context, "computed_rows", lambda count: 5)
    if nodes:
        engine.scheduler.choose_shape = lambda requests: StepShape(8, 48)
        texts = {tuple(prompt): alone(target, None, prompt, SHORT).tokens for prompt in prompts}
        knowing(engine, texts, lambda position: position % 5 == 0)
        assert [got.tokens for got in engine.generate(prompts, SHORT)] == list(texts.values())
    else:
        check(engine, (target, drafter), prompts, SHORT)
    for memory in engine.runner._memories:
        untouched = memory.state.isnan().flatten(1).all(1).tolist()
        assert untouched[1:] == [False, False, True, True, True], "slot 0 belongs to no request"


def test_timed_steps_use_a_state_for_every_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """They verify no random tokens, as graphs of such steps cannot be kept."""
    runner = make_engine(*pair(), max_num_seqs=3, prefix_states=1).runner
    monkeypatch.setattr(step_times, "random_tokens", None)
    for memory in runner._memories:
        memory.state.fill_(torch.nan)
        memory.state[1:4] = 0.0
    measure_steps(runner, shapes_to_measure(3, (1, 4)))
    for memory in runner._memories:
        assert all(memory.state[slot].any() and memory.state[slot].isfinite().all() for slot in (1, 2, 3))
        assert memory.state[4].isnan().all(), "states of a prefix are not written"
    assert not runner.state.active.any() and not runner.state.states.any() and not runner.state.lengths.any()


def test_states_are_in_fp32_whatever_their_target_is_in() -> None:
    target = make_target("qwen3_5")
    target.model.bfloat16()
    memories = make_engine(target, None).runner._memories
    kinds = {(m.state.dtype, m.gates.dtype, m.window.dtype, m.inputs.dtype) for m in memories}
    assert kinds == {(torch.float32, torch.float32, torch.bfloat16, torch.bfloat16)}


@pytest.mark.parametrize("name", ["Qwen3-Next", "Qwen3.5", "Qwen3.5 with images"])
def test_checkpoints_are_read_as_transformers_writes_them(name: str, tmp_path: Path) -> None:
    architecture = ARCHITECTURES[name]
    target = architecture.target()
    (architecture.whole_model() if architecture.vision else target.model).save_pretrained(tmp_path)
    target.tokenizer.save_pretrained(tmp_path)
    loaded = Target.load(str(tmp_path), "cpu", "float32")
    options = EngineOptions(max_num_seqs=2, kv_cache_tokens=200, page_size=4)
    engine, _ = load_engine(str(tmp_path), None, "cpu", "float32", options)
    assert engine.generate([[1, 2, 3]], SamplingParams(max_tokens=12))[0].tokens == hf_greedy(loaded, [1, 2, 3], 12)


@pytest.mark.parametrize("kind", ["qwen3_next", "qwen3_5_moe"])
def test_sharing_weights_does_not_change_module_outputs(kind: str) -> None:
    target, _ = pair(kind)
    ids = torch.tensor(prompts_of(9))
    with torch.no_grad():
        before = target.model(ids).logits
        weights = TargetWeights.shared_with(target.model, ModelSpec.of_target(target.config))
        assert torch.equal(target.model(ids).logits, before)
    shared: Sequence[Tensor] = [target.model.model.layers[0].linear_attn.out_proj.weight]
    assert shared[0].data_ptr() == weights.layers[0].mixer.o.data_ptr()


def test_norms_round_where_those_of_transformers_do() -> None:
    norm, x = Qwen3_5RMSNorm(64), torch.randn(9, 64).bfloat16()
    norm.weight.data = torch.randn(64).bfloat16()
    found = reference.add_rms_norm(x, None, 1.0 + norm.weight.float(), 1e-6)[1]
    assert torch.equal(found, norm(x))


@pytest.mark.parametrize(
    ("changes", "said"),
    [({"attention_bias": True}, "attention_bias True"), ({"output_gate_type": "tanh"}, "output_gate_type 'tanh'")],
)
def test_options_that_transformers_treats_differently_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=f"{said} is not served by this engine"):
        ModelSpec.of_target(ARCHITECTURES["Qwen3.5"].config(**changes))
