"""A target in slices, one on each of several processes, computes and decodes what the whole one does."""

from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES, tiny
from conftest import make_drafter
from forked import run_several
from fp8_targets import in_fp8
from programs import altered
from transformers import Llama4TextConfig  # type: ignore[attr-defined]

from dflash_toolkit import SamplingParams, Target, UserError
from dflash_toolkit.decode import generate
from dflash_toolkit.train.distributed.parallel import Processes

TAPS = (1, 3)
LENGTHS = [12, 5, 9]
IDS = torch.randint(0, 250, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(3))
WITHOUT_PLAN = ["gpt-oss"]
if "layers.*.feed_forward.experts" not in Llama4TextConfig.base_model_tp_plan:  # transformers 5.15
    WITHOUT_PLAN += ["Llama 4", "Llama 4 with images"]
IN_FP8 = "Qwen3-MoE"
DECODED = ("Llama", "Qwen3-MoE", "Qwen3.5", "Gemma 3")


def _computed(target: Target, name: str) -> dict[str, Any]:
    whole, packed = (target.forward(IDS, taps=TAPS, final=True, lengths=lengths) for lengths in (None, LENGTHS))
    found = {"features": whole.features, "final": whole.final, "packed": packed.features}
    if name in DECODED:
        drafter = make_drafter(tiny(name))
        found["tokens"] = generate(target, drafter, IDS[0, :9].tolist(), SamplingParams(max_tokens=8)).tokens
    return found


def _process(rank: int, folder: Path, names: list[str]) -> None:
    with Processes.started("cpu", share=2) as processes:
        found: dict[str, Any] = {}
        for name in names:
            try:
                target = Target.load(str(folder / name), mesh=processes.peers.mesh)
            except UserError as error:
                found[name] = str(error)
                continue
            slices = dict(target.local_parameters())
            layers = [parameter for parameter in slices if ".layers." in parameter and "vision" not in parameter]
            found[name] = _computed(target, name) | {
                "held": sum(slices[parameter].numel() for parameter in layers),
            }
        for mesh in (processes.peers.mesh, None):
            target = Target.load(str(folder / "in FP8"), "cpu", mesh=mesh)
            held = sum(parameter.numel() for _, parameter in target.local_parameters())
            found["in FP8" if mesh else "whole in FP8"] = _computed(target, "") | {"held": held}
        for name, words in (
            ("in four bits", "only quantized targets in FP8 blocks can be split"),
            ("in FP8, cut up", r"of \[128, 256\] cannot be cut into 2 slices of whole FP8 blocks of 128"),
        ):
            with pytest.raises(UserError, match=words):
                Target.load(str(folder / name), mesh=processes.peers.mesh)
    torch.save(found, folder / f"{rank}.pt")


@pytest.fixture(scope="module")
def sharded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The results of both processes, for the architectures that are tested."""
    folder = tmp_path_factory.mktemp("sharded")
    calls = [getattr(item, "callspec", None) for item in request.session.items if item.path == request.path]
    names = ["Llama", *{call.params["name"]: None for call in calls if call and call.params["name"] != "Llama"}]
    for name in names:
        target = tiny(name)
        target.model.save_pretrained(folder / name)
        target.tokenizer.save_pretrained(folder / name)
    sizes = {
        "hidden_size": 256,
        "intermediate_size": 256,
        "moe_intermediate_size": 256,
        "head_dim": 64,
        "num_hidden_layers": 4,
    }
    for heads, form in ((4, "in FP8"), (2, "in FP8, cut up")):
        in_fp8(ARCHITECTURES[IN_FP8].target(**sizes, num_key_value_heads=heads), folder / form)
    four_bits = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    altered(folder / "Llama", folder / "in four bits", config={"quantization_config": four_bits})
    assert run_several(2, _process, folder, names) == [0, 0]
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name not in WITHOUT_PLAN])
@pytest.mark.sampled(2)
def test_sharded_target_computes_the_same_as_the_whole(name: str, sharded: list[dict[str, Any]]) -> None:
    target = tiny(name)
    size = sum(parameter.numel() for parameter in target.layers.parameters())
    expected = _computed(target, name)
    for found in (each[name] for each in sharded):
        assert not isinstance(found, str), found
        for what in ("features", "final", "packed"):
            allowed = 1e-4 * float(expected[what].abs().max())
            torch.testing.assert_close(found[what], expected[what], rtol=1e-3, atol=allowed)
        assert found.get("tokens") == expected.get("tokens")
        assert found["held"] < 0.54 * size


@pytest.mark.parametrize("name", WITHOUT_PLAN)
def test_an_architecture_without_a_plan_is_one_line(name: str, sharded: list[dict[str, Any]]) -> None:
    assert all("transformers has no plan to shard" in found[name] for found in sharded)


def test_sharded_fp8_target_computes_the_same_as_the_whole(sharded: list[dict[str, Any]]) -> None:
    for found, expected in ((each["in FP8"], each["whole in FP8"]) for each in sharded):
        for what in ("features", "final", "packed"):
            allowed = 1e-4 * float(expected[what].abs().max())
            torch.testing.assert_close(found[what], expected[what], rtol=1e-3, atol=allowed)
        assert found["held"] < 0.6 * expected["held"]
