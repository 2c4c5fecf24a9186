"""scripts/bench/step.py: the breakdown of a step by kernels, the experts that it reads, and the command line."""

from typing import Any

import pytest
import torch
from conftest import make_drafter, make_target
from torch import Tensor
from transformers import Qwen3MoeConfig

from dflash_toolkit.kernels import reference
from dflash_toolkit.kernels.ops import Reference
from dflash_toolkit.models.dflash.shape import drafter_shape
from dflash_toolkit.models.spec import ModelSpec
from dflash_toolkit.runtime import Engine, EngineOptions, SyntheticAcceptance, load_engine
from dflash_toolkit.runtime.request import StepShape
from dflash_toolkit.runtime.step_times import full_batch, launcher, random_tokens
from dflash_toolkit.sampling import SamplingParams
from scripts.bench import step as bench_step
from scripts.shapes import random_drafter, random_target

pytest.importorskip("triton")

CONTEXT = [("_linear_kernel", 3.0), ("_context_write_kernel", 1.0)]
HEAD = [("_argmax_kernel", 20.0), ("_reduce_kernel", 2.0)]
WIDE_LAYER = [("nvjet_tst_256x128_TNT", 50.0), ("_attention_kernel", 4.0), ("nvjet_tst_128x64_splitK_TNT", 20.0),
              ("void cublasLt::splitKreduce_kernel<32, 16>", 5.0), ("_add_rms_norm_kernel", 1.0)]  # fmt: skip
PYTORCHS_ARGMAX = "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<c10::BFloat16, at::native::ArgMaxOps>>"
LAYER = [("_rope_write_kernel", 1.0), ("_attention_kernel", 4.0), ("_merge_kernel", 1.0), ("layer_kernel", 100.0)]


def ends(step: list[tuple[str, float]], count: int) -> list[tuple[float, str]]:
    now, found = 1000.0, []
    for name, took in step * count:
        now += took
        found.append((now, name))
    return found


def test_step_breakdown_attributes_each_kernel() -> None:
    draft, verify = LAYER * 2, LAYER * 3
    step = [("embedding", 2.0), *draft, *HEAD, ("cat", 1.0), *verify, *HEAD, ("_accept_kernel", 1.0), *CONTEXT]
    found = bench_step.attribute(ends(step, 4))
    assert found == pytest.approx(
        {"gemms": 300.0, "draft": 214.0, "head": 44.0, "attention": 18.0, "context": 4.0, "rest": 2.0}
    )
    assert sum(found.values()) == pytest.approx(sum(took for _, took in step))


def test_selector_walk_counts_as_head() -> None:
    layer = [*LAYER[:3], ("_linear_kernel", 90.0), ("_conv_add_rms_norm_kernel", 2.0), ("_block_conv_kernel", 2.0)]
    head = [("_linear_kernel", 3.0), ("_top_kernel", 25.0), ("_merge_top_kernel", 2.0), ("_walk_kernel", 5.0)]
    step = [("embedding", 2.0), *layer * 2, *head, *LAYER * 3, *HEAD, ("_accept_kernel", 1.0), *CONTEXT]
    assert bench_step.attribute(ends(step, 4)) == pytest.approx(
        {"gemms": 300.0, "draft": 2 + 200 + 3, "head": 32 + 22, "attention": 18.0, "context": 4.0, "rest": 1.0}
    )


def test_partial_head_gemms_count_as_head() -> None:
    part = [("nvjet_tst_256x128_TNT", 50.0), ("_tile_top_kernel", 8.0)]
    top = [*part * 3, ("_merge_top_kernel", 3.0), ("_walk_kernel", 5.0)]
    argmax = [("nvjet_tst_256x128_TNT", 400.0), (PYTORCHS_ARGMAX, 70.0)]
    step = [("embedding", 2.0), *WIDE_LAYER, ("_linear_kernel", 3.0), *top, *WIDE_LAYER * 2, *argmax]
    assert bench_step.attribute(ends([*step, ("_accept_kernel", 1.0), *CONTEXT], 4)) == pytest.approx(
        {"head": 470.0 + 174 + 8, "gemms": 152.0, "draft": 82.0 + 3, "attention": 8.0, "context": 4.0, "rest": 1.0}
    )


def test_plain_step_has_no_draft_part() -> None:
    step = [("embedding", 2.0), *LAYER, *HEAD, ("_accept_kernel", 1.0)]
    assert bench_step.attribute(ends(step, 3)) == pytest.approx(
        {"gemms": 100.0, "head": 22.0, "attention": 6.0, "rest": 3.0}
    )


@pytest.mark.parametrize(
    "between",
    [[], [("Memset (Device)", 1.0)], [("void cublasLt::splitKreduce_kernel<32, 16>", 3.0), ("Memset (Device)", 1.0)]],
    ids=["nothing between", "cleared memory", "split"],
)
@pytest.mark.parametrize("gemm", ["nvjet_tst_256x128_TNT", "nvjet_tst_splitK_TNT", "sm90_xmma_gemm_bf16", "cutlass_80"])
def test_gemm_before_pytorch_argmax_counts_as_head(gemm: str, between: list[tuple[str, float]]) -> None:
    head = [(gemm, 400.0), *between, (PYTORCHS_ARGMAX, 70.0)]
    step = [("embedding", 2.0), *WIDE_LAYER, *head, ("cat", 1.0), *WIDE_LAYER * 2, *head, ("_accept_kernel", 1.0)]
    found = bench_step.attribute(ends([*step, *CONTEXT], 4))
    took = 470.0 + sum(us for _, us in between)
    assert found == pytest.approx(
        {"head": 2 * took, "gemms": 152.0, "draft": 82.0, "attention": 8.0, "context": 4.0, "rest": 2.0}
    )


def test_roofline_counts_experts_that_rows_choose() -> None:
    spec = ModelSpec.of_target(make_target("qwen3_moe", layers=2).config)  # two of five experts, then a dense layer
    weights = random_target(spec, torch.device("cpu"), torch.float32)
    read = [bench_step.step_bytes(weights, None, batch, block) for batch, block in ((1, 1), (2, 1), (1, 2), (64, 8))]
    experts = sum(t.nbytes for t in (weights.layers[0].ffn.gate_up, weights.layers[0].ffn.down))
    assert read[1] == read[2] and read[3] - read[0] == pytest.approx(0.6 * experts, abs=2)
    assert read[3] - read[1] == pytest.approx(0.6**2 * experts, abs=2)


@pytest.mark.slow
def test_rows_of_a_block_choose_experts_independently(monkeypatch: pytest.MonkeyPatch) -> None:
    experts, top, layers, wide = 32, 4, 12, 4.0
    config = Qwen3MoeConfig(
        vocab_size=1024, hidden_size=128, num_hidden_layers=layers, num_attention_heads=2, num_key_value_heads=1,
        head_dim=64, moe_intermediate_size=64, num_experts=experts, num_experts_per_tok=top, tie_word_embeddings=False,
    )  # fmt: skip
    cpu = torch.device("cpu")
    target = random_target(ModelSpec.of_target(config), cpu, torch.float32)
    for name, view in target.parameter_views(stacked=True).items():
        if view.dim() > 1 and "embed_tokens" not in name:
            view.mul_(wide)  # so that a layer adds to its rows what one of 2048 columns does
    drafter = random_drafter(drafter_shape(config, layers=1, taps=2), cpu, torch.float32)
    synthetic = SyntheticAcceptance(rate=0.8)
    options = EngineOptions(max_num_seqs=1, max_model_len=512, num_speculative_tokens=7, synthetic=synthetic)
    engine = Engine(target, drafter, (), options)
    blocks: list[int] = []
    real = reference.top_experts

    def top_experts(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        routing = real(*args, **kwargs)
        if len(routing[1]) == 8:
            blocks.append(len(routing[1].unique()))
        return routing

    monkeypatch.setattr(Reference, "top_experts", staticmethod(top_experts))
    with random_tokens(engine.runner):
        request = engine.submit(list(range(300, 556)), SamplingParams(max_tokens=40, ignore_eos=True))
        while not request.finished:
            engine.step()
    assert len(blocks) >= 8 * layers
    expected = experts * (1 - (1 - top / experts) ** 8)
    assert sum(blocks) / len(blocks) == pytest.approx(expected, rel=0.1)


# ---- the command line --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([], {"rate": 0.865}),
        (["--accept", "0.7", "--seed", "3"], {"rate": 0.7, "seed": 3}),
        (["--mean-length", "6.5", "--seed", "9"], {"mean_length": 6.5, "seed": 9}),
    ],
)
def test_acceptance_is_a_rate_or_a_mean_length(given: list[str], expected: dict[str, Any]) -> None:
    args, synthetic = bench_step.parse(given)
    assert synthetic == SyntheticAcceptance(**expected)
    assert (args.accept, args.mean_length) == (synthetic.rate, synthetic.mean_length), "as the results note them"
    assert args.read_tb_s is None, "the bandwidth is that of the GPU that runs"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--accept", "0.865", "--mean-length", "6"], "--mean-length: not allowed with argument --accept"),
        (["--accept", "1.5"], "synthetic rate is 1.5; it must be in [0, 1]"),
        (["--mean-length", "0.5"], "synthetic mean_length is 0.5; it must be >= 1"),
        (["--mean-length", "nan"], "synthetic mean_length is nan; it must be >= 1"),
        (["--logprobs", "50"], "--logprobs is 50; it must be in 0..20"),
        (["--zero-acceptance", "2", "--batch", "1", "8"], "is 2; every --batch has 1 requests at least"),
        (["--repeats", "0"], "--repeats is 0; it must be >= 1"),
        (["--short", "384"], "--short is 384; it must be less than --long"),
        (["--prompt", "8000"], "--prompt and --long are 8384 tokens; raise --max-model-len"),
    ],
)
def test_invalid_options_are_rejected(capsys: pytest.CaptureFixture[str], given: list[str], message: str) -> None:
    with pytest.raises(SystemExit) as stopped:
        bench_step.parse(given)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_missing_gpu_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_step.main([]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_timed_rows_use_their_own_recurrent_states() -> None:
    target = make_target("qwen3_5")
    engine = load_engine(target, make_drafter(target), options=EngineOptions(max_num_seqs=3, kv_cache_tokens=400))[0]
    runner = engine.runner
    with random_tokens(runner), full_batch(runner):
        runner.state.states.zero_()  # as after requests that have ended
        bench_step.fill(engine, 3, 20)
        step = launcher(runner, 3, StepShape(4))
        step()
        assert (runner.state.states[1] >= 1).all() and (runner.state.lengths > 20).all()
        step()
    for memory in runner._memories:
        assert not memory.state[0].any() and all(memory.state[slot].any() for slot in (1, 2, 3))
        assert not torch.equal(memory.state[1], memory.state[2])
    assert not runner.state.states.any() and not runner.state.lengths.any(), "as it was before"
