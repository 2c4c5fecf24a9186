"""A start that is trained in another way than its checkpoint says: full attention, over the target's own head."""

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
from test_train_start import STILL, YARN, small_drafter, write_start

from dflash_toolkit import Drafter, load_drafter
from dflash_toolkit.doctor.cli import main as doctor
from dflash_toolkit.evaluation.cli import main as evaluate
from dflash_toolkit.fingerprint import drafter_digest


def check_started(run: Path, start: Path, drafter: Drafter) -> Drafter:
    """The export of a run whose one step moved nothing holds the start's weights."""
    exported = load_drafter(str(run))
    stored = load_file(start / "model.safetensors")
    for name, weight in exported.named_parameters():
        assert torch.equal(weight, stored[name if name in stored else f"model.{name}"]), name
    assert drafter_digest(exported) == drafter_digest(drafter)
    return exported


WINDOW = {"layers": 2, "layer_types": ("full_attention", "sliding_attention"), "sliding_window": 8}
SLIDING, CAUSAL = "a sliding window of 8 tokens", "causal attention inside the block"


@pytest.mark.parametrize(
    ("form", "changes", "said"),
    [
        ("z-lab", {"is_causal": True}, f"{CAUSAL} (layers [0])"),
        ("z-lab", WINDOW, f"{SLIDING} (layers [1])"),
        ("speculators", WINDOW, f"{SLIDING} (layers [1])"),
        ("z-lab", WINDOW | {"is_causal": None}, f"{SLIDING} (layers [1]) and {CAUSAL} (layers [1])"),
    ],
    ids=["causal", "sliding", "speculators", "both"],
)
def test_layers_that_see_less_are_trained_with_full_attention(
    form: str, changes: dict[str, Any], said: str, dflash_train: Program, tmp_path: Path
) -> None:
    drafter = small_drafter(**changes)
    start = write_start(form, tmp_path / "start", drafter)
    layers = f"drafter.layers={drafter.config.num_layers}"
    found = dflash_train("--init-from", start, layers, *STILL)
    lines = [line for line in found if "full attention is trained" in line]
    assert lines == [f"drafter {start} has {said}; full attention is trained"]
    exported = check_started(tmp_path / "run", start, drafter)
    full = {"layer_types": (), "sliding_window": None, "is_causal": False}
    assert exported.config == replace(drafter.config, **full)
    values = json.loads((tmp_path / "run/config.json").read_text())
    assert set(values["layer_types"]) == {"full_attention"} and values["is_causal"] is False


def reduce_vocabulary(path: Path, rows: int, *, embedding: bool) -> None:
    """Give a checkpoint a head of its own over the first `rows` tokens, and what maps them."""
    tensors = {"lm_head.weight": torch.randn(rows, 32).bfloat16(), "d2t": torch.zeros(rows, dtype=torch.long)}
    tensors |= {"t2d": torch.arange(VOCAB) < rows} | ({} if embedding else {"embed_tokens.weight": None})
    damage(path / "config.json", {"draft_vocab_size": rows})
    damage(path / "model.safetensors", tensors)


@pytest.mark.parametrize(
    ("form", "embedding"), [("speculators", True), ("speculators", False), ("prefixed", True), ("z-lab", False)]
)
def test_of_a_reduced_vocabulary_the_layers_are_taken(
    form: str, embedding: bool, dflash_train: Program, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    drafter = small_drafter(rope_scaling=YARN)
    start = write_start(form, tmp_path / "start", drafter)
    reduce_vocabulary(start, 100, embedding=embedding)
    said = dflash_train("--init-from", start, "run.speculators=true", *STILL)
    (line,) = (line for line in said if "has a reduced" in line)
    assert line == f"drafter {start} has a reduced vocabulary of 100; its layers are taken, the head is the target's"
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
