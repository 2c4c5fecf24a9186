"""Starts with windows or causal layers, or with a head that is not the target's."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import VOCAB
from damage import damage
from programs import Program
from safetensors.torch import load_file
from start_drafters import STILL, YARN, small_drafter, write_start

from dflash_toolkit import Drafter, load_drafter
from dflash_toolkit.doctor.cli import main as doctor
from dflash_toolkit.evaluation.cli import main as evaluate
from dflash_toolkit.fingerprint import drafter_digest


def check_started(run: Path, start: Path, drafter: Drafter) -> Drafter:
    """A run with one step that changes nothing exports the start's weights."""
    exported = load_drafter(str(run))
    stored = load_file(start / "model.safetensors")
    for name, weight in exported.named_parameters():
        assert torch.equal(weight, stored[name if name in stored else f"model.{name}"]), name
    assert drafter_digest(exported) == drafter_digest(drafter)
    return exported


KINDS = ("full_attention", "sliding_attention")
WINDOW = {"layers": 2, "layer_types": KINDS, "sliding_window": 8}
SLIDING, CAUSAL = "a sliding window of 8 tokens", "causal attention inside the block"


@pytest.mark.parametrize(
    ("form", "changes"),
    [
        ("z-lab", {"is_causal": True}),
        ("z-lab", WINDOW),
        ("speculators", WINDOW),
        ("z-lab", WINDOW | {"is_causal": None}),
    ],
    ids=["causal", "sliding", "speculators", "both"],
)
def test_sliding_window_layers_are_trained_and_exported(
    form: str, changes: dict[str, Any], dflash_train: Program, tmp_path: Path
) -> None:
    drafter = small_drafter(**changes)
    start = write_start(form, tmp_path / "start", drafter)
    found = dflash_train("--init-from", start, f"drafter.layers={drafter.config.num_layers}", *STILL)
    assert not [line for line in found if "is trained" in line]
    assert check_started(tmp_path / "run", start, drafter).config == drafter.config
    values = dflash_train.record()["config"]["drafter"]
    assert [values["layer_types"], values["sliding_window"], values["is_causal"]] == [
        list(drafter.config.layer_types), drafter.config.sliding_window, drafter.config.is_causal
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "asked", "sight", "said"),
    [
        (
            WINDOW | {"is_causal": None},
            ["drafter.layer_types=[full_attention]", "drafter.is_causal=false"],
            {"layer_types": (), "sliding_window": None, "is_causal": False},
            f"{SLIDING} (layers [1]) and {CAUSAL} (layers [1]); full attention is trained",
        ),
        (
            {"layers": 2},
            ["--drafter.layer-types", "sliding_attention", "--drafter.sliding-window", "8"],
            {"layer_types": KINDS[1:] * 2, "sliding_window": 8},
            f"full attention; {SLIDING} (layers [0, 1]) is trained",
        ),
        (WINDOW, ["drafter.sliding_window=16"], {"sliding_window": 16}, None),
        (WINDOW, ["drafter.is_causal=null"], {"is_causal": None}, None),
        (WINDOW, ["drafter.layer_types=[]", "drafter.is_causal=false"], {}, ""),
    ],
    ids=["full", "sliding", "window", "causal", "nothing"],
)
@pytest.mark.sampled
def test_attention_options_of_a_start_are_trained_and_printed(
    changes: dict[str, Any], asked: list[str], sight: dict[str, Any], said: str | None,
    dflash_train: Program, tmp_path: Path,
) -> None:  # fmt: skip
    drafter = small_drafter(**changes)
    start = write_start("z-lab", tmp_path / "start", drafter)
    found = dflash_train("--init-from", start, "drafter.layers=2", *asked, *STILL)
    lines = [line for line in found if "is trained" in line]
    assert len(lines) == (said != "")
    assert not said or lines == [f"drafter {start} has {said}"]
    assert check_started(tmp_path / "run", start, drafter).config == replace(drafter.config, **sight)


@pytest.mark.parametrize(
    ("changes", "asked", "said"),
    [
        ({}, ["drafter.sliding_window=64"], "drafter: sliding_window is 64, but no layer is sliding_attention"),
        (WINDOW, ["drafter.layers=2", "drafter.sliding_window=3"], "sliding_window is 3, less than a block of 4"),
        (WINDOW | {"sliding_window": 3}, ["drafter.layers=2"], "sliding_window is 3, less than a block of 4"),
        ({}, ["drafter.layer_types=[full_attention,full_attention]"], "drafter: layer_types has 2 entries for 1"),
        ({}, ["drafter.layer_types=[slding_attention]"], "'slding_attention' is not one of full_attention, sliding"),
        (
            WINDOW | {"is_causal": None},
            ["drafter.layers=2", "run.speculators=true"],
            "run/speculators: the speculators form cannot hold causal layers",
        ),
    ],
    ids=["no layer", "short", "short start", "entries", "typo", "speculators"],
)
def test_invalid_attention_options_of_a_start_are_one_line(
    changes: dict[str, Any], asked: list[str], said: str, dflash_train: Program, tmp_path: Path
) -> None:
    start = write_start("z-lab", tmp_path / "start", small_drafter(**changes))
    assert said in dflash_train.refuses("--init-from", start, *asked)
    if not changes:
        assert said in dflash_train.refuses(*asked)


def reduce_vocabulary(path: Path, rows: int, *, embedding: bool) -> None:
    """Give a checkpoint a head of its own over the first `rows` tokens, and what maps them."""
    tensors = {"lm_head.weight": torch.randn(rows, 32).bfloat16(), "d2t": torch.zeros(rows, dtype=torch.long)}
    tensors |= {"t2d": torch.arange(VOCAB) < rows} | ({} if embedding else {"embed_tokens.weight": None})
    damage(path / "config.json", {"draft_vocab_size": rows})
    damage(path / "model.safetensors", tensors)


@pytest.mark.parametrize(("form", "embedding"), [("speculators", True), ("speculators", False), ("z-lab", False)])
def test_only_layers_are_taken_from_a_reduced_vocabulary_start(
    form: str, embedding: bool, dflash_train: Program, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    drafter = small_drafter(rope_scaling=YARN)
    start = write_start(form, tmp_path / "start", drafter)
    reduce_vocabulary(start, 100, embedding=embedding)
    said = dflash_train("--init-from", start, "run.speculators=true", *STILL)
    (line,) = (line for line in said if "has a reduced" in line)
    assert line == f"drafter {start} has a reduced vocabulary of 100; only its layers are used, with the target's head"
    exported = check_started(tmp_path / "run", start, drafter)
    assert exported.config == drafter.config and exported.config.vocab_size == VOCAB
    whole = json.loads((tmp_path / "run/speculators/config.json").read_text())
    assert whole["draft_vocab_size"] == whole["transformer_layer_config"]["vocab_size"] == VOCAB
    assert load_file(tmp_path / "run/speculators/model.safetensors")["lm_head.weight"].shape == (VOCAB, 32)

    if form == "z-lab":
        return  # the doctor reports on a drafter of this form that it cannot run
    asked = ["--target", str(dflash_train.target), "--drafter", str(start), "--prompts", f"p={dflash_train.data}"]
    for program, more in ((doctor, []), (evaluate, ["--output", str(tmp_path)])):
        assert program([*asked, "--device", "cpu", *more]) == 2
        (error,) = (line for line in capsys.readouterr().err.splitlines() if line.startswith("error:"))
        assert "a reduced vocabulary, which is not drafted with; dflash-train --init-from" in error
