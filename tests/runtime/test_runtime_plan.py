"""Options follow the memory of a GPU: plans from shapes, without a GPU, and their agreement with what is allocated."""

import gc
import os
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import make_drafter, make_target
from other_gpus import use_gpu

from dflash_toolkit import Drafter, SamplingParams, UserError
from dflash_toolkit.kernels.delta import DeltaMemory
from dflash_toolkit.kernels.ops import Reference, ops_for
from dflash_toolkit.models.dflash.shape import drafter_shape
from dflash_toolkit.models.spec import ModelSpec
from dflash_toolkit.preflight import GIB
from dflash_toolkit.runtime import Engine, EngineOptions, memory
from dflash_toolkit.runtime.allocations import CountBytes
from dflash_toolkit.runtime.fit import Budget, advice, contexts_up_to, fit, log_fitted, planner_for, round_down
from dflash_toolkit.runtime.plan import LIBRARY_BYTES, Plan, Planner, runner_arguments
from dflash_toolkit.runtime.proposer import Draft
from dflash_toolkit.runtime.runner import StepRunner
from dflash_toolkit.runtime.sampler import Mode, Sampler
from dflash_toolkit.runtime.trees.budget import row_buckets
from dflash_toolkit.runtime.weights import DrafterWeights, TargetWeights
from scripts.shapes import named_shape, random_drafter, random_target

SHARED = "PYTEST_XDIST_WORKER" in os.environ  # tests of other processes may take memory of the same GPU

CUDA, CONFIG = torch.device("cuda"), named_shape("qwen3-8b")
PLANNER = Planner(ModelSpec.of_target(CONFIG), drafter_shape(CONFIG), torch.bfloat16, fused=False)
OPTIONS = EngineOptions(max_num_seqs=4, max_model_len=1000).fitted(PLANNER.spec, PLANNER.config, CUDA)


@pytest.mark.parametrize("kind", ["dflash", "dflash2", "dspine"])
@pytest.mark.parametrize("tied", [True, False])
def test_planned_weights_are_those_that_are_allocated(tied: bool, kind: str) -> None:
    target = make_target(tied=tied)
    drafter = Drafter(drafter_shape(target.config, taps=2, kind=kind))
    with CountBytes() as count:
        weights = TargetWeights.of_module(target.model, ModelSpec.of_target(target.config))
    planner = Planner(weights.spec, drafter.config, torch.float32, fused=False)
    assert planner.target_bytes == sum(view.nbytes for view in weights.parameter_views().values()) == count.held
    with CountBytes() as count:
        draft = DrafterWeights.of_module(drafter)
    assert planner.loaded - planner.target_bytes == count.held
    with CountBytes() as count:
        narrow = draft.quantized(weights.head)
    assert planner.copies_bytes == count.held and narrow.head is not None
    plans = [planner.plan(replace(OPTIONS, draft_dtype=each)) for each in ("full", "fp8")]
    assert plans[1].weights - plans[0].weights == count.held


def test_planned_tables_and_caches_are_those_of_an_engine() -> None:
    target = make_target()
    drafter, spec = make_drafter(target), ModelSpec.of_target(target.config)
    options = EngineOptions(max_num_seqs=3, max_model_len=100, draft_tree=15).fitted(spec, drafter.config, CUDA)
    plan = Planner(spec, drafter.config, torch.float32, fused=False).plan(options)
    arguments = runner_arguments(options, drafter.config) | {
        "max_context": 100 + drafter.config.block_size,
        "num_pages": 7,
    }
    weights = TargetWeights.of_module(target.model, spec), DrafterWeights.of_module(drafter)
    with CountBytes() as count:
        made = StepRunner(*weights, ops_for(torch.device("cpu")), **arguments)
    assert count.held == plan.tables + 7 * 64 * plan.token
    assert made.reach == plan.reach


# GiB that PyTorch reports, and the capability: RTX 4060, 4070, 5070 Ti, 4090, 5090, H100 and H200
CARDS = {8: (7.63, (8, 9)), 12: (11.6, (8, 9)), 16: (15.5, (12, 0)), 24: (23.6, (8, 9)), 32: (31.4, (12, 0)),
         80: (79.1, (9, 0)), 141: (139.8, (9, 0))}  # fmt: skip
WITH_DISPLAY = GIB  # held by the CUDA context and by a desktop
WITHOUT_DISPLAY = 2 * GIB // 5
FittedTo = Callable[..., tuple[EngineOptions, Plan, float]]


@pytest.fixture
def fitted_to(monkeypatch: pytest.MonkeyPatch) -> FittedTo:
    """Fits options to a card."""

    def fitted(card: int, shape: str, held: int = WITH_DISPLAY, kind: str = "dflash", **asked: Any) -> Any:
        gib, capability = CARDS[card]
        use_gpu(monkeypatch, capability)
        config, options, total = named_shape(shape), EngineOptions(**asked), int(gib * GIB)
        planner = planner_for(ModelSpec.of_target(config), drafter_shape(config, kind=kind), CUDA, torch.bfloat16)
        budget = Budget(options.memory_share(total), total, total - held).bytes
        return *fit(options, planner, budget, CUDA), budget

    return fitted


@pytest.mark.parametrize("kind", ["dflash", "dflash2"])
@pytest.mark.parametrize(
    ("card", "shape", "held", "context", "rows"),
    [
        (8, "qwen3-0.6b", WITH_DISPLAY, 16384, 8),
        (8, "qwen3-4b-fp8", WITHOUT_DISPLAY, 4096, 2),
        (12, "qwen3-4b", WITH_DISPLAY, 4096, 1),
        (12, "qwen3-4b", WITHOUT_DISPLAY, 6144, 4),
        (16, "qwen3-8b-fp8", WITH_DISPLAY, 8192, 4),
        (16, "qwen3-8b-fp8", WITHOUT_DISPLAY, 8192, 4),
        (24, "qwen3-8b", WITH_DISPLAY, 8192, 4),
        (24, "qwen3-8b", WITHOUT_DISPLAY, 8192, 8),
        (24, "llama3.1-8b", WITH_DISPLAY, 8192, 8),
        (32, "qwen3-8b", WITH_DISPLAY, 32768, 16),
        (32, "qwen3-14b-fp8", WITH_DISPLAY, 16384, 16),
    ],
)
@pytest.mark.sampled
def test_small_gpus_hold_a_useful_context(
    card: int, shape: str, held: int, context: int, rows: int, kind: str, fitted_to: FittedTo
) -> None:
    options, plan, budget = fitted_to(card, shape, held, kind)
    assert plan.fixed + plan.cache(options) <= budget <= 0.95 * CARDS[card][0] * GIB - held
    assert (options.max_model_len or 0) >= context and (options.max_num_seqs or 0) >= rows
    assert plan.tokens(budget) >= max(plan.reach, 900 * (options.max_num_seqs or 0))


LARGE_BATCHES = {
    "qwen2.5-0.5b": 256,
    "qwen3-4b": 128,
    "qwen3-8b": 128,
    "qwen3-14b": 64,
    "qwen3.8-27b-fp8": 64,
    "qwen3-30b-a3b": 32,
}


@pytest.mark.parametrize(("shape", "rows"), LARGE_BATCHES.items())
def test_on_large_gpus_only_the_batch_follows_the_memory(shape: str, rows: int, fitted_to: FittedTo) -> None:
    config = named_shape(shape)
    spec, drafter = ModelSpec.of_target(config), drafter_shape(config)
    options, plan, budget = fitted_to(80, shape)
    unlimited = EngineOptions(max_num_seqs=rows).fitted(spec, drafter, CUDA)
    context = {"qwen3.8-27b-fp8": 98_304}.get(shape, unlimited.max_model_len)  # of 262,144
    assert options == replace(unlimited, draft_dtype="fp8", max_model_len=context)
    assert plan.tokens(budget) >= 2048 * rows
    assert EngineOptions().memory_share(int(79.1 * GIB)) == 0.9


def test_a_batch_of_256_fits_an_8b_on_141_gib(fitted_to: FittedTo, caplog: pytest.LogCaptureFixture) -> None:
    options, plan, budget = fitted_to(141, "qwen3-8b")
    assert options.max_num_seqs == 256 and plan.tokens(budget) >= 2048 * 256
    log_fitted(EngineOptions(), replace(options, max_num_seqs=32), options, budget)
    assert not caplog.records, "32 requests are no shortage"


@pytest.mark.parametrize(
    ("shape", "rows"),
    [("qwen3.8-27b", 128), ("qwen3.6-35b-a3b", 256), ("qwen3.8-27b-fp8", 192), ("qwen3.6-35b-a3b-fp8", 256)],
)
def test_hybrid_targets_fit_141_gib_in_16_bits_and_fp8(shape: str, rows: int, fitted_to: FittedTo) -> None:
    options, plan, budget = fitted_to(141, shape)
    assert options.max_num_seqs == rows and plan.missing(options, budget) <= 0
    assert options.max_model_len == 262_144 and plan.tokens(budget) >= 2048 * rows


def test_64_requests_of_8k_tokens_fit_80_gib_with_fp8(fitted_to: FittedTo) -> None:
    """Of the 27B in FP8, whose weights take 33 GiB, and recurrent states 16."""
    asked = {"max_num_seqs": 64, "max_model_len": 8192}
    options, plan, budget = fitted_to(80, "qwen3.8-27b-fp8", **asked, kv_cache_tokens=64 * 8192, kv_cache_dtype="fp8")
    assert plan.missing(options, budget) <= 0
    options, plan, budget = fitted_to(80, "qwen3.8-27b-fp8", **asked)
    assert plan.missing(options, budget) <= 0 and plan.tokens(budget) < 64 * 8192, "in 16 bits, some wait"
    options, plan, budget = fitted_to(80, "qwen3.8-27b-fp8", **asked, kv_cache_tokens=64 * 8192)
    missing = plan.missing(options, budget)
    planner = Planner(ModelSpec.of_target(named_shape("qwen3.8-27b-fp8")), None, torch.bfloat16, fused=True)
    assert missing > GIB and ", --kv-cache-dtype fp8 frees" in advice(planner, options, missing)


def test_a_cache_of_given_size_bounds_large_batches(fitted_to: FittedTo) -> None:
    for tokens, rows in ((20_000, 32), (200_000, 96), (350_000, 128)):
        assert fitted_to(80, "qwen3-4b", kv_cache_tokens=tokens)[0].max_num_seqs == rows


# GiB allocated at most by scripts/bench/step.py in plain decoding, with batch, cache and the other sizes: the files
# shapes_fp8_h100, shapes_fp8_h200 and step_qwen3_8b_bf16_h200 of `git show 4470a42:scripts/results/NAME.json`
@pytest.mark.parametrize(
    ("shape", "batch", "cache", "recorded"),
    [
        ("qwen3-8b-fp8", 1, 8448, 13.75),
        ("qwen3-8b-fp8", 32, 270336, 54.93),
        ("qwen3.8-27b-fp8", 1, 8448, 34.62),
        ("qwen3.8-27b-fp8", 32, 270336, 60.42),
        ("qwen3.6-35b-a3b-fp8", 32, 270336, 48.44),
        ("qwen3-8b", 1, 8448, 20.21),
        ("qwen3-8b", 32, 270336, 61.39),
    ],
)
def test_plans_agree_with_recorded_peaks(shape: str, batch: int, cache: int, recorded: float) -> None:
    config = named_shape(shape)
    planner = Planner(ModelSpec.of_target(config), drafter_shape(config), torch.bfloat16, fused=True)
    options = EngineOptions(
        max_num_seqs=batch, max_model_len=2048, kv_cache_tokens=cache, num_speculative_tokens=0, prefix_cache=False
    ).fitted(planner.spec, planner.config, CUDA)
    plan = planner.plan(replace(options, draft_dtype="fp8"))
    passes = recorded * GIB - plan.certain - plan.cache(options)
    assert 0 < passes < max(plan.step, plan.prefill), "the rest is the largest pass"


@pytest.mark.slow
def test_given_options_are_kept_on_a_small_gpu(fitted_to: FittedTo) -> None:
    given = {"max_num_seqs": 16, "max_model_len": 3000, "draft_tree": 31, "max_num_batched_tokens": 4096}
    options, plan, budget = fitted_to(12, "qwen3-4b", **given)
    assert all(getattr(options, name) == value for name, value in given.items())
    assert plan.missing(options, budget) > 0, "which is reported, and not changed"
    options, plan, budget = fitted_to(16, "qwen3-8b-fp8", max_model_len=8192)
    assert options.max_model_len == 8192 and plan.missing(options, budget) <= 0 and options.max_num_seqs == 4


def test_every_option_of_the_advice_frees_what_it_says() -> None:
    planner = Planner(PLANNER.spec, PLANNER.config, torch.bfloat16, fused=True)
    options = EngineOptions(max_num_seqs=64, draft_dtype="fp8").fitted(planner.spec, planner.config, CUDA)
    plan = planner.plan(options)
    said = advice(planner, options, 4 * GIB, 0.9, 80 * GIB)
    needed = plan.fixed + plan.cache(options)
    found = re.findall(r"--([a-z-]+) (\w+|[\d.]+) (?:frees|gives) ([\d.]+) GiB", said)
    names = [name.replace("-", "_") for name, *_ in found]
    assert names == [
        "max_model_len", "draft_tree", "max_num_seqs", "max_num_batched_tokens", "draft_dtype", "gpu_memory_utilization"
    ]  # fmt: skip
    for name, (_, value, size) in list(zip(names, found, strict=True))[:4]:
        changed = replace(options, **{name: int(value)})
        less = planner.plan(changed)
        assert float(size) == pytest.approx((needed - less.fixed - less.cache(changed)) / GIB, abs=0.051) and less
    assert found[4][1:] == ("full", f"{planner.copies_bytes / GIB:.1f}") and found[5][1:] == ("0.95", "4.0")


def test_advice_for_a_pair_that_is_too_large_names_its_parts() -> None:
    least = EngineOptions(max_num_seqs=1, max_model_len=1024, max_num_batched_tokens=512, draft_tree=0)
    said = advice(PLANNER, least.fitted(PLANNER.spec, PLANNER.config, CUDA), 3 * GIB)
    assert said == "use a smaller target or drafter, no drafter frees 2.0 GiB; an FP8 target needs 6.5 GiB less"


@pytest.mark.parametrize("missing", [1, 20 << 20])
def test_advice_on_a_few_mib_names_an_option(missing: int) -> None:
    least = EngineOptions(
        max_num_seqs=1, kv_cache_tokens=9000, max_num_batched_tokens=512, draft_tree=0, prefix_cache=False
    )
    said = advice(PLANNER, least.fitted(PLANNER.spec, PLANNER.config, CUDA), missing)
    tokens, freed = re.findall(r"^--kv-cache-tokens (\d+) frees ([\d.]+) MiB; an FP8 target", said)[0]
    assert int(tokens) < 9000 and float(freed) * 2**20 >= missing


def test_fitted_options_are_logged_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    asked = EngineOptions(max_num_seqs=2)
    fitted = asked.fitted(PLANNER.spec, PLANNER.config, CUDA)
    log_fitted(asked, fitted, fitted, 9 * GIB)
    assert not caplog.records
    log_fitted(asked, replace(fitted, max_num_seqs=1, max_model_len=4096, draft_tree=0), fitted, 9 * GIB)
    (line,) = caplog.messages
    assert line == (
        "to fit into 9.0 GiB of GPU memory, the engine uses --max-model-len 4096 (default 40960), --draft-tree 0 "
        "(default 63)"
    )


def test_contexts_do_not_change_with_little_memory() -> None:
    assert [round_down(n) for n in (1000, 1100, 4095, 5000, 33000, 40959)] == [960, 1024, 3840, 4608, 32768, 36864]
    found = contexts_up_to(40960)
    assert found[0] == 1024 and found[-1] == 40960 and len(found) < 60
    assert contexts_up_to(700) == [700]


def test_plans_hold_what_tree_rows_of_recurrent_layers_keep() -> None:
    config = named_shape("qwen3.8-27b")
    planner = Planner(ModelSpec.of_target(config), drafter_shape(config), torch.bfloat16, fused=False)
    chains, trees = (
        EngineOptions(max_num_seqs=4, max_model_len=2000, draft_tree=15, draft_tree_width=width, draft_dtype="full")
        for width in (1, 8)
    )
    plans = [planner.plan(each.fitted(planner.spec, planner.config, CUDA)) for each in (chains, trees)]
    runner = StepRunner(
        planner._target, None, Reference(), num_pages=1, page_size=64, max_num_seqs=4, max_context=64, max_block=16
    )
    with CountBytes() as count:
        nodes = runner.verifier.stack.nodes(row_buckets(4)[-1])
    assert plans[1].step - plans[0].step == count.held > 0 and len(nodes.inputs) == 48


def test_80_gib_hold_32_requests_of_8k_tokens_of_a_27b_in_fp8() -> None:
    """With its drafter, copies of that and of its head in fp8, and as many states for prefixes; 4 GiB for steps."""
    meta, config = torch.device("meta"), named_shape("qwen3.8-27b-fp8")
    spec, shape = ModelSpec.of_target(config), drafter_shape(config, block_size=8)
    weights = TargetWeights.empty(spec, meta, torch.bfloat16)
    with meta:
        drafter = sum(parameter.nbytes for parameter in Drafter(shape).bfloat16().parameters())
    taken = [sum(view.nbytes for view in weights.parameter_views().values()), 1.5 * drafter, weights.head.nbytes / 2]
    taken += [8192 * 32 * 2 * each.kv_values_per_token for each in (spec, shape.spec())]
    states = 0
    for net in spec.delta_nets:
        sizes = (net.taps, net.channels, net.num_heads, (net.k_head_dim, net.head_dim))
        memory = DeltaMemory.empty(65, 8, *sizes, torch.bfloat16, meta)
        states += sum(getattr(memory, name).nbytes for name in ("state", "window", "inputs", "gates"))
    assert 65 * 144 << 20 < states < 65 * 155 << 20, "144 MiB each, and no copies for the rows of a block"
    assert sum(taken) + states + 5 * GIB < 0.9 * 79 * GIB


@pytest.mark.parametrize("drafted", ["greedy", "sampled"])
@pytest.mark.slow
def test_edited_logits_take_memory_of_a_few_rows_only(drafted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    batch, block, vocab, cpu = 40, 4, 1000, torch.device("cpu")
    hidden, head = torch.randn(batch * block, 8), torch.randn(vocab, 8)
    tokens = torch.randint(vocab, (batch, block - 1))
    draft = Draft(tokens)
    if drafted == "sampled":
        q = torch.rand(batch, block - 1, 5).softmax(-1)
        draft = Draft(tokens, candidates=torch.randint(vocab, (batch, block - 1, 5)), q=q)
    lengths, rows = torch.arange(batch, dtype=torch.int32) + 5, torch.arange(batch)
    sampler = Sampler(batch, vocab, cpu, ops_for(cpu))
    for row in range(batch):
        params = SamplingParams(temperature=row % 3 / 2, presence_penalty=0.5, seed=row, logprobs=2)
        sampler.set(row, params, [1, 2], [3], limit=20)
    masks = torch.full((batch * block, 32), -2, dtype=torch.int32), torch.arange(batch * block, dtype=torch.int32)
    inside = torch.ones(batch * block, block - 1, dtype=torch.bool)
    paths = rows.repeat_interleave(block), torch.arange(batch * block, dtype=torch.int32), tokens[rows].repeat(block, 1)

    def run(some: int) -> tuple[int, list[torch.Tensor]]:
        monkeypatch.setattr("dflash_toolkit.runtime.sampler.EDITED_ROWS", some)
        found: list[torch.Tensor | None] = []
        with CountBytes() as count:
            for mode, given in ((Mode.FULL, None), (Mode.MASKED_FULL, masks)):
                found += sampler.choose(hidden, head, rows, draft, lengths, mode, given)
            choice, logits = sampler.choose_edited(hidden, head, *paths, inside)
            found += [choice, sampler.logprobs(logits, choice, batch)]
        return count.peak, [each for each in found if each is not None]

    (little, expected), (much, at_once) = run(8), run(10**6)
    assert all(torch.equal(*each) for each in zip(expected, at_once, strict=True)) and len(expected) == 6
    assert little < batch * block * vocab * 10 < much / 4


@pytest.fixture(scope="module")
def small_pair() -> tuple[TargetWeights, DrafterWeights]:
    """Qwen3-0.6B with the vocabulary and the context of the larger ones, and a drafter."""
    config = named_shape("qwen3-0.6b")
    target = random_target(ModelSpec.of_target(config), CUDA, torch.bfloat16)
    return target, random_drafter(drafter_shape(config), CUDA, torch.bfloat16)


@pytest.mark.gpu
def test_measured_memory_does_not_exceed_the_plan(small_pair: tuple[TargetWeights, DrafterWeights]) -> None:
    target, drafter = small_pair
    asked = EngineOptions(max_num_seqs=2, max_model_len=4096, draft_tree=63, draft_dtype="full")
    engine = Engine(target, drafter, [], asked)
    plan = Planner(target.spec, drafter.config, torch.bfloat16, fused=False).plan(engine.options)
    measured = memory.workspace_of(engine.runner, 1024)

    def driver() -> int:
        """Bytes in use that are not PyTorch's."""
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        return total - free - torch.cuda.memory_reserved()

    before, captured = driver(), len(engine.runner.graphs.captured)
    while engine.prepare():
        pass
    graphs = len(engine.runner.graphs.captured) - captured
    taken = driver() - before
    print(f"planned {plan}; measured {measured}; {graphs} graphs take {taken >> 20} MiB")
    assert measured.step <= plan.step and measured.prefill <= plan.prefill
    assert graphs > 100 and (SHARED or taken <= plan.graphs + LIBRARY_BYTES)


@pytest.mark.gpu
def test_an_engine_fits_into_what_other_programs_leave(
    small_pair: tuple[TargetWeights, DrafterWeights], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    target, drafter = small_pair
    gc.collect()
    torch.cuda.empty_cache()
    real = torch.cuda.mem_get_info

    def free() -> int:
        return -torch.cuda.memory_reserved() if SHARED else real()[0]

    left = free() - int(2.5 * GIB)  # as if other programs held the rest of a card of 12 GiB
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (max(free() - left, 0), 12 * GIB))
    engine = Engine(target, drafter, [], EngineOptions(draft_dtype="full"))
    context = engine.options.max_model_len or 0
    assert 1024 <= context < target.spec.context_limit == 40960 and engine.context_limit == context
    assert any("to fit into" in line and f"--max-model-len {context}" in line for line in caplog.messages)
    prompt = torch.randint(0, 100000, (context - 40,), generator=torch.Generator().manual_seed(1)).tolist()
    params = SamplingParams(max_tokens=16, ignore_eos=True)
    assert all(len(each.tokens) == 16 for each in engine.generate([prompt, [1, 2, 3]], params))
    while engine.prepare():
        pass
    torch.cuda.synchronize()
    assert free() > left, "all graphs fit, too"
    with pytest.raises(UserError, match=r"GiB short of one request of 40960 tokens; --max-model-len \d+ frees"):
        Engine(target, drafter, [], EngineOptions(max_model_len=40960, draft_dtype="full"))
