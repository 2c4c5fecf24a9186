"""Mixtures of experts in the engine: equality with transformers, both checkpoint formats, and timing."""

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_target
from engines import make_engine, pair
from safetensors.torch import save_file
from torch import Tensor
from transformers import GptOssConfig, Qwen3_5MoeTextConfig, Qwen3MoeConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeSparseMoeBlock
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from dflash_toolkit.checkpoint.reader import load_weights
from dflash_toolkit.kernels import reference
from dflash_toolkit.models.spec import MlpSpec, ModelSpec, MoeSpec
from dflash_toolkit.runtime.programs.context import Part
from dflash_toolkit.runtime.stack import Moe
from dflash_toolkit.runtime.step_times import measure_steps
from dflash_toolkit.runtime.timing import shapes_to_measure
from dflash_toolkit.runtime.weights import MoeWeights, TargetWeights

CPU = torch.device("cpu")
SIZES = {"hidden_size": 32, "num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
BLOCKS = {
    "weights of a softmax": (Qwen3MoeSparseMoeBlock, Qwen3MoeConfig(**SIZES, norm_topk_prob=False)),
    "weights that sum to 1": (Qwen3MoeSparseMoeBlock, Qwen3MoeConfig(**SIZES, norm_topk_prob=True)),
    "a shared expert": (
        Qwen3_5MoeSparseMoeBlock,
        Qwen3_5MoeTextConfig(**SIZES, shared_expert_intermediate_size=24),
    ),
    "clamped experts with biases": (
        GptOssMLP,
        GptOssConfig(hidden_size=32, intermediate_size=24, num_local_experts=7, num_experts_per_tok=3),
    ),
}


@pytest.mark.parametrize("kind", BLOCKS)
def test_experts_equal_those_of_transformers(kind: str) -> None:
    block, config = BLOCKS[kind]
    theirs = block(config)
    for parameter in theirs.parameters():
        parameter.data.normal_()
    shared = kind == "a shared expert"
    normalized = getattr(config, "norm_topk_prob", True)
    clamp = (config.swiglu_alpha, config.swiglu_limit) if isinstance(config, GptOssConfig) else None
    spec = MoeSpec(num_experts=7, top_k=3, intermediate_size=24, normalized=normalized, shared=shared, clamp=clamp)
    weights = MoeWeights.empty(spec, 32, torch.empty)
    state = {f"mlp.{name}": tensor for name, tensor in theirs.state_dict().items()}
    load_weights("block", weights.parameter_views(stacked=True), state)
    h = torch.randn(9, 32)
    found = Moe(weights, reference)(h)
    assert found.shape == (3 + shared, 9, 32)
    with torch.no_grad():
        expected = theirs(h[None])[0].reshape(9, 32)
        torch.testing.assert_close(found.sum(0), expected, rtol=1e-4, atol=1e-3)


def test_dense_layers_are_those_of_transformers() -> None:
    every = {"num_hidden_layers": 7, "decoder_sparse_step": 2, "mlp_only_layers": [3]}
    spec = ModelSpec.of_target(Qwen3MoeConfig(**SIZES, **every, rope_parameters={"rope_theta": 1e4}))
    assert [layer for layer, each in enumerate(spec.layers) if isinstance(each.ffn, MoeSpec)] == [1, 5]
    assert spec.routes and spec.layers[3].ffn == MlpSpec(6144)
    dense = ModelSpec.of_target(Qwen3MoeConfig(num_experts=0, num_hidden_layers=2, rope_parameters={"rope_theta": 1e4}))
    assert not dense.routes


def test_experts_of_a_checkpoint_are_one_tensor_or_one_each(tmp_path: Path) -> None:
    target = make_target("qwen3_moe", tied=False)
    spec = ModelSpec.of_target(target.config)
    copied = TargetWeights.of_module(target.model, spec)
    forms = {form: copied.parameter_views(stacked=form == "stacked") for form in ("stacked", "each")}
    assert len(forms["each"]) == len(forms["stacked"]) + 5 * (5 * 3 - 2)
    for form, views in forms.items():
        folder = tmp_path / form
        folder.mkdir()
        save_file({name: view.contiguous() for name, view in views.items()}, folder / "model.safetensors")
        loaded = TargetWeights.load(folder, spec, CPU, torch.float32).parameter_views(stacked=True)
        assert all(torch.equal(view, forms["stacked"][name]) for name, view in loaded.items()), form


def test_timed_rows_have_their_own_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Tensor] = []
    engine = make_engine(*pair("qwen3_moe"), max_num_seqs=4)
    runner, forward = engine.runner, engine.runner.verifier.forward

    def noted(ids: Tensor, *rest: Any) -> Any:
        read.append(ids)
        return forward(ids, *rest)

    monkeypatch.setattr(runner.verifier, "forward", noted)
    measure_steps(runner, shapes_to_measure(4, (1, 4, 8)))
    largest = max(read, key=len)
    assert len(largest) == 32 and len(largest.unique()) > 24
    plain = [ids for ids in read if len(ids) == 4]
    assert all(len(ids.unique()) == 4 for ids in plain)
    read.clear()
    runner.run_part(Part("step", 4, 8))
    assert read[0].view(4, 8)[:, 0].tolist() == [0] * 4 and not torch.equal(read[0], largest), "as before"
