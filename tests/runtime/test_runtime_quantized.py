"""FP8 drafting: how the engine stores and uses the weights; answers do not change."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import make_engine, pair, prompts_of
from torch import Tensor

from dflash_toolkit import SamplingParams, generate
from dflash_toolkit.kernels.formats import RowScaledFp8
from dflash_toolkit.runtime import Engine
from dflash_toolkit.runtime import weights as model
from dflash_toolkit.runtime.stack import Stack


def test_an_fp8_drafter_is_close_and_changes_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    passes: list[bool] = []  # whether each pass of the drafter runs in eight bits
    forward = Stack.forward

    def noted(stack: Stack, x: Tensor, *rest: Any) -> Tensor:
        if stack.spec == weights.spec:
            passes.append(isinstance(stack.layers[0].ffn.down, RowScaledFp8))
        return forward(stack, x, *rest)

    monkeypatch.setattr(model, "WIDE_IN_FP8", 0)
    monkeypatch.setattr(Stack, "forward", noted)
    target, drafter = pair("qwen3")
    engine = make_engine(target, drafter, draft_dtype="fp8")
    weights = engine.runner.drafter
    assert weights is not None and isinstance(weights.head, RowScaledFp8)
    prompts = prompts_of(5, 18)
    params = SamplingParams(max_tokens=20)
    for prompt, got in zip(prompts, engine.generate(prompts, params), strict=True):
        assert got.tokens == generate(target, None, prompt, params).tokens
    assert passes and all(passes)
    assert isinstance(weights.layers[0].mixer.qkv, Tensor), "has a launch of its own, in bf16"
    for name, matrix in (("down", weights.layers[1].ffn.down), ("o", weights.layers[0].mixer.o)):
        assert isinstance(matrix, RowScaledFp8)
        exact = drafter.layers[1].mlp.down_proj.weight if name == "down" else drafter.layers[0].self_attn.o_proj.weight
        error = (matrix.dense(torch.float32) - exact).norm() / exact.norm()
        assert 0.001 < error < 0.04, "e4m3 keeps three bits after the leading one"


@pytest.mark.parametrize("size", [0.01, 1.0, 90.0])
def test_norms_before_cast_rows_are_of_the_order_of_one(size: float) -> None:
    weights = make_engine(*pair("qwen3")).runner.drafter
    for layer in weights.layers:
        for norm in (layer.input_norm, layer.post_norm):
            norm.copy_(size * (0.5 + torch.rand(len(norm))))
    for i, layer in enumerate(weights.layers):
        quantized = layer.quantized(first=i == 0)
        pairs = [(layer.post_norm, quantized.post_norm, layer.ffn.gate_up, quantized.ffn.gate_up)]
        if i > 0:
            pairs.append((layer.input_norm, quantized.input_norm, layer.mixer.qkv, quantized.mixer.qkv))
        for old, new, matrix, narrow in pairs:
            assert isinstance(narrow, RowScaledFp8)
            assert 0.5 < float(new.square().mean().sqrt()) < 2
            exact = matrix * old
            error = (narrow.dense(torch.float32) * new - exact).norm() / exact.norm()
            assert 0.001 < error < 0.04, "what the one lost the other has"
        if i == 0:
            assert quantized.mixer.qkv is layer.mixer.qkv and quantized.input_norm is layer.input_norm


def test_step_times_of_quantized_weights_are_cached_separately(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    engine = make_engine(*pair(), max_num_seqs=1, num_speculative_tokens=None)
    weights = engine.runner.drafter
    for kind, files in (("auto", 1), ("full", 1), ("fp8", 2), ("fp8", 2), ("auto", 2)):
        again = Engine(engine.runner.target, weights, (), replace(engine.options, draft_dtype=kind))
        assert len(list(tmp_path.rglob("times-*.json"))) == files
        assert again.runner.drafter is not None and (again.runner.drafter.head is None) == (kind != "fp8")
    assert weights is not None and weights.head is None, "the given weights are unchanged"


def test_layers_of_small_models_are_not_quantized() -> None:
    weights = make_engine(*pair("qwen3"), draft_dtype="fp8").runner.drafter
    assert weights is not None and isinstance(weights.head, RowScaledFp8)
    assert all(isinstance(layer.mixer.o, Tensor) for layer in weights.layers)


def test_layers_of_several_launches_are_not_quantized(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "WIDE_IN_FP8", 0)
    weights = make_engine(*pair("qwen3")).runner.drafter
    (first, *rest), size = weights.layers, weights.spec.hidden_size
    last = weights.layers[-1]
    biased = replace(last, mixer=replace(last.mixer, o_bias=torch.zeros(size)))
    for layers, in_fp8 in (([first, *rest], True), ([first, biased], False)):
        weights.layers = layers
        quantized = weights.quantized(torch.randn(40, size))
        assert all(isinstance(layer.ffn.down, RowScaledFp8) == in_fp8 for layer in quantized.layers)
        assert isinstance(quantized.head, RowScaledFp8)
