"""A run that starts from a drafter there is, of either form; averaged weights; a quantized target."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import VOCAB, make_dflash2, make_target, prompts_of
from damage import damage
from fp8_targets import in_fp8
from programs import Program, altered
from safetensors.torch import load_file, save_file
from start_drafters import STILL, YARN, small_drafter, write_start
from training_runs import interrupted, weights

from dflash_toolkit import Drafter, SamplingParams, Target, UserError, load_drafter, save_drafter
from dflash_toolkit.config import UnsupportedModel
from dflash_toolkit.evaluation.measure.measurement import held_out_acceptance
from dflash_toolkit.fingerprint import drafter_digest
from dflash_toolkit.models.rope import RopeScaling
from dflash_toolkit.models.spec import ModelSpec
from dflash_toolkit.train.config import TrainConfig
from dflash_toolkit.train.data_options import DataOptions
from dflash_toolkit.train.optim.optimizers import update_average
from dflash_toolkit.train.responses import backends
from dflash_toolkit.train.run import save
from dflash_toolkit.train.run.resume_point import ResumePoint, save_state
from dflash_toolkit.train.run.start import load_start
from dflash_toolkit.train.training_options import DrafterOptions


@pytest.mark.parametrize(("form", "scaling"), [("z-lab", YARN), ("prefixed", None)], ids=["z-lab", "prefixed"])
def test_run_starts_from_drafters_of_every_format(
    form: str, scaling: RopeScaling | None, target_dir: Path, data: Path, dflash_train: Program, tmp_path: Path
) -> None:
    drafter = small_drafter(rope_scaling=scaling)
    start = write_start(form, tmp_path / "start", drafter)
    dflash_train("--init-from", start, *STILL)
    exported = load_drafter(str(tmp_path / "run"))
    assert exported.config == drafter.config, "the target's depth too, which the speculators form need not record"
    for (name, ours), theirs in zip(exported.named_parameters(), drafter.parameters(), strict=True):
        assert torch.equal(ours, theirs.bfloat16()), name

    first = dflash_train.metrics()[0]
    target = Target.load(str(target_dir))
    config = TrainConfig(target=str(target_dir), data=(str(data),), prompts=DataOptions(held_out=2))
    _, asked = prompts_of(config, target.tokenizer, tmp_path / "again")
    loaded = load_drafter(str(start), dtype=torch.float32)
    tau = held_out_acceptance(target, loaded, asked, SamplingParams(max_tokens=8)).tau_pooled
    assert (first["step"], first["acceptance_length"]) == (0, pytest.approx(tau, abs=1e-5))

    record = dflash_train.record()
    assert record["start"] == {"drafter": str(start), "sha256": drafter_digest(drafter)}
    assert record["config"]["drafter"]["intermediate_size"] == 48, "the start's, not the target's"
    assert "scaled_frequencies" not in record["drafter"], "they follow from the rest"


def test_fingerprints_include_the_start_but_not_its_path(dflash_train: Program, tmp_path: Path) -> None:
    drafter = small_drafter()
    for name in ("here", "there"):
        save_drafter(drafter, tmp_path / name)
    with torch.no_grad():
        drafter.fc.weight[0, 0] += 1
    save_drafter(drafter, tmp_path / "other")
    for name, code, said in (("here", 0, "drafter exported"), ("there", 0, "finished"), ("other", 2, "start: ")):
        assert said in "\n".join(dflash_train("--init-from", tmp_path / name, *STILL, code=code))


@pytest.mark.parametrize("size", [3, 8])
def test_a_start_may_get_another_block_size(size: int, dflash_train: Program, tmp_path: Path) -> None:
    drafter = small_drafter(acceptance_slope=0.5, acceptance_bias=(1.0, 2.0, 3.0))
    save_drafter(drafter, tmp_path / "start")
    said = dflash_train("--init-from", tmp_path / "start", f"drafter.block_size={size}", *STILL)
    assert any(f"has blocks of 4; blocks of {size} are trained" in line for line in said)
    exported = load_drafter(str(tmp_path / "run"))
    assert exported.config == replace(drafter.config, block_size=size), "all else as it was"
    assert len(exported.config.calibration.bias) == size - 1
    for ours, theirs in zip(exported.parameters(), drafter.parameters(), strict=True):
        assert torch.equal(ours, theirs.bfloat16())
    assert len(dflash_train.metrics()[1]["slot_accuracy"]) == size - 1
    resumed = dflash_train("--init-from", tmp_path / "start", f"drafter.block_size={size}", *STILL, "optim.steps=2")
    assert any("resuming at step 1" in line for line in resumed)


@pytest.mark.parametrize(("given", "rate"), [((), 6e-5), (("optim.optimizer=muon",), 3e-4)])
def test_a_warm_start_has_a_smaller_learning_rate(
    given: tuple[str, ...], rate: float, dflash_train: Program, tmp_path: Path
) -> None:
    save_drafter(small_drafter(), tmp_path / "start")
    few = ("optim.steps=6", "optim.warmup=0.5")
    dflash_train("--init-from", tmp_path / "start", *few, *given)
    assert max(line.get("learning_rate", 0) for line in dflash_train.metrics()) == pytest.approx(rate)
    assert dflash_train.record()["config"]["optim"]["learning_rate"] == rate
    dflash_train("--init-from", tmp_path / "start", *few, "optim.learning_rate=5e-5", output="given")
    asked = json.loads((tmp_path / "given/run.json").read_text())["config"]["optim"]["learning_rate"]
    assert asked == 5e-5


@pytest.mark.parametrize(
    ("changes", "given", "said"),
    [
        ({}, ["START", "drafter.layers=5"], "drafter.layers is 5, but init_from="),  # given, though it is the default
        ({}, ["START", "drafter.target_layer_ids=[0,3]"], "drafter.target_layer_ids is [0, 3], but"),
        ({"hidden_size": 64}, ["START"], "hidden size is 64, the target's 32"),
        ({"vocab_size": VOCAB + 4}, ["START"], f"vocabulary is {VOCAB + 4}"),
        ({"num_target_layers": 12, "target_layer_ids": (1, 9)}, ["START"], "taps layer 9"),
        ({}, ["START", "--output", "START"], "overwrites its start"),
        ({}, ["START", "--init-from", "/no/such/drafter"], "/no/such/drafter: no such directory"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_start_that_does_not_fit_is_one_line(
    changes: dict[str, Any], given: list[str], said: str, tmp_path: Path, dflash_train: Program
) -> None:
    start = write_start("z-lab", tmp_path / "start", small_drafter(**changes))
    assert said in dflash_train.refuses("--init-from", *(start if word == "START" else word for word in given))


PARTS = {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 6, "selector_top_k": 16}
PAIR = {"conv_kernel_size": "conv_group_size", "selector_rank": "selector_top_k"}


@pytest.mark.parametrize("left_out", [None, "conv_kernel_size", "selector_rank"])
def test_a_plain_drafter_with_parts_of_dflash_2_is_the_same_drafter(
    left_out: str | None, target: Target, drafter: Drafter, drafter_dir: Path, tmp_path: Path
) -> None:
    given = PARTS | ({left_out: 0, PAIR[left_out]: 0} if left_out else {})
    start = load_start(
        str(drafter_dir), target.config, DrafterOptions(kind="dflash2", **given), ["kind", *given], tmp_path, seed=3
    )
    grown, plain = start.drafter, load_drafter(str(drafter_dir), dtype=torch.float32)
    assert grown.config == replace(plain.config, **given) and "gets parts of DFlash 2" in start.changed[0]
    assert all(p.requires_grad for p in grown.parameters())
    features, positions = torch.randn(1, 3, plain.config.feature_size), torch.arange(11)[None]
    block = torch.randn(1, 8, 32)
    found = []
    for each in (grown, plain):
        hidden = each(block, positions[:, 3:], each.context_kv(features, positions[:, :3]))
        found.append((hidden, each.choose(hidden[0, 1:], target.head(hidden[0, 1:]), 5)))
    assert torch.equal(found[0][0], found[1][0]), "bit for bit"
    assert torch.equal(found[0][1], found[1][1])


def test_a_start_with_new_parts_is_exported_with_them(dflash_train: Program, tmp_path: Path) -> None:
    drafter = small_drafter()
    save_drafter(drafter, tmp_path / "start")
    sizes = [f"drafter.{name}={size}" for name, size in PARTS.items()]
    said = dflash_train("--init-from", tmp_path / "start", "drafter.kind=dflash2", *sizes, *STILL)
    assert any(
        "gets parts of DFlash 2, which have no effect yet: conv_kernel_size 2, conv_group_size 8, sel" in s
        for s in said
    )
    exported = load_drafter(str(tmp_path / "run"))
    assert exported.config == replace(drafter.config, **PARTS)
    weights = dict(exported.named_parameters())
    assert all(torch.equal(weights[name], ours.bfloat16()) for name, ours in drafter.named_parameters())
    assert not weights["candidate_selector.successor_codebook"].any()
    first, *_, last = dflash_train.metrics()
    assert first["acceptance_length"] == last["acceptance_length"]


def test_a_start_of_dflash_2_keeps_its_parts_and_gets_the_other(dflash2_dir: Path, tmp_path: Path) -> None:
    target, has = make_target().config, load_drafter(str(dflash2_dir)).config

    def start(name: Path, **given: Any) -> Drafter:
        return load_start(str(name), target, DrafterOptions(**given), list(given), tmp_path, seed=0).drafter

    for given in ({}, {"kind": None}, {"kind": "dflash2"}, {"kind": "dflash2", "selector_rank": 6}):
        assert start(dflash2_dir, **given).config == has
    save_drafter(make_dflash2(make_target(), selector_rank=0, selector_top_k=0), tmp_path / "convolutions")
    grown = start(tmp_path / "convolutions", kind="dflash2").config
    assert start(tmp_path / "convolutions", selector_rank=256).config == grown, "a size asks for its kind"
    assert (grown.conv_group_size, grown.selector_rank, grown.selector_top_k) == (8, 256, 16)
    for given, said in (
        ({"kind": "dflash"}, "drafter.kind is dflash, but init_from="),
        ({"kind": "dflash2", "selector_rank": 0}, "drafter.selector_rank is 0, but init_from="),
        ({"kind": "dflash2", "conv_group_size": 16}, "drafter.conv_group_size is 16, but init_from="),
    ):
        with pytest.raises(UserError, match=said):
            start(dflash2_dir, **given)


@pytest.mark.parametrize(
    ("file", "change", "said"),
    [
        ("model.safetensors", {"d2t": torch.zeros(VOCAB, dtype=torch.long)}, "reduced vocabulary"),
        ("config.json", {"draft_vocab_size": 100}, "reduced vocabulary"),
        ("config.json", {"sample_from_anchor": True}, "not plain DFlash"),
    ],
    ids=["maps", "size", "anchor"],
)
def test_a_variant_of_the_speculators_form_is_refused_in_one_line(
    file: str, change: dict[str, Any], said: str, tmp_path: Path
) -> None:
    damage(write_start("speculators", tmp_path, small_drafter()) / file, change)
    with pytest.raises(UserError, match=said) as caught:
        load_drafter(str(tmp_path))
    assert "\n" not in str(caught.value)
    assert ("dflash-train --init-from starts from its layers" in str(caught.value)) == (said == "reduced vocabulary")


# ---- averaged weights ------------------------------------------------------------------------------------------


def test_ema_weights_are_measured_exported_and_resumed(
    dflash_train: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    averaged = (
        "optim.ema=0.5",
        "optim.steps=6",
        "run.evaluate_every=0",
        "run.save_every=1",
        "optim.learning_rate=1e-2",
    )
    states: list[dict[str, torch.Tensor]] = []

    def seen(state: ResumePoint, path: Path) -> None:
        states.append({name: value.clone() for name, value in state.drafter.items()})
        save_state(state, path)

    with interrupted(2):
        dflash_train(*averaged, output="killed", code=130)
    dflash_train(*averaged, output="killed")
    monkeypatch.setattr(save, "save_state", seen)
    dflash_train(*averaged, output="whole")
    assert weights(tmp_path / "whole") == weights(tmp_path / "killed")
    average = torch.load(tmp_path / "whole/work/state.pt")["average"]
    exported = load_file(tmp_path / "whole/model.safetensors")
    for name, value in average.items():
        expected = states[0][name]  # what the start still weighs does not matter to bf16 after five more
        for step, state in enumerate(states[1:], 2):
            expected = torch.lerp(expected, state[name], 1 - min(0.5, (1 + step) / (10 + step)))
        assert torch.allclose(value, expected, atol=3e-3) and not torch.equal(value, states[-1][name])
        assert torch.equal(exported[name], value.bfloat16()), name


def test_a_young_average_forgets_faster() -> None:
    average, module = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    torch.nn.init.ones_(module.weight)
    for step, decay, kept in ((1, 0.999, 2 / 11), (1, 0.1, 0.1), (10**6, 0.999, 0.999)):
        torch.nn.init.zeros_(average.weight)
        update_average(average, module, decay, step)
        assert average.weight.flatten().tolist() == pytest.approx([1 - kept] * 4)


# ---- quantized targets -----------------------------------------------------------------------------------------


def test_a_missing_quantization_library_is_named(target_dir: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(target_dir, tmp_path / "target"))
    damage(path / "config.json", {"quantization_config": {"quant_method": "aqlm"}})
    with pytest.raises(UserError, match=r"cannot load its weights .*aqlm") as caught:
        Target.load(str(path), "cpu")
    assert "\n" not in str(caught.value)


def test_a_target_with_a_quantized_head_is_refused() -> None:
    model = make_target(tied=False).model
    model.lm_head = torch.nn.Linear(32, VOCAB, bias=False)
    model.lm_head.weight = torch.nn.Parameter(torch.zeros(VOCAB * 16, 1, dtype=torch.uint8), requires_grad=False)
    with pytest.raises(UserError, match="LM head is quantized"):
        Target(model)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_run_on_a_target_in_four_bits(device: str, target_dir: Path, dflash_train: Program, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig

    path = Path(shutil.copytree(target_dir, tmp_path / "target", ignore=shutil.ignore_patterns("*.safetensors")))
    config = AutoConfig.from_pretrained(path)
    config.update({"hidden_size": 64, "intermediate_size": 128, "head_dim": 16})  # rows of whole blocks of 64
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    four = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    model = AutoModelForCausalLM.from_pretrained(path, quantization_config=four, device_map={"": device})
    model.save_pretrained(path)
    loaded = Target.load(str(path), device)
    assert type(loaded.layers[0].mlp.up_proj).__name__ == "Linear4bit" and loaded.device.type == device
    assert loaded.dtype == (torch.float32 if device == "cpu" else torch.bfloat16)
    with pytest.raises(UserError, match=r"quant_method .* not served"):
        ModelSpec.of_target(loaded.config)
    dflash_train.target = path
    said = dflash_train("optim.steps=2", f"device={device}")
    assert "the reference decodes" in "\n".join(said), "the engine would answer in other words"


def in_channels(folder: Path) -> None:
    """Makes a checkpoint one of llm-compressor: e4m3 weights with a scale for each row, activations by the token."""
    pytest.importorskip("compressed_tensors")
    tensors = {}
    for name, weight in load_file(folder / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            scale = weight.abs().amax(1, keepdim=True) / torch.finfo(torch.float8_e4m3fn).max
            tensors[f"{name}_scale"], weight = scale, (weight / scale).to(torch.float8_e4m3fn)
        tensors[name] = weight
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    eight = {"num_bits": 8, "type": "float", "symmetric": True}
    group = {
        "targets": ["Linear"], "weights": {**eight, "strategy": "channel", "dynamic": False},
        "input_activations": {**eight, "strategy": "token", "dynamic": True},
    }  # fmt: skip
    quantized = {
        "quant_method": "compressed-tensors", "format": "float-quantized", "quantization_status": "compressed",
        "ignore": ["lm_head"], "config_groups": {"group_0": group},
    }  # fmt: skip
    damage(folder / "config.json", {"quantization_config": quantized})


def in_blocks(folder: Path) -> None:
    """Makes a checkpoint one of Qwen3-*-FP8."""
    in_fp8(Target.load(str(folder), "cpu"), folder)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("quantize", [in_channels, in_blocks])
def test_a_run_on_a_target_in_fp8(
    quantize: Callable[[Path], None], device: str, target_dir: Path, dflash_train: Program, tmp_path: Path
) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    dense, path = (Path(shutil.copytree(target_dir, tmp_path / name)) for name in ("dense", "target"))
    config = AutoConfig.from_pretrained(dense)
    config.update({"hidden_size": 128, "intermediate_size": 128, "head_dim": 64})  # whole blocks
    model = AutoModelForCausalLM.from_config(config)
    for folder in (dense, path):
        model.save_pretrained(folder)
    quantize(path)
    loaded = Target.load(str(path), device)
    assert loaded.device.type == device
    ids = torch.arange(20, device=device)[None]
    rounded, exact = (target.forward(ids, taps=(1,)).features for target in (loaded, Target.load(str(dense), device)))
    assert 0 < (rounded - exact).norm() < 0.5 * exact.norm()
    dflash_train.target = path
    dflash_train("optim.steps=2", "drafter.head_dim=16", f"device={device}")  # the least that FlexAttention takes
    further = ("--init-from", dflash_train.output, "optim.steps=1", f"device={device}")
    dflash_train(*further, output="further")  # also continues from a drafter


@pytest.mark.parametrize("with_drafter", [False, True])
def test_the_reference_reports_an_unused_drafter(
    with_drafter: bool,
    target_dir: Path,
    drafter_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def cannot(*_: Any, **__: Any) -> None:
        raise UnsupportedModel("of another kind")

    monkeypatch.setattr(backends, "load_parts", cannot)
    drafter = str(drafter_dir) if with_drafter else None
    asked = {"drafter": drafter, "device": "cpu", "batch": 7, "context": 64}
    found = backends.open_decoder(str(target_dir), **asked)
    other = " and without the drafter" if with_drafter else ""
    end = f"{other}; the engine cannot: of another kind\n"
    assert isinstance(found, backends.BatchedDecoder)
    assert capsys.readouterr().err.endswith("the reference decodes, 7 prompts at a time" + end)
    monkeypatch.setattr(backends, "unbatchable_reason", lambda _: "of its kind")
    found = backends.open_decoder(str(target_dir), **asked)
    assert isinstance(found, backends.ReferenceDecoder)
    assert capsys.readouterr().err.endswith("the reference decodes, one prompt at a time (of its kind)" + end)
    with pytest.raises(UnsupportedModel, match="of another kind"):
        backends.open_decoder(str(target_dir), runtime="engine", **asked)


def test_only_broken_checkpoints_prevent_the_reference(
    target_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The reference would pass over a tensor that is too many."""
    for change, message in (({"attention_bias": True}, "missing"), ({"num_hidden_layers": 2}, "unknown tensor")):
        broken = altered(target_dir, tmp_path / message, config=change)
        with pytest.raises(UserError, match=message):
            backends.open_decoder(str(broken), device="cpu", batch=2, context=64)
    pickled = altered(target_dir, tmp_path / "pickled")
    torch.save(load_file(pickled / "model.safetensors"), pickled / "pytorch_model.bin")
    (pickled / "model.safetensors").unlink()
    capsys.readouterr()
    found = backends.open_decoder(str(pickled), device="cpu", batch=2, context=64)
    assert isinstance(found, backends.BatchedDecoder)
    assert "2 prompts at a time; the engine cannot" in capsys.readouterr().err


def test_a_missing_drafter_fails_before_the_target_is_read(
    target_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backends, "load_parts", lambda *_: pytest.fail("the target was read"))
    with pytest.raises(UserError, match="no such directory"):
        backends.open_decoder(str(target_dir), drafter=str(tmp_path / "none"), device="cpu", batch=1, context=64)
