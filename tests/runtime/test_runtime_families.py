"""Every family of targets, in 16 bits and in FP8, under all events in a server, and published drafters from files."""

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES, Architecture
from conftest import LONG_RUN, make_dflash2, make_drafter
from damage import damage
from engines import SAMPLINGS, alone, check_drafts, knowing, make_engine, prompts_of, same
from fp8_targets import CHANGES, SIZES, in_fp8, in_modules
from mxfp4_targets import random_mxfp4_
from planted_trees import planting
from small_vocabulary import hf_greedy

from dflash_toolkit import SamplingParams, Target, generate, load_drafter, save_drafter
from dflash_toolkit.kernels.formats import DENSE, MXFP4
from dflash_toolkit.kernels.loss_terms import PLAIN
from dflash_toolkit.models.spec import FULL, SLIDING, ModelSpec
from dflash_toolkit.runtime import EngineOptions, load_engine

FP8_FAMILIES = ["Qwen3.5-MoE", "Qwen3-Next"]  # between them they have every kind of layer
if LONG_RUN:
    FP8_FAMILIES += ["Qwen3", "Qwen3-MoE", "Qwen3.5", "Phi-3", "GLM-4", "OLMo 2", "Granite", "Qwen2-MoE", "GLM-4-MoE"]
    FP8_FAMILIES += ["Gemma 4"]
OTHER_FAMILIES = ["Phi-3", "Granite", "SmolLM3", "OLMo 2", "OLMo 3", "GLM-4", "gpt-oss", "Qwen2-MoE", "GLM-4-MoE"]
OTHER_FAMILIES += ["Ernie 4.5", "Llama 4", "Llama 4 with images"]
FAMILIES: dict[str, dict[str, Any]] = {
    "Gemma 2": {"query_pre_attn_scalar": 20, "attn_logit_softcapping": 0.7},
    "Gemma 3": {
        "rope_parameters": {
            SLIDING: {"rope_type": "default", "rope_theta": 1e4},
            FULL: {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        }
    },
    "Gemma 4 12B": {},
    "Gemma 4 26B-A4B": {},
    "Gemma 4 E2B with images": {},
    "Qwen2": {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2},
    **{name: {} for name in (*FP8_FAMILIES, *OTHER_FAMILIES)},
}
TREES = ["Gemma 3", "Gemma 4 12B", "Llama 4 with images"]  # drafts are trees, not chains
# only here, as its text model is a copy of Gemma 4's
UNIFIED = Architecture("Gemma 4 12B", "Gemma4UnifiedTextConfig", ARCHITECTURES["Gemma 4"].options)
LONG = SamplingParams(max_tokens=20, ignore_eos=True)


@pytest.mark.parametrize("name", FAMILIES)
def test_answers_equal_transformers_under_random_events(name: str) -> None:
    architecture = ARCHITECTURES.get(name, UNIFIED)
    assert check_whatever_happens(architecture.target(**FAMILIES[name]), trees=name in TREES) == 0


@pytest.mark.skipif(not LONG_RUN or torch.cuda.is_available(), reason="the interpreter takes a minute")
@pytest.mark.parametrize("trees", [False, True], ids=["chains", "trees"])
def test_kernels_draft_across_the_start_of_a_chunk(trees: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from dflash_toolkit.kernels.gpu import Gpu

    monkeypatch.setattr("dflash_toolkit.runtime.engine.ops_for", lambda _: Gpu())
    target, (prompt,) = ARCHITECTURES["Llama 4"].target(), prompts_of(13)
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    answers = {tuple(prompt): generate(target, None, prompt, params).tokens}
    engine = make_engine(
        target, make_drafter(target, taps=1), max_num_seqs=1, max_model_len=40, draft_tree=8 if trees else 0
    )
    if not trees:
        knowing(engine, answers, lambda position: position % 6 == 0)
    with planting(engine, answers) if trees else contextlib.nullcontext():
        assert engine.generate([prompt], params)[0].tokens == answers[tuple(prompt)]
    assert engine.stats.accepted > engine.stats.generated_tokens / 2


@pytest.mark.parametrize("name", ["Gemma 2", "Granite"])
def test_sampling_and_logprobs_use_scaled_logits(name: str) -> None:
    target, (prompt,) = ARCHITECTURES[name].target(**FAMILIES[name]), prompts_of(9)
    assert ModelSpec.of_target(target.config).logit_scale != PLAIN
    params = [*SAMPLINGS[:5], SamplingParams(max_tokens=2, prompt_logprobs=3)]
    for got, each in zip(make_engine(target, None).generate([prompt] * 6, params), params, strict=True):
        expected = alone(target, None, prompt, each)
        assert same(got, expected)
        assert got.prompt_logprobs is None or each.prompt_logprobs
        assert [t.chosen for t in got.logprobs] == pytest.approx([t.chosen for t in expected.logprobs], abs=1e-4)


@pytest.mark.parametrize("name", FP8_FAMILIES if LONG_RUN else ["Qwen3.5"])
def test_fp8_answers_equal_transformers_under_load(name: str, tmp_path: Path) -> None:
    in_fp8(ARCHITECTURES[name].target(**SIZES | CHANGES.get(name, {})), tmp_path)
    with in_modules(tmp_path) as target:
        # a value between two numbers of the format may round to the other one if sums are split differently
        assert check_whatever_happens(target) <= 2


def check_whatever_happens(target: Target, *, trees: bool = False) -> int:
    """Runs ragged prompts with a common prefix, too few pages and mostly accepted drafts; one request is cancelled, and
    others end at their limit or at a token inside a block. Returns the number of answers that differ after a near tie.
    """
    drafter = make_drafter(target, taps=1)
    shared, *tails = prompts_of(12, 3, 17, 5, 9, 2)
    prompts = [prompts_of(1, seed=8)[0], *(shared + tail for tail in tails)]
    texts = [generate(target, None, prompt, LONG).tokens for prompt in prompts]
    assert texts[1] == hf_greedy(target, prompts[1], 20, eos=())
    engine = make_engine(
        target, drafter, max_num_seqs=4, kv_cache_tokens=80, prefix_states=3, draft_tree=20 if trees else 0
    )
    answers = {tuple(p): t for p, t in zip(prompts, texts, strict=True)}
    if not trees:
        knowing(engine, answers, lambda position: position % 6 == 0)
    stop = next(i for i, token in enumerate(texts[2]) if i > 2 and token not in texts[2][:i])
    params = [LONG] * 6
    params[2] = replace(LONG, stop_token_ids=(texts[2][stop],), ignore_eos=False)
    params[3] = replace(LONG, max_tokens=11)
    expected = [*texts[:2], texts[2][: stop + 1], texts[3][:11], *texts[4:], *texts[:2]]
    with planting(engine, answers) if trees else contextlib.nullcontext():
        requests = [engine.submit(*each) for each in zip(prompts[:5], params[:5], strict=True)]
        while len(requests[4].tokens) < 3:
            engine.step()
        engine.cancel(requests[4])
        requests.append(engine.submit(prompts[5], params[5]))
        requests += [engine.submit(prompt, LONG) for prompt in prompts[:2]]  # again, after kept pages
        while engine.step():
            pass
    engine.pool.check()
    assert requests[4].cancelled and all(request.finished for request in requests if not request.cancelled)
    assert min(engine.stats.preemptions, engine.stats.cached_prompt_tokens) > 0
    assert engine.stats.accepted > engine.stats.generated_tokens / 2
    otherwise = 0
    for request, text in zip(requests, expected, strict=True):
        found = request.tokens
        if found != (text[: len(found)] if request.cancelled else text):
            at = next(i for i, (ours, theirs) in enumerate(zip(found, text, strict=False)) if ours != theirs)
            logits = target.forward(torch.tensor([request.prompt_ids + text[:at]]), logits="all").logits[0, -1]
            assert logits.max() - logits[found[at]] < 0.15 * logits.std()
            otherwise += 1
    return otherwise


PUBLISHED = {  # the drafter's part of a configuration, as model pages have it, and its target's layers
    "Qwen3.8-27B-DFlash2": ("Qwen3.5", {"layers": 5, "layer_types": (SLIDING,) * 5}, {}),
    "Qwen3.6-27B-DFlash": ("Qwen3.5", {"layers": 5, "layer_types": (*[SLIDING] * 4, FULL)}, {}),
    "gpt-oss-20b-DFlash": ("gpt-oss", {"layers": 6}, {}),  # the target's experts are in MXFP4
    "gemma-4-26B-A4B-it-DFlash": (
        "Gemma 4 26B-A4B",
        {"layers": 5, "layer_types": (*[SLIDING] * 4, FULL), "final_logit_softcapping": 30.0},
        {},
    ),
    "Qwen3.6-35B-A3B-DFlash": (
        "Qwen3.5-MoE",
        {"layers": 6, "taps": 8},
        {"num_hidden_layers": 12, "layer_types": [*["linear_attention"] * 3, FULL] * 3},
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_drafters_of_published_forms_are_served_as_they_are(name: str, tmp_path: Path) -> None:
    """Bidirectional windows, a large rope base, and a block size in a nested key only."""
    architecture, changes, layers = PUBLISHED[name]
    source = ARCHITECTURES[architecture].target(**layers)
    source.model.save_pretrained(tmp_path / "target")
    source.tokenizer.save_pretrained(tmp_path / "target")
    if architecture == "gpt-oss":
        random_mxfp4_(tmp_path / "target")
    windows = {"sliding_window": 12, "is_causal": False} if "layer_types" in changes else {}
    make = make_dflash2 if name.endswith("2") else make_drafter
    save_drafter(make(source, rope_theta=1e7, **changes | windows), tmp_path / "drafter")
    damage(tmp_path / "drafter/config.json", dict.fromkeys(("block_size", "rope_theta", "dflash_toolkit")))
    models = (
        Target.load(str(tmp_path / "target"), "cpu", "float32"),
        load_drafter(str(tmp_path / "drafter"), dtype=torch.float32),
    )
    models[0].model.float()  # transformers 5.17 dequantizes MXFP4 to bf16
    config = models[1].config
    assert (config.block_size, config.rope_theta, config.is_causal) == (8, 1e7, False)
    assert (config.num_layers, len(config.target_layer_ids)) == (changes["layers"], changes.get("taps", 3))
    options = EngineOptions(
        page_size=4, max_num_seqs=3, max_num_batched_tokens=16, kv_cache_tokens=600, num_speculative_tokens=7
    )
    engine, _ = load_engine(str(tmp_path / "target"), str(tmp_path / "drafter"), "cpu", "float32", options)
    expected = {DENSE, MXFP4} if architecture == "gpt-oss" else {DENSE}
    assert engine.runner.target.spec.formats == expected, "read as they are"
    check_drafts(engine, models, prompts_of(1, 17, 30), SamplingParams(max_tokens=9, ignore_eos=True))
