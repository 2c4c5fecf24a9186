"""The digest of a model: the same for the same weights in any place, another for any other byte."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dflash_toolkit import UserError, fingerprint
from dflash_toolkit.fingerprint import model_digest, weights_digest
from dflash_toolkit.train.run.provenance import target_digest

CONFIG = {"architectures": ["Qwen3ForCausalLM"], "rope_theta": 10000.0, "torch_dtype": "bfloat16", "eos_token_id": 1}
OLD = 1_700_000_000  # seconds: long ago


def tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    return {
        "model.embed_tokens.weight": random(50, 8).bfloat16(),
        "model.layers.0.mlp.up_proj.weight": random(300, 400),
        "model.layers.0.mlp.up_proj.weight_scale_inv": random(3, 4),
        "model.norm.weight": random(8),
        "empty": torch.zeros(0, 8),
    }


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "dflash-toolkit"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return made(tmp_path / "model", tensors())


def made(folder: Path, found: dict[str, Tensor], config: dict[str, object] = CONFIG, parts: int = 1) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    names = list(found)
    if parts == 1:
        save_file(found, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    files = {name: f"model-{i % parts:05d}.safetensors" for i, name in enumerate(names)}
    for file in set(files.values()):
        save_file({name: found[name] for name in names if files[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    return folder


def test_the_digest_ignores_names_file_split_and_notes(model: Path, tmp_path: Path) -> None:
    expected = model_digest(model)
    assert expected is not None and len(expected) == 64
    shutil.copytree(model, tmp_path / "copy")
    assert model_digest(str(tmp_path / "copy")) == expected == target_digest(str(model))
    notes = CONFIG | {"_name_or_path": "x", "transformers_version": "9", "torch_dtype": None, "dtype": "bfloat16"}
    assert model_digest(made(tmp_path / "sharded", dict(reversed(tensors().items())), notes, parts=3)) == expected
    # the files that an index does not name are not the model's
    save_file({"x": torch.zeros(3)}, tmp_path / "sharded" / "consolidated.safetensors")
    assert model_digest(tmp_path / "sharded") == expected


def test_a_tied_head_that_is_saved_counts_as_one_that_is_not(model: Path, tmp_path: Path) -> None:
    saved = tensors()
    saved["lm_head.weight"] = saved["model.embed_tokens.weight"].clone()
    assert model_digest(made(tmp_path / "tied", saved)) == model_digest(model)
    saved["lm_head.weight"][3, 3] += 1
    assert model_digest(made(tmp_path / "untied", saved)) != model_digest(model)


@pytest.mark.parametrize("name", [name for name in tensors() if name != "empty"])
def test_any_changed_byte_changes_the_digest(name: str, model: Path, tmp_path: Path) -> None:
    before = weights_digest(model)
    file = model / "model.safetensors"
    whole = bytearray(file.read_bytes())
    data = bytes(load_file(file)[name].flatten().view(torch.uint8).tolist())
    whole[whole.index(data) + len(data) // 2] ^= 1
    file.write_bytes(whole)
    assert weights_digest(model) != before


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t | {"model.norm.weight": t["model.norm.weight"].view(torch.int32)},
        lambda t: t | {"model.norm.weight": t["model.norm.weight"].view(2, 4)},
        lambda t: {("model.norm2.weight" if k == "model.norm.weight" else k): v for k, v in t.items()},
        lambda t: {k: v for k, v in t.items() if k != "model.layers.0.mlp.up_proj.weight_scale_inv"},
    ],
    ids=["dtype", "shape", "name", "scales"],
)
def test_equal_bytes_of_another_dtype_change_the_digest(change: object, model: Path, tmp_path: Path) -> None:
    assert callable(change)
    assert weights_digest(made(tmp_path / "other", change(tensors()))) != weights_digest(model)


@pytest.mark.parametrize(
    "change", [{"rope_theta": 1e6}, {"quantization_config": {"bits": 8}}, {"architectures": ["Other"]}], ids=str
)
def test_config_keys_that_change_outputs_change_the_digest(
    change: dict[str, object], model: Path, tmp_path: Path
) -> None:
    assert model_digest(made(tmp_path / "other", tensors(), CONFIG | change)) != model_digest(model)


def test_bin_files_are_distinguished_by_their_bytes(tmp_path: Path) -> None:
    for name, last in (("a", b"\1"), ("b", b"\1"), ("c", b"\2")):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{'model' if name == 'b' else 'pytorch_model'}.bin").write_bytes(b"x" * 1000 + last)
    a, b, c = (weights_digest(tmp_path / name) for name in "abc")
    assert a == b != c


def test_a_digest_is_kept_until_a_file_changes(model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = model / "model.safetensors"
    first = weights_digest(model)
    assert not cache.exists(), "a file that was just written may yet change within one tick of the clock"
    os.utime(file, (OLD, OLD))
    assert weights_digest(model) == first
    assert len(list(cache.iterdir())) == 1

    read: list[str] = []
    real = fingerprint._bytes_digest
    monkeypatch.setattr(fingerprint, "_bytes_digest", lambda part: (read.append(part.name), real(part))[1])
    assert weights_digest(model) == first
    assert read == []
    save_file(tensors() | {"model.norm.weight": torch.zeros(8)}, file)
    assert weights_digest(model) != first
    assert len(read) == len(tensors())
    (kept,) = cache.iterdir()
    kept.write_text("{half")
    save_file(tensors(), file)
    os.utime(file, (OLD, OLD))
    assert weights_digest(model) == first


def test_an_unwritable_cache_is_not_needed(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.utime(model / "model.safetensors", (OLD, OLD))
    (tmp_path / "file").write_text("")
    before = weights_digest(model)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert weights_digest(model) == before


def test_a_name_of_the_hub_is_its_snapshot_in_the_local_cache(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    assert model_digest("someone/model") is None
    held, commit = tmp_path / "models--someone--model", "c" * 40
    (held / "refs").mkdir(parents=True)
    (held / "refs" / "main").write_text(commit)
    shutil.copytree(model, held / "snapshots" / commit)
    assert model_digest("someone/model") == model_digest(model)
    assert model_digest("no id at all/x/y") is None


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "damaged"),
        (b"\xff" * 100, "damaged.*header does not fit"),
        (b"\x02" + b"\0" * 7 + b"[]", "damaged"),
        (None, "ends|outside the file"),
    ],
    ids=["empty", "noise", "no object", "cut"],
)
def test_a_damaged_file_is_one_line(data: bytes | None, reason: str, model: Path) -> None:
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100] if data is None else data)
    with pytest.raises(UserError, match=reason) as caught:
        target_digest(str(model))
    assert str(model) in str(caught.value) and "\n" not in str(caught.value)


def test_a_folder_without_weights_or_with_a_part_missing_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert model_digest(tmp_path) is None, "an endpoint is asked with a configuration and a tokenizer alone"
    with pytest.raises(UserError, match=r"no \*.safetensors and no \*.bin file"):
        weights_digest(tmp_path)
    sharded = made(tmp_path / "sharded", tensors(), parts=2)
    (sharded / "model-00001.safetensors").unlink()
    with pytest.raises(UserError, match=r"model-00001.safetensors: .*model.safetensors.index.json"):
        weights_digest(sharded)
