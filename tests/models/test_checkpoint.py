"""Every loader can read a written drafter, and nothing else is read as one."""

import errno
import json
import math
import os
import resource
import shlex
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from conftest import VOCAB, check_same, make_drafter, make_target
from damage import damage
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import drafter_refusal, refusal
from safetensors.torch import load_file, save_file
from torch import Tensor

from dflash_toolkit import Drafter, DrafterConfig, Target, UserError, load_drafter, save_drafter
from dflash_toolkit.calibration import Calibration
from dflash_toolkit.models.dflash import checkpoint
from dflash_toolkit.models.dflash.checkpoint import check_fits, config_json, read_config, read_tensors
from dflash_toolkit.models.dflash.serving import serving_commands
from dflash_toolkit.models.rope import RopeScaling

Monkey = pytest.MonkeyPatch
Changes = dict[str, Any]
SLIDING = {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 9, "is_causal": None}
LINEAR = RopeScaling(rope_type="linear", factor=2.5)
YARN = RopeScaling(rope_type="yarn", factor=4.0, original_max_position_embeddings=128, mscale=0.5, truncate=False)
SCALINGS = [LINEAR, YARN]
KINDS = [{}, {"attention_bias": True}, {"block_size": 2}, {"is_causal": None}, {"is_causal": True}, SLIDING]
KINDS += [{"rope_scaling": scaling} for scaling in SCALINGS]
KINDS += [{"input_embedding_scale": 5.5}, {"output_multiplier": 0.2, "final_logit_softcapping": 20.0}]
JUNK = [None, True, -1, 0, 7, 2.5, "x", "", [], ["x"], [0], [2.5], {}, {"a": 1}]
REQUIRED = (
    "hidden_size num_hidden_layers num_attention_heads num_key_value_heads intermediate_size vocab_size "
    "rope_theta target_layer_ids mask_token_id"
)


@pytest.fixture
def copy(drafter_dir: Path, tmp_path: Path) -> Path:
    """A drafter directory for a test to damage."""
    return Path(shutil.copytree(drafter_dir, tmp_path / "drafter"))


def change_config(path: Path, changes: Changes) -> None:
    """Let config.json have other values; a mapping changes those of a group."""
    values = json.loads((path / "config.json").read_text())
    for key, value in changes.items():
        values[key] = values.get(key, {}) | value if isinstance(value, dict) else value
    (path / "config.json").write_text(json.dumps(values))


def files(path: Path) -> dict[str, bytes]:
    """Everything below `path`; a folder counts as an empty file."""
    return {str(p.relative_to(path)): p.read_bytes() if p.is_file() else b"" for p in path.rglob("*")}


# ---- the form of z-lab, vLLM and SGLang ------------------------------------------------------------


@pytest.mark.parametrize("changes", KINDS, ids=str)
def test_a_drafter_is_read_back_as_it_was_written(target: Target, tmp_path: Path, changes: Changes) -> None:
    drafter = make_drafter(target, **changes)
    save_drafter(drafter, tmp_path / "out")
    check_same(load_drafter(str(tmp_path / "out")), drafter)
    assert load_drafter(str(tmp_path / "out"), dtype=torch.float32).dtype == torch.float32


def test_config_has_every_key_that_loaders_read(drafter: Drafter, drafter_dir: Path) -> None:
    taps = list(drafter.config.target_layer_ids)
    assert json.loads((drafter_dir / "config.json").read_text()) == {
        "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "dtype": "bfloat16",
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 8, "intermediate_size": 48, "hidden_act": "silu", "rms_norm_eps": 1e-6,
        "vocab_size": VOCAB, "max_position_embeddings": 512, "rope_theta": 1e4,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        "layer_types": ["full_attention"] * 2, "is_causal": False, "sliding_window": None,
        "use_sliding_window": False, "attention_bias": False, "attention_dropout": 0.0,
        "tie_word_embeddings": False, "num_target_layers": 6, "block_size": 8,
        "dflash_config": {"target_layer_ids": taps, "mask_token_id": VOCAB - 1, "block_size": 8},
    }  # fmt: skip


def test_the_file_holds_the_drafter_s_tensors_in_bf16_and_no_other(drafter: Drafter, drafter_dir: Path) -> None:
    tensors = load_file(drafter_dir / "model.safetensors")
    assert {name: tuple(t.shape) for name, t in tensors.items()} == checkpoint.tensor_shapes(drafter.config)
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}


def test_provenance_is_one_key_of_our_own(drafter: Drafter, tmp_path: Path) -> None:
    save_drafter(drafter, tmp_path, {"target": "tiny", "steps": 3})
    values = json.loads((tmp_path / "config.json").read_text())
    assert values.pop("dflash_toolkit") == {"target": "tiny", "steps": 3}
    assert values == config_json(drafter.config)
    assert read_config(tmp_path) == drafter.config


def test_a_newer_published_form_has_its_block_size_nested_only(copy: Path) -> None:
    damage(copy / "config.json", dict.fromkeys(("block_size", "rope_theta", "is_causal")))
    config = read_config(copy)
    assert (config.block_size, config.rope_theta) == (8, 1e4)
    assert config.is_causal is None, "the type of the layer decides"


@pytest.mark.parametrize("prefix", ["", "model."])
def test_copies_of_the_target_s_tables_are_not_used(
    copy: Path, drafter: Drafter, prefix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    tables = {f"{prefix}{name}.weight": torch.ones(VOCAB, 32) for name in ("embed_tokens", "lm_head")}
    save_file(load_file(copy / "model.safetensors") | tables, copy / "model.safetensors")
    check_same(load_drafter(str(copy)), drafter)
    notice = "its own embed_tokens.weight and lm_head.weight are not used; it drafts with the target's"
    assert capsys.readouterr().err == f"notice: drafter {copy}: {notice}\n"


def test_a_learned_mask_embedding_is_refused_by_name(copy: Path) -> None:
    (copy / "mask_embedding.pt").write_bytes(b"")
    with pytest.raises(UserError, match=r"mask_embedding\.pt.*--engine vllm"):
        load_drafter(str(copy))


def test_a_drafter_in_several_files_is_read(copy: Path, drafter: Drafter) -> None:
    """Files that the index does not list are not read."""
    tensors = load_file(copy / "model.safetensors")
    (copy / "model.safetensors").unlink()
    weight_map = {name: f"model-0000{i % 2 + 1}-of-00002.safetensors" for i, name in enumerate(tensors)}
    for file in set(weight_map.values()):
        save_file({name: tensors[name] for name in tensors if weight_map[name] == file}, copy / file)
    save_file({"optimizer": torch.ones(3)}, copy / "other.safetensors")
    (copy / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    check_same(load_drafter(str(copy)), drafter)
    (copy / file).unlink()
    assert (
        refusal(load_drafter, str(copy))
        == f"{copy / file}: no such file, although model.safetensors.index.json lists it"
    )


def test_the_rope_of_published_configs_is_that_of_transformers(copy: Path) -> None:
    """Theta nested only, next to rope_parameters, or in rope_scaling with a stale one at the top level."""
    for change, theta in (
        ({"rope_theta": None, "block_size": None, "rope_parameters": {"rope_theta": 1e7, "rope_type": "default"}}, 1e7),
        ({"rope_theta": 5e5, "rope_parameters": {"rope_type": "default"}}, 5e5),
        (
            {"rope_theta": 1e4, "rope_parameters": None, "rope_scaling": {"rope_theta": 1e6, "rope_type": "default"}},
            1e6,
        ),
    ):
        damage(copy / "config.json", change)
        assert load_drafter(str(copy)).config.rope_theta == theta


def test_scales_are_read_as_published_and_a_zero_cap_is_none(copy: Path) -> None:
    # z-lab/Muse-Glimmer-30B-DFlash2 nests them; z-lab's client reads the top level, too
    change_config(copy, {"dflash_config": {"output_multiplier": 0.196, "final_logit_softcapping": 20}})
    change_config(copy, {"input_embedding_scale": 2})
    config = load_drafter(str(copy)).config
    assert (config.output_multiplier, config.final_logit_softcapping, config.input_embedding_scale) == (0.196, 20, 2)
    change_config(copy, {"dflash_config": {"final_logit_softcapping": 0}})
    assert load_drafter(str(copy)).config.final_logit_softcapping is None


def test_a_calibration_is_written_and_read_for_any_block_size(drafter: Drafter, tmp_path: Path) -> None:
    measured = replace(drafter.config, acceptance_slope=0.7, acceptance_bias=(0.5, 0.0, -0.25))
    nested = config_json(measured)["dflash_config"]
    assert nested == config_json(drafter.config)["dflash_config"] | {
        "acceptance_slope": 0.7,
        "acceptance_bias": [0.5, 0.0, -0.25],
    }
    (tmp_path / "config.json").write_text(json.dumps(config_json(measured)))
    config = read_config(tmp_path)
    assert config == drafter.config, "the same network"
    assert config.calibration == Calibration(0.7, (0.5, 0.0, -0.25, -0.25, -0.25, -0.25, -0.25))
    assert config.with_block_size(3).calibration.bias == (0.5, 0.0)
    assert drafter.config.calibration == Calibration.cold(7)


def test_a_flat_config_without_rope_parameters_or_depth_is_read(copy: Path, drafter: Drafter) -> None:
    gone = dict.fromkeys(("dflash_config", "rope_parameters", "num_target_layers", "layer_types", "head_dim"))
    damage(copy / "config.json", config_json(drafter.config)["dflash_config"] | gone | {"rope_theta": 5e5})
    config = read_config(copy)
    assert (config.block_size, config.mask_token_id, config.rope_theta) == (8, VOCAB - 1, 5e5)
    assert config.num_target_layers == max(config.target_layer_ids) + 2
    assert config.layer_types == ("full_attention",) * 2
    assert load_drafter(str(copy)).config.head_dim == 8


@pytest.mark.parametrize(
    ("top", "nested", "expected"), [(True, False, True), (None, True, True), (None, False, False), (None, None, None)]
)
def test_top_level_causality_precedes_the_nested_one(copy: Path, top: Any, nested: Any, expected: Any) -> None:
    change_config(copy, {"is_causal": top, "dflash_config": {"causal": nested}})
    assert read_config(copy).is_causal is expected


# ---- refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("model.safetensors", {"mask_hidden": torch.ones(3)}, "unknown tensor 'mask_hidden'"),
        ("model.safetensors", {"lm_head.weight": torch.ones(3)}, "unknown tensor 'lm_head.weight'"),
        ("model.safetensors", {"layers.1.mlp.up_proj.weight": None}, "first 'layers.1.mlp.up_proj.weight'"),
        ("model.safetensors", {"fc.weight": torch.ones(2, 4)}, "'fc.weight' has shape (2, 4), not (32, 96)"),
        *(("model.safetensors", text, "model.safetensors is corrupt") for text in (b"\xff" * 64, "half", b"")),
        ("model.safetensors", None, "no *.safetensors file"),
        ("config.json", None, "cannot read config.json"),
        *(("config.json", text, "config.json") for text in ("{ half", "[]", "", b"\xff")),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_damaged_checkpoint_is_named(copy: Path, file: str, change: Any, message: str) -> None:
    damage(copy / file, change)
    assert message in drafter_refusal(copy)


def test_a_tensor_stored_twice_is_named(copy: Path) -> None:
    tensors = load_file(copy / "model.safetensors")
    save_file({**tensors, "model.fc.weight": tensors["fc.weight"].clone()}, copy / "model.safetensors")
    assert "tensor 'fc.weight' is stored twice, once as 'model.fc.weight'" in drafter_refusal(copy)
    (copy / "model.safetensors").unlink()
    for number, part in enumerate((tensors, {"norm.weight": tensors["norm.weight"]})):
        save_file(part, copy / f"model-{number}.safetensors")
    line = "tensor 'norm.weight' is in both model-0.safetensors and model-1.safetensors"
    assert line in drafter_refusal(copy)


@pytest.mark.parametrize("name", ["/nowhere/at/all", "./nowhere", "nowhere", "a/b/c", "/" + "x" * 5000])
def test_a_missing_directory_is_named(name: str) -> None:
    with pytest.raises(UserError, match=f"^drafter {name}: no such directory$"):
        load_drafter(name)


@pytest.mark.parametrize("key", REQUIRED.split())
def test_a_missing_config_key_is_named(copy: Path, key: str) -> None:
    text = (copy / "config.json").read_text()
    without = json.loads(text, object_hook=lambda part: {name: part[name] for name in part if name != key})
    (copy / "config.json").write_text(json.dumps(without))
    assert f"config.json has no {key!r}" in drafter_refusal(copy)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"draft_vocab_size": 100}, "'draft_vocab_size'"),
        ({"dflash_config": {"selector_rank": 8}}, "'selector_rank'"),
        ({"dflash_config": {"use_swa": True, "swa_window_size": 64}}, "'use_swa'"),
        ({"hidden_act": "gelu"}, "'gelu'"),
        ({"num_attention_heads": 0, "head_dim": None}, "num_heads is 0"),
        ({"num_hidden_layers": 3}, "layer_types has 2 entries for 3 layers"),
        ({"block_size": 1, "dflash_config": {"block_size": 1}}, "block_size is 1"),
        ({"block_size": 10**9, "dflash_config": {"block_size": 10**9}}, "block_size is 1000000000"),
        ({"rms_norm_eps": -1}, "rms_norm_eps is -1.0; it must be a number > 0"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        ({"rope_parameters": {"rope_theta": 0}}, "rope_theta is 0.0; it must be a number > 0"),
        ({"rope_parameters": {"rope_theta": "x"}}, "'rope_theta' is 'x', which"),
        ({"rope_parameters": {"rope_theta": 10**400}}, "'rope_theta' is 1000"),
        ({"rope_parameters": YARN.parameters, "original_max_position_embeddings": 0}, "embeddings is 0; it must be a"),
        ({"hidden_size": "wide"}, "'hidden_size' is 'wide'"),
        ({"dflash_config": {"target_layer_ids": [1, "2"]}}, "'target_layer_ids' is [1, '2']"),
        ({"dflash_config": []}, "config.json has no 'target_layer_ids'"),
        ({"dflash_config": [1]}, "'dflash_config' is [1]"),
        ({"is_causal": "no"}, "is_causal is 'no'"),
        ({"quantization_config": {"quant_method": "modelopt"}}, "its weights are quantized (modelopt), which is not"),
        ({"dflash_config": {"acceptance_bias": [0.1, "x"]}}, "'acceptance_bias' is [0.1, 'x']"),
        ({"dflash_config": {"acceptance_bias": [10**400]}}, "too large"),
        ({"dflash_config": {"acceptance_slope": 0}}, "acceptance_slope is 0.0"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_a_config_of_another_network_is_refused(copy: Path, change: Changes, named: str) -> None:
    change_config(copy, change)
    assert named in drafter_refusal(copy)


@pytest.mark.parametrize("rows", [-1, 1, 100, VOCAB - 1, VOCAB + 1])
def test_a_reduced_vocabulary_is_part_of_the_target_s(copy: Path, rows: int) -> None:
    change_config(copy, {"draft_vocab_size": rows})
    if 0 < rows < VOCAB:
        assert read_config(copy, layers_only=True).vocab_size == VOCAB
    else:
        with pytest.raises(UserError, match=f"'draft_vocab_size' is {rows}, 'vocab_size' {VOCAB}"):
            read_config(copy, layers_only=True)


def test_keys_that_a_config_leaves_out_have_the_defaults_of_other_loaders(copy: Path) -> None:
    values = json.loads((copy / "config.json").read_text())
    for part in (values, values["dflash_config"]):
        for key in ("block_size", "head_dim", "acceptance_slope", "acceptance_bias", "input_embedding_scale"):
            part.pop(key, None)
    (copy / "config.json").write_text(json.dumps(values))
    found = read_config(copy)
    assert (found.block_size, found.head_dim) == (16, values["hidden_size"] // values["num_attention_heads"])
    assert (found.acceptance_slope, found.acceptance_bias, found.input_embedding_scale) == (1.0, (), 1.0)


def test_a_missing_head_size_is_that_of_all_heads_together(copy: Path) -> None:
    change_config(copy, {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": None})
    config = read_config(copy)
    assert config.head_dim == config.hidden_size


def test_the_head_of_a_plain_drafter_is_read_with_its_layers(copy: Path) -> None:
    tensors = load_file(copy / "model.safetensors") | {"lm_head.weight": torch.ones(3)}
    save_file(tensors, copy / "model.safetensors")
    assert "lm_head.weight" in read_tensors(copy, layers_only=True), "so that it is refused as an unknown tensor"


@given(data=st.data())
@settings(max_examples=150, deadline=None, derandomize=True)
def test_any_config_value_gives_a_drafter_or_a_user_error(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory, drafter: Drafter
) -> None:
    scaling = data.draw(st.sampled_from([None, *SCALINGS]))
    values = config_json(replace(drafter.config, rope_scaling=scaling))
    if scaling and data.draw(st.booleans()):
        del values["rope_parameters"]
    groups = [values[key] for key in ("dflash_config", "rope_parameters", "rope_scaling") if key in values]
    part = data.draw(st.sampled_from([values, *groups]))
    part[data.draw(st.sampled_from(sorted(part)))] = data.draw(st.sampled_from(JUNK))
    path = tmp_path_factory.getbasetemp() / "fuzzed"
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(values))
    try:
        config = read_config(path)
    except UserError as error:
        assert "\n" not in str(error)
    else:
        checkpoint.tensor_shapes(config)


# ---- writing ---------------------------------------------------------------------------------------


def test_weights_have_the_file_mode_of_the_config(drafter: Drafter, tmp_path: Path) -> None:
    save_drafter(drafter, tmp_path)
    assert len({(tmp_path / name).stat().st_mode for name in ("config.json", "model.safetensors")}) == 1


def test_a_full_disk_leaves_the_last_export_intact(drafter: Drafter, copy: Path, monkeypatch: Monkey) -> None:
    (copy / "metrics.jsonl").write_text("{}\n")
    before = files(copy)
    full = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(checkpoint, "save_file", Mock(side_effect=full))
    with pytest.raises(UserError, match=r"No space left on device.*free some space"):
        save_drafter(drafter, copy)
    assert files(copy) == before, "and no .partial- directory remains"


def test_leftovers_of_a_kill_are_removed_by_the_next_export(drafter: Drafter, copy: Path) -> None:
    before = files(copy)
    for name, age in ((".partial-old", 2 * checkpoint.STALE_S), (".partial-new", 0.0)):
        (copy / name).mkdir()
        (copy / name / "model.safetensors").write_bytes(b"half")
        os.utime(copy / name, (time.time() - age,) * 2)
    save_drafter(drafter, copy)
    assert not (copy / ".partial-old").exists()
    assert (copy / ".partial-new").exists(), "another process may be writing there"
    shutil.rmtree(copy / ".partial-new")
    assert files(copy).keys() == before.keys()


def test_an_export_whose_folder_is_deleted_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot write the checkpoint"), checkpoint.staged(tmp_path) as stage:
        shutil.rmtree(stage)


def test_a_truncated_write_leaves_the_last_export_intact(drafter: Drafter, copy: Path) -> None:
    before = files(copy)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))  # the weights are larger
    try:
        with pytest.raises(UserError) as caught:
            save_drafter(drafter, copy)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert str(caught.value).startswith(f"{copy}: cannot write the checkpoint")
    assert files(copy) == before


def test_a_new_export_replaces_weights_and_config_and_nothing_else(target: Target, copy: Path) -> None:
    (copy / "metrics.jsonl").write_text("{}\n")
    other = make_drafter(target, layers=1, block_size=4)
    save_drafter(other, copy)
    assert load_drafter(str(copy)).config == other.config
    assert set(files(copy)) == {"config.json", "model.safetensors", "metrics.jsonl"}


def test_a_path_that_is_a_file_is_refused(drafter: Drafter, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    with pytest.raises(UserError, match="taken: cannot be written"):
        save_drafter(drafter, tmp_path / "taken")


def test_weights_that_read_back_differently_are_not_exported(drafter: Drafter, copy: Path, monkeypatch: Monkey) -> None:
    before = files(copy)

    def spoil(tensors: dict[str, Tensor], *args: Any, **kwargs: Any) -> None:
        save_file(tensors | {"norm.weight": tensors["norm.weight"] + 1}, *args, **kwargs)

    monkeypatch.setattr(checkpoint, "save_file", spoil)
    with pytest.raises(RuntimeError, match=r"norm\.weight read back differs"):
        save_drafter(drafter, copy)
    assert files(copy) == before


# ---- fitting and serving ---------------------------------------------------------------------------


def fitting(**changes: object) -> DrafterConfig:
    return make_drafter(make_target(), **changes).config


def test_a_drafter_fits_the_target_it_was_made_for() -> None:
    check_fits(fitting(), make_target().config)
    check_fits(fitting(mask_token_id=VOCAB - 1), make_target().config, embedding_rows=VOCAB + 20)


@pytest.mark.parametrize(
    ("changes", "layers", "message"),
    [
        ({"hidden_size": 64}, 6, "hidden size is 64, the target's 32"),
        ({"num_target_layers": 9, "target_layer_ids": (1, 5)}, 6, r"taps layer 5; .*6 layers.*0\.\.4"),
        ({"num_target_layers": 8}, 6, "a target of 8 layers; this one has 6"),
        ({}, 7, "a target of 6 layers; this one has 7"),
        ({"vocab_size": 400}, 6, "vocabulary is 400, the target's 300"),
        ({"vocab_size": 400, "mask_token_id": 300}, 6, "mask id 300 is not a row of the target's 300"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_drafter_made_for_another_target_is_refused(changes: Changes, layers: int, message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_fits(fitting(**changes), make_target(layers=layers).config)


def test_a_drafter_without_target_depth_fits_deeper_targets() -> None:
    inferred = fitting(target_layer_ids=(0, 2), num_target_layers=4)  # read_config infers it from (0, 2)
    check_fits(inferred, make_target(layers=6).config)


def test_serving_lines_count_the_anchor_only_for_sglang() -> None:
    lines = serving_commands("Qwen/Qwen3-8B", "/out/my drafter", {"block_size": 16}).splitlines()
    vllm, sglang = map(shlex.split, lines)
    assert vllm[:3] == ["vllm", "serve", "Qwen/Qwen3-8B"]
    speculative = {"method": "dflash", "model": "/out/my drafter", "num_speculative_tokens": 15}
    assert json.loads(vllm[vllm.index("--speculative-config") + 1]) == speculative
    assert sglang[sglang.index("--speculative-algorithm") + 1] == "DFLASH"
    assert sglang[sglang.index("--speculative-draft-model-path") + 1] == "/out/my drafter"
    assert sglang[sglang.index("--speculative-num-draft-tokens") + 1] == "16"


@pytest.mark.parametrize(
    ("architecture", "engines"),
    [
        ("Qwen3_5ForCausalLM", ["vllm", "python"]),
        ("Qwen2ForCausalLM", ["vllm"]),
        ("Gemma4ForCausalLM", ["vllm"]),  # SGLang would scale its blocks
        ("Gemma3ForCausalLM", ["#"]),
        ("NeverHeardOfForCausalLM", ["vllm", "python"]),
    ],
)
def test_serving_lines_omit_engines_that_would_not_draft(architecture: str, engines: list[str]) -> None:
    lines = serving_commands("target", "drafter", {"block_size": 16}, architecture).splitlines()
    assert [line.split()[0] for line in lines] == engines


@pytest.mark.parametrize(
    ("parts", "engines"),
    [((2, 256), ["vllm", "python"]), ((0, 256), ["python"]), ((2, 0), ["#"])],
    ids=["both", "selector", "convolution"],
)
def test_dflash2_serving_lines_name_only_engines_with_its_parts(parts: tuple[int, int], engines: list[str]) -> None:
    sizes = {"block_size": 16, "conv_kernel_size": parts[0], "selector_rank": parts[1]}
    lines = serving_commands("target", "drafter", sizes, "Qwen3ForCausalLM").splitlines()
    assert [line.split()[0] for line in lines] == engines


def test_a_drafter_with_infinite_outputs_is_not_exported(tmp_path: Path) -> None:
    drafter = make_drafter(make_target())
    with torch.no_grad():
        for weight in drafter.parameters():
            weight.fill_(1e30)
    with pytest.raises(UserError, match=r"optim\.learning_rate"):
        save_drafter(drafter, tmp_path / "out")
    assert not list((tmp_path / "out").iterdir())


def test_weights_that_are_no_numbers_are_not_exported(tmp_path: Path) -> None:
    drafter = make_drafter(make_target())
    save_drafter(drafter, tmp_path / "d")
    before = (tmp_path / "d" / "model.safetensors").read_bytes()
    with torch.no_grad():
        drafter.fc.weight[0, 0] = math.nan
    with pytest.raises(UserError, match=r"fc\.weight contains NaN"):
        save_drafter(drafter, tmp_path / "d")
    assert (tmp_path / "d" / "model.safetensors").read_bytes() == before
