"""The runtime on a GPU in bf16: kernels against float64, and a drafter that does not change a single token."""

import asyncio
import contextlib
import copy
import gc
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import make_tokenizer
from engines import around_prefills
from gpu_engines import LIMIT, VOCAB, knowing, make_engine, pair, prompts_of
from torch import Tensor
from transformers.convert_slow_tokenizer import bytes_to_unicode

from dflash_toolkit import SamplingParams, Target, save_drafter
from dflash_toolkit.checkpoint.reader import load_weights
from dflash_toolkit.generation import Generation
from dflash_toolkit.kernels.delta import DeltaMemory
from dflash_toolkit.kernels.features import features_of
from dflash_toolkit.kernels.formats import BLOCK, BlockScaledFp8, Mxfp4Weight, RowScaledFp8, quantize_groups
from dflash_toolkit.kernels.launch import dependent_launches
from dflash_toolkit.models.quantized import FORM
from dflash_toolkit.models.spec import ModelSpec
from dflash_toolkit.runtime import AsyncEngine, Engine, EngineOptions, load_engine
from dflash_toolkit.runtime.memory import workspace_of
from dflash_toolkit.runtime.prefill_job import PrefillJob
from dflash_toolkit.runtime.programs.prefill import PREFILL_SIZES, PrefillPrograms
from dflash_toolkit.runtime.programs.prefill_pass import PrefillPass
from dflash_toolkit.runtime.proposer import Proposer, head_of
from dflash_toolkit.runtime.request import Request
from dflash_toolkit.runtime.runner import StepRunner
from dflash_toolkit.runtime.sampler import Mode
from dflash_toolkit.runtime.stack import Stack
from dflash_toolkit.runtime.step_times import run_all_parts
from dflash_toolkit.runtime.weights import DrafterWeights, TargetWeights
from dflash_toolkit.sampling import Grammar

pytestmark = pytest.mark.gpu
OTHERS = ("phi3", "granite", "smollm3", "olmo2", "glm4", "qwen2_moe", "glm4_moe", "llama4")
GEMMA = ("gemma2", "gemma3", "gemma4", "gemma4_e2b", "gemma4_moe")
KINDS = (*OTHERS, *GEMMA, "qwen3", "gpt_oss", "qwen3_moe", "qwen3_next", "qwen3_5", "qwen3_5_moe", "qwen2")


def regret(target: Target, prompt: list[int], answer: list[int]) -> float:
    """Returns the largest regret of an answer's tokens in nats, in Hugging Face's bf16."""
    text = torch.tensor([prompt + answer], device="cuda")
    with torch.inference_mode():
        logprobs = target.model(text).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
    return float((logprobs.amax(-1) - logprobs.gather(1, text[0, len(prompt) :, None])[:, 0]).max())


@pytest.mark.parametrize(("kind", "few"), [*((kind, 4) for kind in KINDS), ("qwen2", 5)])  # 5: pairs
def test_a_drafter_changes_no_token_in_batches_up_to_eight(kind: str, few: int, monkeypatch: Any) -> None:
    monkeypatch.setattr("dflash_toolkit.kernels.triton.attention.FEW", few)
    target, drafter = pair(kind)
    prompts = prompts_of(320)
    params = SamplingParams(max_tokens=48, ignore_eos=True)
    plain = [g.tokens for g in make_engine(target, None).generate(prompts, params)]
    assert [g.tokens for g in make_engine(target, None, max_num_seqs=1).generate(prompts, params)] == plain
    for batch, block in ((8, 16), (1, 16), (8, 8), (8, 4), (8, 2), (8, None)):
        engine = make_engine(target, drafter, max_num_seqs=batch, num_speculative_tokens=block and block - 1)
        knowing(engine, prompts, plain)
        drafted = engine.generate(prompts, params)
        assert [g.tokens for g in drafted] == plain
        steps = sum(len(g.steps) for g in drafted)
        assert steps < 320 * 47 / (1.5 if block in (2, None) else 2.5), "drafts were accepted"  # None: as it pays
        engine.pool.check()
        buffers = len(
            engine.runner.context.results.buffers._free
        )  # first tokens of a whole batch are on their way at one time
        assert 1 <= buffers <= batch + engine.runner.depth + 1, "buffers of results are used again"


@pytest.mark.parametrize(
    "kind", ["qwen3", "qwen2", "qwen3_moe", "qwen3_5", "gemma3", "gemma4", "gemma4_e2b", "gpt_oss", "llama4", "glm4"]
)
def test_draft_trees_change_no_token_in_batches_up_to_eight(kind: str) -> None:
    target, drafter = pair(kind)
    prompts, params = prompts_of(120), SamplingParams(max_tokens=48, ignore_eos=True)
    plain = [g.tokens for g in make_engine(target, None).generate(prompts, params)]
    for batch, block, options in (
        (8, 16, {"draft_tree": 15}),
        (1, 16, {"draft_tree": 63}),
        (3, 8, {"draft_tree": 40}),
        (8, None, {"draft_tree": 63}),
        (8, 16, {"draft_tree": 15, "draft_tree_width": 1}),
    ):
        tokens = block and block - 1
        how = {"num_speculative_tokens": tokens, "draft_tree_width": 8} | options
        engine = make_engine(target, drafter, max_num_seqs=batch, **how)
        knowing(engine, prompts, plain)
        drafted = engine.generate(prompts, params)
        assert [g.tokens for g in drafted] == plain
        assert sum(len(g.steps) for g in drafted) < 120 * 47 / (2 if block == 16 and len(options) == 1 else 1.2)
        assert sum(n for rows, n in engine.runner.step_rows.items() if rows > batch) > 0
        engine.pool.check()


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_5"])  # heads of 64 and 256
def test_drafts_change_no_token_with_an_fp8_cache(kind: str) -> None:
    target, drafter = pair(kind)
    prompts, params = prompts_of(80), SamplingParams(max_tokens=48, ignore_eos=True)
    options = {"kv_cache_dtype": "fp8"}
    plain = [g.tokens for g in make_engine(target, None, **options).generate(prompts, params)]
    assert plain != [g.tokens for g in make_engine(target, None).generate(prompts, params)]
    for batch, nodes in ((1, 0), (8, 0), (8, 15)):
        engine = make_engine(target, drafter, max_num_seqs=batch, draft_tree=nodes, **options)
        knowing(engine, prompts, plain)
        drafted = engine.generate(prompts, params)
        assert [g.tokens for g in drafted] == plain
        assert sum(len(g.steps) for g in drafted) < 80 * 47 / 1.5, "drafts were accepted"


@pytest.mark.parametrize("dflash2", [False, True], ids=["dflash", "dflash2"])
def test_the_drafters_own_trees_change_no_answer_greedy_or_sampled(dflash2: bool) -> None:
    target, drafter = pair(dflash2=dflash2)
    prompts = prompts_of(24)
    ways = [{}, {"top_p": 0.9, "top_k": 40}, {"temperature": 0.0}, {"presence_penalty": 0.5, "logprobs": 2}]
    each = [SamplingParams(**{"temperature": 1.2, "max_tokens": 32, "seed": i} | ways[i % 4]) for i in range(24)]
    plain, over_trees = (
        make_engine(target, drafts, draft_tree=nodes, max_num_seqs=8).generate(prompts, each)
        for drafts, nodes in ((None, 0), (drafter, 15))
    )
    assert [g.tokens for g in over_trees] == [g.tokens for g in plain]
    assert max(step.drafted for g in over_trees for step in g.steps) > 0


@pytest.mark.parametrize("dflash2", [False, True], ids=["dflash", "dflash2"])
def test_sampled_drafts_give_equal_answers_alone_and_batched(dflash2: bool) -> None:
    target, drafter = pair(dflash2=dflash2)
    prompts = prompts_of(24)
    ways = [{}, {"top_p": 0.9, "top_k": 40}, {"presence_penalty": 0.5, "logprobs": 2}, {"temperature": 0.0}]
    each = [SamplingParams(**{"temperature": 1.2, "max_tokens": 32, "seed": i} | ways[i % 4]) for i in range(24)]
    engines = [make_engine(target, drafter, max_num_seqs=n, draft_sample_method="probabilistic") for n in (8, 1)]
    together, alone = (engine.generate(prompts, each) for engine in engines)
    assert [(g.tokens, g.steps) for g in together] == [(g.tokens, g.steps) for g in alone]
    plain = make_engine(target, None).generate(prompts, each)
    same = [a.tokens == b.tokens for a, b in zip(together, plain, strict=True)]
    assert all(same[3::4]) and not all(same), "greedy answers stay, of the others some differ"


def in_fp8(target: Target) -> TargetWeights:
    """The weights of a target, quantized by blocks."""
    config: Any = copy.deepcopy(target.config)
    config.quantization_config = dict(FORM)
    weights = TargetWeights.empty(ModelSpec.of_target(config), target.device, target.dtype)
    state = dict(target.model.state_dict())
    views = weights.parameter_views(stacked=True)
    for scale in (name for name in views if name.endswith("_scale_inv")):
        name = scale.removesuffix("_scale_inv")
        matrix = BlockScaledFp8.of(state[name].flatten(0, -2))  # experts' blocks are blocks of them all
        state[name], state[scale] = (t.view(views[at].shape) for t, at in ((matrix.data, name), (matrix.scale, scale)))
    load_weights("target", views, state)
    return weights.as_computed()


def in_mxfp4(target: Target) -> TargetWeights:
    """The weights of a gpt-oss target with quantized experts."""
    weights = TargetWeights.of_module(target.model, ModelSpec.of_target(target.config))
    config: Any = copy.deepcopy(target.config)
    config.quantization_config = {"quant_method": "mxfp4"}
    weights.spec = ModelSpec.of_target(config)
    for layer in weights.layers:
        layer.ffn.gate_up, layer.ffn.down = (Mxfp4Weight.of(each) for each in (layer.ffn.gate_up, layer.ffn.down))
    return weights


IN_BLOCKS = ["qwen3", "qwen3_moe", "qwen3_5", "qwen3_5_moe"]


@pytest.mark.parametrize("kind", IN_BLOCKS)
@pytest.mark.parametrize(("batch", "block"), [(1, 1), (8, 1), (1, 8), (3, 5)])
def test_launches_that_overlap_change_no_bit_of_a_pass(
    kind: str, batch: int, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replays a captured pass several times, in memory that holds NaN before the first write."""
    target, drafter = pair(kind)
    options = EngineOptions(
        max_num_seqs=batch, kv_cache_tokens=16 * LIMIT, prefix_cache=False, num_speculative_tokens=7
    )
    runner = Engine(in_fp8(target), DrafterWeights.of_module(drafter), (), options).runner
    state, stack = runner.state, runner.verifier.stack
    kept = [stack.cache, *(getattr(memory, name) for memory in runner._memories for name in DeltaMemory.__slots__)]

    def bits(*tensors: Tensor) -> list[Tensor]:
        return [t.contiguous().view(torch.uint8).clone() for t in tensors]

    with torch.inference_mode():
        contexts = torch.randint(1, 600, (batch,), dtype=torch.int32, device="cuda")
        state.lengths.copy_(contexts)
        state.page_table.copy_(1 + torch.arange(state.page_table.numel(), device="cuda").view_as(state.page_table))
        before = [torch.rand_like(t) if t.dtype == torch.float32 else torch.randn_like(t) for t in kept]
        at = contexts[:, None].long() + torch.arange(block, device="cuda")  # where the pass writes
        slots = state.page_table.gather(1, at // state.page_size).long() * state.page_size + at % state.page_size
        before[0][:, :, slots.flatten()] = float("nan")
        if state.recurrent:
            state.states[0].copy_(torch.arange(1, batch + 1))
            state.states[1].copy_(torch.arange(batch) % 8)
        inputs = torch.randn(10, batch * block, target.model.config.hidden_size, device="cuda", dtype=torch.bfloat16)
        x, rows = inputs[0].clone(), state.rows(batch, block)
        expected: list[list[Tensor]] = []
        for overlap in (False, True):
            monkeypatch.setattr(dependent_launches, "on", overlap)
            stack.forward(x, rows)  # compiles
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                # later allocations come from small blocks or from a large one
                sizes = [1 << 20] * 32 + [64 << 20]
                poison = [torch.full((n,), 0xFF, dtype=torch.uint8, device="cuda") for n in sizes]
                places = [(t.data_ptr(), n) for t, n in zip(poison, sizes, strict=True)]
                del poison
                out = stack.forward(x, rows)
            assert any(place <= out.data_ptr() < place + n for place, n in places)
            for i in range(100 if overlap else 10):
                x.copy_(inputs[i % 10])
                for t, old in zip(kept, before, strict=True):
                    t.copy_(old)
                graph.replay()
                found = bits(out, *kept)
                if not overlap:
                    assert out.isfinite().all()
                    expected.append(found)
                assert all(map(torch.equal, found, expected[i % 10])), (overlap, i)
        assert not torch.equal(expected[0][0], expected[1][0])


@pytest.mark.parametrize("kind", [*IN_BLOCKS, "gpt_oss"])
def test_a_drafter_changes_no_token_of_a_quantized_target(kind: str) -> None:
    target, drafter = pair(kind)
    weights, drafts = in_mxfp4(target) if kind == "gpt_oss" else in_fp8(target), DrafterWeights.of_module(drafter)
    prompts, params = prompts_of(160), SamplingParams(max_tokens=48, ignore_eos=True)

    def engine_of(drafts: DrafterWeights | None, batch: int, block: int) -> Engine:
        options = EngineOptions(
            max_num_seqs=batch, kv_cache_tokens=16 * LIMIT, prefix_cache=False, num_speculative_tokens=block - 1
        )
        return Engine(weights, drafts, (), options)

    plain = [answer.tokens for answer in engine_of(None, 8, 1).generate(prompts, params)]
    assert [answer.tokens for answer in engine_of(None, 1, 1).generate(prompts[:40], params)] == plain[:40]
    for batch, block in ((8, 16), (1, 16), (8, 4)):
        engine = engine_of(drafts, batch, block)
        knowing(engine, prompts, plain)
        drafted = engine.generate(prompts, params)
        assert [answer.tokens for answer in drafted] == plain
        assert sum(len(answer.steps) for answer in drafted) < 160 * 47 / 2.5, "drafts were accepted"


@pytest.mark.parametrize("kind", ["qwen3_moe", "qwen3_5_moe"])
def test_drafts_of_a_skewed_mixture_keep_their_answers(kind: str) -> None:
    """A few experts are popular. Up to eight requests have the bits of plain decoding; 32 have up to 256 rows a step.

    Near ties of experts make any two computations in bf16 differ by nats: transformers' own in fp32 by up to 4.
    """
    target, drafter = copy.deepcopy(pair(kind))
    for name, parameter in target.model.named_parameters():
        if name.endswith("mlp.gate.weight"):
            parameter.data[::5] *= 3.0  # larger logits: chosen by more rows
    prompts, params = prompts_of(64, seed=6), SamplingParams(max_tokens=48, ignore_eos=True)
    plain = [g.tokens for g in make_engine(target, None).generate(prompts, params)]
    for batch in (8, 32):
        engine = make_engine(
            target, drafter, max_num_seqs=batch, num_speculative_tokens=7, draft_tree=0, kv_cache_tokens=32 * LIMIT
        )
        knowing(engine, prompts, plain)
        answers = engine.generate(prompts, params)
        assert all(len(answer.tokens) == 48 for answer in answers)
        if batch == 8:
            assert [answer.tokens for answer in answers] == plain
            assert sum(len(answer.steps) for answer in answers) < 64 * 47 / 2, "drafts were accepted"


@pytest.mark.parametrize("dflash2", [False, True], ids=["dflash", "dflash2"])
@pytest.mark.parametrize("draft_dtype", ["fp8", "full"])
def test_a_drafter_changes_no_answer_in_any_batch_bucket(draft_dtype: str, dflash2: bool) -> None:
    target, drafter = pair(dflash2=dflash2)
    prompts = prompts_of(40, seed=2)
    params = [SamplingParams(max_tokens=1 + 5 * (i % 13), ignore_eos=True) for i in range(40)]
    plain = [g.tokens for g in make_engine(target, None).generate(prompts, params)]
    engine = make_engine(target, drafter, prefix_cache=True, draft_dtype=draft_dtype)
    chosen = "fp8" if features_of(torch.device("cuda")).fp8_products else "full"
    assert engine.options.draft_dtype == draft_dtype and make_engine(target, drafter).options.draft_dtype == chosen
    assert [g.tokens for g in engine.generate(prompts, params)] == plain
    assert len(engine.runner.graphs.captured) >= 4, "the batch grew and shrank through its buckets"
    again = engine.generate(prompts, params)  # now with prefix hits: a prefill cut elsewhere resolves ties otherwise
    assert engine.stats.cached_prompt_tokens > 1000
    assert sum(a.tokens == b for a, b in zip(again, plain, strict=True)) > 20, "most answers"
    regrets = [regret(target, prompt, answer.tokens) for prompt, answer in zip(prompts, again, strict=True)]
    assert max(regrets) <= 0.2, "the others are near ties too"


@pytest.mark.parametrize("dflash2", [False, True], ids=["dflash", "dflash2"])
@pytest.mark.parametrize("block", [2, 8, 16])  # with 16 requests: 32 and 128 rows in one kernel per layer, 256 in more
def test_drafts_in_fp8_are_nearly_those_of_full_precision(
    block: int, dflash2: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dflash_toolkit.runtime.weights.WIDE_IN_FP8", 0)
    target, drafter = pair(dflash2=dflash2)
    engine = make_engine(target, drafter, max_num_seqs=16, num_speculative_tokens=block - 1, draft_dtype="fp8")
    for prompt in prompts_of(16, seed=4):
        engine.submit(prompt, SamplingParams(max_tokens=300, ignore_eos=True))
    for _ in range(60):
        engine.step()
    runner = engine.runner
    assert runner.state.active.all() and runner.drafter is not None
    assert runner.proposer is not None
    in_fp8 = isinstance(runner.proposer.stack.layers[1].mixer.qkv, RowScaledFp8)
    assert in_fp8 == features_of(runner.device).hopper, "elsewhere only the head is in fp8"
    rows, last, proposer = runner.state.rows(16), runner.state.last_token, runner.proposer
    with torch.inference_mode():
        quantized = proposer.propose(last, rows, block).tokens
        loaded = DrafterWeights.of_module(drafter)
        old = proposer.stack
        stack = Stack(loaded.spec, loaded.layers, loaded.norm, old.ropes, old.caches, old.ops)
        head = head_of(loaded, runner.target.head, old.ops)
        full = Proposer(loaded, stack, runner.target.embedding, head).propose(last, rows, block).tokens
    same = quantized == full
    if dflash2:  # a slot is compared where the token before it, which its own goes by, is the same
        same = same[torch.nn.functional.pad(same, (1, 0), value=True)[:, :-1]]
    # random scores of pairs, which follow the hidden state, are as easily changed as logits
    assert same.float().mean() > (0.3 if dflash2 else 0.5), f"by chance one draft of {VOCAB} would be the same"


@pytest.mark.parametrize("draft_dtype", ["fp8", "full"])
@pytest.mark.parametrize("kind", ["qwen3", "qwen2"])
def test_dflash2_drafts_do_not_depend_on_other_requests(
    kind: str, draft_dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dflash_toolkit.runtime.weights.WIDE_IN_FP8", 0 if kind == "qwen3" else 2560)
    target, drafter = pair(kind, dflash2=True)
    engine = make_engine(target, drafter, draft_dtype=draft_dtype)
    runner, proposer = engine.runner, engine.runner.proposer
    layers = proposer.stack.layers
    x = torch.randn(8 * 16, target.config.hidden_size, device="cuda").bfloat16()
    fused = [layer.fuses(after, x, runner.ops) for layer, after in zip(layers, [*layers[1:], None], strict=True)]
    assert set(fused) == {features_of(torch.device("cuda")).hopper}
    for prompt in prompts_of(8, seed=4):
        engine.submit(prompt, SamplingParams(max_tokens=300, ignore_eos=True))
    for _ in range(30):
        engine.step()
    assert runner.state.active.all()
    rows, last = runner.state.rows(8), runner.state.last_token
    with torch.inference_mode():
        for block in (16, 7):
            together = proposer.propose(last, rows, block).tokens
            hidden = proposer.stack.forward(x[: 8 * block], rows)
            for i in range(8):
                own = replace(rows, lengths=rows.lengths[i : i + 1], page_table=rows.page_table[i : i + 1])
                assert torch.equal(proposer.propose(last[i : i + 1], own, block).tokens[0], together[i])
                at = slice(i * block, (i + 1) * block)
                assert torch.equal(proposer.stack.forward(x[at], own), hidden[at])


@pytest.mark.parametrize("draft_tree", [0, 20])
def test_a_prepared_engine_captures_nothing_while_it_answers(
    draft_tree: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    target, drafter = pair()
    prompts = prompts_of(5)
    params = [SamplingParams(max_tokens=20, temperature=float(i % 2), seed=i) for i in range(5)]
    options = {"num_speculative_tokens": None, "draft_tree": draft_tree}
    expected = make_engine(target, drafter, **options).generate(prompts, params)
    engine = make_engine(target, drafter, **options)  # times are known by now: no step is captured
    prepared = 0
    while engine.prepare():
        prepared += 1
    least = len(PREFILL_SIZES) + 6 * 4 * 5 + 4 * 4  # prefills; steps and parts of them, buckets up to 8, blocks
    assert prepared > least if draft_tree else prepared == least
    assert not engine.prepare() and engine.scheduler.idle
    there = set(engine.runner.graphs.captured)
    answers = engine.generate(prompts, params)
    assert set(engine.runner.graphs.captured) == there
    assert [a.tokens for a in answers] == [a.tokens for a in expected]


@pytest.mark.parametrize("step_s", [0.0, 1e-12], ids=["whole passes", "one slice a turn"])
def test_added_and_removed_requests_equal_single_runs(step_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts and answers of mixed lengths. With whole passes, in every batch bucket, growing and shrinking."""
    monkeypatch.setattr(StepRunner, "step_s", step_s)  # else measured times decide how many slices a turn takes
    target, drafter = pair()
    words = torch.randint(0, VOCAB - 1, (900,), generator=torch.Generator().manual_seed(8)).tolist()
    lengths = (5, 700, 12, 300, 64, 3, 150, 900)
    prompts = [[(i + token) % VOCAB for token in words[:n]] for i, n in enumerate(lengths)]
    each = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (90, 75, 1, 60, 45, 33, 50, 40)]
    engine = make_engine(target, drafter)
    alone = [engine.generate([prompt], params)[0].tokens for prompt, params in zip(prompts, each, strict=True)]
    buckets: list[int] = []
    real = engine.runner.decode

    def watched(requests: Sequence[Request], block: int) -> Any:
        buckets.append(engine.runner.bucket(len(requests)))
        return real(requests, block)

    monkeypatch.setattr(engine.runner, "decode", watched)
    for order in (range(8), reversed(range(8))):
        buckets.clear()
        requests = {}
        for i in order:
            requests[i] = engine.submit(prompts[i], each[i])
            for _ in range(2):
                engine.step()
        while engine.step():
            pass
        assert [requests[i].tokens for i in range(8)] == alone
        changes = set(itertools.pairwise(buckets))
        assert step_s or changes >= {(1, 2), (2, 4), (4, 8), (8, 4), (4, 2), (2, 1)}


def test_grammars_are_followed_in_every_kind_of_batch() -> None:
    """Equal with and without drafts, next to rows without drafts, which are also unchanged."""
    pytest.importorskip("xgrammar")
    target, drafter = pair()
    regexes = ["[a-f]{40}", "[0-9]{3}(,[0-9]{3}){5}", "(yes|no)( maybe){3}", "[^a]{20}"]
    ways: list[dict[str, Any]] = [{}, {"temperature": 1.0, "seed": 2}, {"logprobs": 3}, {"presence_penalty": 0.5}]
    plain = [SamplingParams(max_tokens=30, **way) for way in ways]
    bound = [
        SamplingParams(max_tokens=90, grammar=Grammar("regex", regex), stop_token_ids=(256,), **way)
        for regex, way in zip(regexes, ways, strict=True)
    ]
    prompts, params = prompts_of(8), [one for both in zip(plain, bound, strict=True) for one in both]
    engine = make_engine(target, drafter)
    drafted = engine.generate(prompts, params)
    assert [a.tokens for a in drafted] == [a.tokens for a in make_engine(target, None).generate(prompts, params)]
    assert [a.tokens for a in drafted[::2]] == [a.tokens for a in engine.generate(prompts[::2], plain)]
    for answer, regex in zip(drafted[1::2], regexes, strict=True):
        letters = "".join(target.tokenizer.convert_ids_to_tokens(answer.tokens[:-1]))
        text = bytes(bytes_of()[letter] for letter in letters).decode("utf-8", "surrogatepass")
        assert answer.finish_reason == "stop" and re.fullmatch(regex, text)
    while engine.prepare():
        pass
    there = set(engine.runner.graphs.captured)
    assert [a.tokens for a in engine.generate(prompts, params)] == [a.tokens for a in drafted]
    assert set(engine.runner.graphs.captured) == there, "once a grammar was seen, its parts are captured in advance too"


def bytes_of() -> dict[str, int]:
    return {letter: byte for byte, letter in bytes_to_unicode().items()}


def test_launching_a_step_never_waits_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    target, drafter = pair()
    engine = make_engine(target, drafter)
    while engine.prepare():
        pass  # a capture waits
    real = engine.runner.decode

    def watched(requests: Sequence[Request], block: int) -> Any:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return real(requests, block)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(engine.runner, "decode", watched)
    for params in (
        SamplingParams(max_tokens=40), SamplingParams(max_tokens=40, temperature=1.0, top_p=0.9, seed=1),
        SamplingParams(max_tokens=40, logprobs=2, presence_penalty=0.5),
        SamplingParams(max_tokens=40, min_tokens=20, stop_token_ids=tuple(range(0, 256, 3))),
    ):  # fmt: skip
        assert all(answer.tokens for answer in engine.generate(prompts_of(5), params))


def test_captured_prefill_equals_host_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    target, drafter = pair()
    prompts = [p[:n] for p, n in zip(prompts_of(9, seed=4), (1, 2, 63, 64, 65, 127, 128, 129, 150), strict=True)]
    prompts += [3 * prompts[-1], (7 * prompts[-1])[: LIMIT - 20]]  # chunks of 512 tokens, the last near the end
    params = SamplingParams(max_tokens=16, ignore_eos=True)
    captured = make_engine(target, drafter, max_num_batched_tokens=1024)
    found = [g.tokens for g in captured.generate(prompts, params)]
    assert {64, 128, 512} < set(captured.runner.prefills.captured) <= set(PREFILL_SIZES)
    monkeypatch.setattr(PrefillPrograms, "graph", lambda prefills, size: (Eagerly(), prefills.padded(size)))
    eager = make_engine(target, drafter, max_num_batched_tokens=1024)
    assert [g.tokens for g in eager.generate(prompts, params)] == found
    # unpadded: longer products add up otherwise
    monkeypatch.setattr("dflash_toolkit.runtime.programs.prefill.PREFILL_SIZES", (0,))
    plain = [g.tokens for g in make_engine(target, drafter, max_num_batched_tokens=1024).generate(prompts, params)]
    assert sum(a == b for a, b in zip(found, plain, strict=True)) >= len(prompts) - 2


class Eagerly:
    def replay(self) -> None:
        """Does nothing: the capture has already run the pass."""


def test_prompt_scores_equal_hugging_face_and_change_no_answer() -> None:
    """Chunks in graphs and, of more than 512 tokens, without; 128 rows of logits at a time."""
    target, drafter = pair()
    exact = copy.deepcopy(target.model).double()
    prompts = [p[:n] for p, n in zip(prompts_of(9, seed=4), (1, 2, 63, 64, 65, 127, 128, 129, 150), strict=True)]
    prompts += [3 * prompts[-1], (7 * prompts[-1])[: LIMIT - 20]]
    asked = SamplingParams(max_tokens=12, ignore_eos=True, logprobs=1, prompt_logprobs=20)
    plain = replace(asked, prompt_logprobs=None)

    def answers(params: SamplingParams, **options: Any) -> list[Generation]:
        engine = make_engine(target, drafter, max_num_batched_tokens=2048, prefix_cache=True, **options)
        while engine.prepare():
            pass  # a capture waits

        @contextlib.contextmanager
        def never_waiting(_: Sequence[PrefillJob]) -> Iterator[None]:
            torch.cuda.set_sync_debug_mode("error")
            try:
                yield
            finally:
                torch.cuda.set_sync_debug_mode("default")

        around_prefills(engine.runner, never_waiting)
        return engine.generate(prompts, [plain if i % 3 == 2 else params for i in range(len(prompts))])

    found = answers(asked)
    for i, (prompt, got) in enumerate(zip(prompts, found, strict=True)):
        if i % 3 == 2:
            assert got.prompt_logprobs is None
            continue
        with torch.inference_mode():
            rows = exact(torch.tensor([prompt], device="cuda")).logits[0].log_softmax(-1)
        assert got.prompt_logprobs is not None and len(got.prompt_logprobs) == len(prompt) - 1
        for (token, rank), row, following in zip(got.prompt_logprobs, rows[:-1], prompt[1:], strict=True):
            assert token.chosen == pytest.approx(float(row[following]), abs=0.15)
            assert [value for _, value in token.best] == pytest.approx(row.topk(20).values.tolist(), abs=0.15)
            assert int((row > row[following] + 0.3).sum()) < rank <= int((row >= row[following] - 0.3).sum())
    alone = answers(asked, max_num_seqs=1)
    assert [g.prompt_logprobs for g in alone] == [g.prompt_logprobs for g in found], "bit for bit"
    unasked = answers(plain)
    assert [(g.tokens, g.logprobs) for g in unasked[2::3]] == [(g.tokens, g.logprobs) for g in found[2::3]]


def test_sampled_answers_repeat_by_seed_alone_and_batched() -> None:
    target, drafter = pair()
    prompts = prompts_of(8, seed=4)
    params = [
        SamplingParams(max_tokens=40, ignore_eos=True, temperature=0.8, top_p=0.9, top_k=50, seed=i, logprobs=2)
        for i in range(8)
    ]
    together = make_engine(target, drafter).generate(prompts, params)
    alone = [
        make_engine(target, None, max_num_seqs=1).generate([p], s)[0] for p, s in zip(prompts, params, strict=True)
    ]
    assert sum(a.tokens == b.tokens for a, b in zip(together, alone, strict=True)) >= 7
    assert all(len(g.logprobs) == 40 for g in together)


@pytest.mark.parametrize("kind", ["qwen3", *OTHERS[:5]])  # experts are chosen by near ties too
def test_every_divergence_from_hugging_face_is_a_near_tie(kind: str) -> None:
    """At every token of an answer; ours equal the fp32 model's about as often as those of its bf16 model do."""
    target, _ = pair(kind)
    exact = copy.deepcopy(target.model).float()
    prompts = prompts_of(64, seed=5)
    answers = make_engine(target, None).generate(prompts, SamplingParams(max_tokens=48, ignore_eos=True))
    ours = theirs = 0
    for prompt, answer in zip(prompts, answers, strict=True):
        text = torch.tensor([prompt + answer.tokens], device="cuda")
        chosen = text[0, len(prompt) :, None]
        with torch.inference_mode():
            logits, sharp = (m(text).logits[0, len(prompt) - 1 : -1].float() for m in (target.model, exact))
        logprobs = logits.log_softmax(-1)
        assert (logprobs.amax(-1) - logprobs.gather(1, chosen)[:, 0] <= 0.2).all()
        best = sharp.argmax(-1)
        ours += int((chosen[:, 0] == best).sum())
        theirs += int((logits.argmax(-1) == best).sum())
    print(f"the exact model's choice: {ours} of ours, {theirs} of Hugging Face's of {64 * 48}")
    assert ours >= 0.9 * 64 * 48 and ours >= 0.98 * theirs


def test_no_garbage_is_collected_during_a_capture() -> None:
    """Garbage may hold graphs of a deleted engine; freeing a graph invalidates a capture in progress."""
    target, _ = pair()
    during: list[bool] = []

    def note(phase: str, info: dict[str, int]) -> None:
        during.append(torch.cuda.is_current_stream_capturing())

    thresholds = gc.get_threshold()
    gc.callbacks.append(note)
    gc.set_threshold(20)
    try:
        make_engine(target, None, max_num_seqs=1).generate([[1, 2, 3]], SamplingParams(max_tokens=4))
    finally:
        gc.set_threshold(*thresholds)
        gc.callbacks.remove(note)
    assert during and not any(during)


@pytest.mark.parametrize(("tokens", "way", "most"), [(512, "_launch_batch", 2), (4096, "packed", 8)])
def test_batched_prefills_differ_at_near_ties_only(
    tokens: int, way: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, drafter = pair()
    prompts, passes, real = prompts_of(24, seed=11), list[int](), getattr(PrefillPrograms, way)
    engine = make_engine(target, drafter, max_num_seqs=16, max_num_batched_tokens=tokens)

    def counted(prefills: PrefillPrograms, jobs: Sequence[PrefillJob], *size: int) -> PrefillPass | None:
        passes.append(len(jobs))
        return real(prefills, jobs, *size)

    monkeypatch.setattr(PrefillPrograms, way, counted)
    answers = engine.generate(prompts, SamplingParams(max_tokens=24, ignore_eos=True))
    assert sum(passes) >= 12 and max(passes) > most
    assert max(regret(target, prompt, a.tokens) for prompt, a in zip(prompts, answers, strict=True)) <= 0.2


def test_captures_succeed_while_a_thread_uses_the_device(caplog: pytest.LogCaptureFixture) -> None:
    target, drafter = pair()
    prompts, params = prompts_of(3, seed=6), SamplingParams(max_tokens=12, ignore_eos=True)
    expected = [a.tokens for a in make_engine(target, drafter, max_num_seqs=16).generate(prompts, params)]
    captured = make_engine(target, drafter, max_num_seqs=16)
    with ThreadPoolExecutor(1) as pool:
        capturing = pool.submit(lambda: all(iter(captured.prepare, False)))
        while not capturing.done():
            torch.empty(1 << 24, device="cuda").zero_().cpu()
            torch.cuda.empty_cache()
        assert capturing.result()
    assert asyncio.run(streamed(AsyncEngine(captured), prompts, params)) == expected
    assert not caplog.records


def test_the_cache_leaves_room_for_steps_with_all_their_logits() -> None:
    target, drafter = pair()
    runner: StepRunner = make_engine(target, drafter, max_num_seqs=64).runner
    workspace = workspace_of(runner, 512).total
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    run_all_parts(runner, 64, 16, Mode.FULL)
    torch.cuda.synchronize()
    assert 64 * 16 * VOCAB * 2 < torch.cuda.max_memory_allocated() - held <= workspace


def test_the_largest_passes_stay_inside_their_memory() -> None:
    """Under `scripts/memcheck.py`, which detects accesses beyond a tensor; otherwise checks that nothing fails."""
    for drafting in (pair()[1], None):
        runner: StepRunner = make_engine(pair()[0], drafting, max_num_seqs=3, max_model_len=LIMIT - 25).runner
        workspace_of(runner, 4096)
        for mode in Mode:
            run_all_parts(runner, 3, 16 if drafting else 1, mode)
        runner.check()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_an_engine_runs_on_the_given_gpu(tmp_path: Path) -> None:
    target, drafter = pair()
    target.model.save_pretrained(tmp_path / "target")
    make_tokenizer().save_pretrained(tmp_path / "target")
    save_drafter(drafter, tmp_path / "drafter")
    prompts, params = prompts_of(4), SamplingParams(max_tokens=24, ignore_eos=True)
    options = EngineOptions(max_num_seqs=4, kv_cache_tokens=4 * LIMIT, prefix_cache=False)
    found = {}
    for device in ("cuda:0", "cuda:1"):
        engine, _ = load_engine(str(tmp_path / "target"), str(tmp_path / "drafter"), device, options=options)
        assert str(engine.runner.device) == device
        found[device] = [a.tokens for a in engine.generate(prompts, params)]
        found[device, "thread"] = asyncio.run(streamed(AsyncEngine(engine), prompts, params))
    torch.cuda.set_device(0)
    assert all(tokens == found["cuda:0"] for tokens in found.values())


async def streamed(engine: AsyncEngine, prompts: list[list[int]], params: SamplingParams) -> list[list[int]]:
    async def one(prompt: list[int]) -> list[int]:
        with engine.decode([engine.request(prompt, params)]) as responses:
            return [token async for _, progress in responses for token in progress.tokens]

    try:
        return [await one(prompt) for prompt in prompts]
    finally:
        engine.close()


def rel(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize(("n", "k"), [(6144, 4096), (4096, 12288), (1152, 896), (896, 4864)])
def test_products_are_exact_to_bf16_and_batch_invariant(n: int, k: int) -> None:
    from dflash_toolkit.kernels import gpu, reference
    from dflash_toolkit.kernels.formats import RowScaledFp8

    x = torch.randn(128, k, device="cuda", dtype=torch.bfloat16)
    dense = torch.randn(n, k, device="cuda", dtype=torch.bfloat16) / k**0.5
    for weight in (dense, RowScaledFp8.of(dense)):
        exact = weight.dense(torch.float64) if isinstance(weight, RowScaledFp8) else weight.double()
        operations: list[tuple[Callable[..., Tensor], Tensor]] = [
            (gpu.linear, x.double() @ exact.T),
            (lambda *a: gpu.linear_split_k(*a).sum(0), x.double() @ exact.T),
            (gpu.linear_swiglu, reference.linear_swiglu(x.double(), exact)),
        ]
        for operation, expected in operations:
            whole = operation(x, weight)
            assert rel(whole, expected) < 5e-3
            for rows in (1, 2, 3, 5, 8, 16, 17, 32, 33, 64, 100, 127):
                assert torch.equal(operation(x[:rows], weight), whole[:rows])
            assert torch.equal(operation(x[77:78].contiguous(), weight)[0], whole[77])
        best = gpu.linear_argmax(x, weight)
        logits = (x.double() @ exact.T).float()
        chosen = logits.gather(1, best[:, None])[:, 0]
        # with a head in fp8 the rows are quantized too: 1/50 of a logit's spread, of which the largest is some four
        slack = 0.01 if isinstance(weight, Tensor) else 0.05
        assert (logits.amax(1) - chosen <= slack * logits.amax(1)).all()
        assert torch.equal(gpu.linear_argmax(x[:5], weight), best[:5])


@pytest.mark.parametrize("by_rows", [False, True], ids=["blocks", "rows"])
@pytest.mark.parametrize(("n", "k"), [(6144, 4096), (4096, 12288), (24576, 4096), (1280, 896)])
def test_block_products_are_exact_to_bf16_and_batch_invariant(n: int, k: int, by_rows: bool) -> None:
    from dflash_toolkit.kernels import gpu

    x = torch.randn(300, k, device="cuda", dtype=torch.bfloat16) * torch.logspace(-2, 2, 300, device="cuda")[:, None]
    x = x.to(torch.bfloat16)
    size = k if by_rows else BLOCK
    data, scale = quantize_groups(x, size)
    rows = data.double() * scale.double().repeat_interleave(size, 1)
    dense = torch.randn(n, k, device="cuda", dtype=torch.bfloat16) / k**0.5
    weight = BlockScaledFp8.of(dense, by_rows)
    product = rows @ weight.dense(torch.float64).T
    # fast accumulation cuts what whole rows add to 13 bits every 32 columns
    limit = 1e-2 + (k / 32 * 2.0**-14 if by_rows else 0)
    gate, up = product.chunk(2, 1)
    features = features_of(x.device)
    by_cublas = features.cublas_fp8_rows if by_rows else features.cublas_fp8_blocks and k % 512 == 0
    for operation in (gpu.linear, gpu.linear_split_k, gpu.linear_swiglu):
        exact = F.silu(gate) * up if operation is gpu.linear_swiglu else product
        split = operation is gpu.linear_split_k
        found = operation(x[:128], weight)
        assert rel(found.sum(0) if split else found, exact[:128]) < limit
        for count in (1, 2, 3, 8, 16, 17, 32, 33, 64, 100, 127):
            assert torch.equal(operation(x[:count], weight), found.narrow(int(split), 0, count)), count
        assert torch.equal(operation(x[77:78], weight), found.narrow(int(split), 77, 1))
        for count in (129, 130, 131, 256, 300):
            assert gpu.by_cublas(x[:count], weight) == by_cublas
            torch.cuda.empty_cache()
            torch.full((1 << 28,), 255, dtype=torch.uint8, device="cuda")  # unwritten memory is NaN in every format
            found = operation(x[:count], weight)
            assert rel(found[0] if split else found, exact[:count]) < limit, count
