"""`dflash-doctor` on two drafters, broken in every known way: with the record the cause is certain; without it no wrong
thing is ever named as the fault. Each way breaks one drafter that has the record and the other that has none.
"""

import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import MASK, make_target
from doctor_cases import (
    BLOCK,
    SHORT_TEXTS,
    TOKENS,
    Break,
    Patient,
    answered,
    config,
    edit,
    every,
    exchange,
    fit,
    named,
    tensors,
)
from torch import Tensor

from dflash_toolkit import load_drafter, save_drafter
from dflash_toolkit.models.dflash.checkpoint import PROVENANCE_KEY
from dflash_toolkit.models.dflash.speculators import save_speculators
from dflash_toolkit.record import RECORD_KEY, export_record

KINDS = {"qwen3": (5, 2, 8), "llama": (3, 3, 6)}  # taps, layers, those of the target


@pytest.fixture(scope="module")
def patient(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Patient]:
    """The patient of a kind, trained where it is first asked for."""

    @functools.cache
    def trained(kind: str) -> Patient:
        taps, layers, deep = KINDS[kind]
        target = make_target(kind, layers=deep)
        path = tmp_path_factory.mktemp(kind)
        made = fit(
            target, answered(target, SHORT_TEXTS, TOKENS), path, steps=90, block_size=BLOCK, taps=taps, layers=layers
        )
        note = {"target": "tiny", "acceptance_length": 5.5, "trained_block_size": BLOCK}
        save_drafter(made, path / "exported", note | {RECORD_KEY: export_record(made, target)})
        return Patient(target, made, path)

    return trained


@pytest.fixture(params=KINDS)  # most tests take one of them: what they try knows no kinds
def sick(request: pytest.FixtureRequest, patient: Callable[[str], Patient]) -> Patient:
    return patient(request.param)


# ---- ways to break it ----------------------------------------------------------------------------------------------


def adjacent_pairs(rows: Tensor) -> Tensor:
    """Returns the rows of heads of eight in interleaved order, for a RoPE that rotates adjacent pairs."""
    return rows.view(-1, 2, 4, rows.shape[-1]).transpose(1, 2).reshape(rows.shape)


def noise(like: Tensor) -> Tensor:
    return (0.3 * torch.randn(like.shape, generator=torch.Generator().manual_seed(3))).bfloat16()


def cut_off(patient: Patient) -> Break:
    """The last layer gone, and config.json agrees."""
    last = patient.drafter.config.num_layers - 1

    def rewrite(path: Path) -> None:
        tensors(lambda held: [held.pop(name) for name in list(held) if name.startswith(f"layers.{last}.")])(path)
        config(lambda values: values.update(num_hidden_layers=last, layer_types=values["layer_types"][:last]))(path)

    return rewrite


# the break, the check that names it, and words of its remedy
BREAKS: dict[str, tuple[Callable[[Patient], Break], str, str]] = {
    "taps reversed": (lambda p: edit(target_layer_ids=p.taps[::-1]), "tap order", "target_layer_ids to {0.taps}"),
    "two taps swapped": (
        lambda p: edit(target_layer_ids=[p.taps[1], p.taps[0], *p.taps[2:]]), "tap order",
        "target_layer_ids to {0.taps}",
    ),
    "ids off by one": (
        lambda p: edit(target_layer_ids=[i + 1 for i in p.taps]), "layer ids", "target_layer_ids to {0.taps}",
    ),
    "another mask row": (lambda p: edit(mask_token_id=MASK - 1), "mask row", f"mask_token_id to {MASK}"),
    "another theta": (lambda p: edit(rope_theta=1e2), "rope", "rope_theta to 10000.0"),
    "layers swapped": (
        lambda p: exchange("layers.0.", "layers.1."), "layer order", "layers.0 and layers.1 are swapped",
    ),
    "rope rows interleaved": (
        lambda p: every("[qk]_proj", adjacent_pairs), "rope rows", "de-interleave the 8 rows of every head",
    ),
    "norms minus one": (
        lambda p: every(r"norm\.weight$", lambda t: (t.float() - 1).bfloat16()), "norm weights",
        "add 1 to every norm's weight",
    ),
    "last layer cut off": (cut_off, "layers", "with all {0.drafter.config.num_layers} layers"),
    "gate and up swapped": (
        lambda p: exchange("gate_proj", "up_proj"), "gate and up", "gate_proj and up_proj are swapped",
    ),
    "q and k norms swapped": (
        lambda p: exchange("q_norm", "k_norm"), "q and k norms", "q_norm and k_norm are swapped",
    ),
    "a tensor zeroed": (
        lambda p: every("layers.0.self_attn.v_proj", torch.zeros_like), "weights", "the export lost these tensors",
    ),
    # only the record shows it
    "a tensor overwritten": (lambda p: every("layers.1.mlp.down_proj", noise), "weights", "copy the export again"),
    "a longer block": (lambda p: edit(block_size=2 * BLOCK), "curve", f"set block_size to {BLOCK}"),
}  # fmt: skip

# exchanging nearly equal norms does no harm, and losing one layer of three may do little
HARMLESS_TAU = 2.5


# every way breaks both drafters, one with and one without its record: the other two examinations show nothing new
IN_TURN = [(name, list(KINDS)[i % 2], list(KINDS)[1 - i % 2]) for i, name in enumerate(BREAKS)]


@pytest.mark.parametrize(("name", "kind"), [(name, kind) for name, kind, _ in IN_TURN])
@pytest.mark.sampled
def test_with_a_record_only_the_cause_is_reported(patient: Callable[[str], Patient], name: str, kind: str) -> None:
    (break_it, check, remedy), sick = BREAKS[name], patient(kind)
    found = sick.examine(break_it(sick))
    assert named(found["fault"]) == {check}
    (fault,) = found["fault"]
    assert remedy.format(sick) in fault.remedy
    assert not any("prompts" in finding.remedy for finding in found["warning"]), "the cause is known"
    assert named(found["warning"]) <= {"serving", "recall", "acceptance"}


@pytest.mark.parametrize(("name", "kind"), [(name, kind) for name, _, kind in IN_TURN])
@pytest.mark.sampled
def test_without_a_record_no_wrong_cause_is_reported(patient: Callable[[str], Patient], name: str, kind: str) -> None:
    (break_it, check, remedy), sick = BREAKS[name], patient(kind)
    found = sick.examine(break_it(sick), recorded=False)
    (acceptance,) = (f for severity in found.values() for f in severity if f.check == "acceptance")
    blamed = named(found["fault"])
    assert blamed <= {check, "acceptance"}
    assert blamed or found["warning"] or acceptance.figures["tau"] > HARMLESS_TAU
    for fault in found["fault"]:
        if fault.check == check:
            assert remedy.format(sick) in fault.remedy
        else:  # as good as none, and that is all that can be said
            assert "no known mistake explains it" in fault.remedy and "left no record" in fault.remedy
    for finding in found["warning"]:
        assert " set " not in finding.remedy and not finding.remedy.startswith("set "), "only a fault has a cure"


def test_a_healthy_drafter_has_no_findings(sick: Patient) -> None:
    for recorded in (True, False):
        found = sick.examine(recorded=recorded)
        assert (found["fault"], found["warning"]) == ([], [])
        (record,) = (finding for finding in found["ok"] if finding.check == "record")
        assert ("those of the export" in record.measured) == recorded


@pytest.mark.parametrize("sick", ["llama"], indirect=True)
def test_prompts_are_blamed_only_where_everything_else_is_as_exported(sick: Patient) -> None:
    unlike = ("zzzz yyyy", "1 2 3 4 5 6", "Ä?")
    found = sick.examine(texts=unlike)
    assert found["fault"] == []
    for check in ("acceptance", "serving"):
        (finding,) = (f for f in found["warning"] if f.check == check)
        assert "are those of the export" in finding.remedy and "prompts unlike those of training" in finding.remedy
    found = sick.examine(texts=unlike, recorded=False)
    assert named(found["fault"]) <= {"acceptance"}
    (finding,) = (f for f in found["warning"] + found["fault"] if f.check == "acceptance")
    assert "open are weights changed or layers lost" in finding.remedy
    assert "another target" in finding.remedy and "prompts unlike those of training" in finding.remedy


@pytest.mark.parametrize("sick", ["qwen3"], indirect=True)
def test_another_target_of_equal_shape_is_found_by_hidden_states(sick: Patient) -> None:
    other = make_target(sick.target.config.model_type, layers=8)
    with torch.no_grad():
        other.layers[2].mlp.down_proj.weight.mul_(-1)
    found = sick.examine(target=other)
    assert named(found["fault"]) == {"target"}
    first = next(i for i in sorted(sick.taps) if i >= 2)
    assert f"first at layers.{first}, " in found["fault"][0].measured
    assert found["fault"][0].figures["distance"]["embedding"] == 0


@pytest.mark.parametrize("sick", ["llama"], indirect=True)
def test_three_faults_at_once_are_all_certain(sick: Patient) -> None:
    def thrice(path: Path) -> None:
        for name in ("layers swapped", "rope rows interleaved", "another mask row"):
            BREAKS[name][0](sick)(path)

    found = sick.examine(thrice)
    assert named(found["fault"]) == {"layer order", "rope rows", "mask row"}
    (restored,) = (finding for finding in found["ok"] if finding.check == "record")
    assert restored.figures["tau"] < 2 < 5 < restored.figures["tau_as_exported"]


@pytest.mark.parametrize("sick", ["qwen3"], indirect=True)
def test_a_drafter_broken_before_its_record_is_found_by_sweeps(sick: Patient) -> None:
    def recorded_later(path: Path) -> None:
        exchange("layers.0.", "layers.1.")(path)
        record = export_record(load_drafter(str(path)), sick.target)
        config(lambda values: values[PROVENANCE_KEY].update({RECORD_KEY: record}))(path)

    (fault,) = sick.examine(recorded_later)["fault"]
    assert fault.check == "layer order" and "layers.0 and layers.1 are swapped" in fault.remedy


@pytest.mark.parametrize("sick", ["llama"], indirect=True)
def test_an_edited_record_is_rejected(sick: Patient) -> None:
    def throughout(path: Path) -> None:
        text = (path / "config.json").read_text()
        (path / "config.json").write_text(text.replace(f'"mask_token_id": {MASK}', f'"mask_token_id": {MASK - 1}'))

    found = sick.examine(throughout)
    assert named(found["fault"]) == {"mask row"} and f"to {MASK}" in found["fault"][0].remedy
    assert "record" in named(found["warning"])


@pytest.mark.parametrize("sick", ["qwen3"], indirect=True)
def test_the_record_applies_to_the_speculators_form(sick: Patient) -> None:
    def converted(path: Path) -> None:
        drafter, note = load_drafter(str(path)), json.loads((path / "config.json").read_text())[PROVENANCE_KEY]
        shutil.rmtree(path)
        target = sick.target
        copies = (target.embedding.weight, target.head_weight)
        save_speculators(drafter, path, target.config, *copies, provenance=note)

    found = sick.examine(converted)
    assert (found["fault"], found["warning"]) == ([], [])

    def swapped(path: Path) -> None:
        converted(path)
        edit(aux_hidden_state_layer_ids=[i + 1 for i in sick.taps[::-1]])(path)

    (fault,) = sick.examine(swapped)["fault"]
    assert fault.check == "tap order"
    assert f"aux_hidden_state_layer_ids to {[i + 1 for i in sick.taps]}" in fault.remedy


@pytest.mark.parametrize("sick", ["llama"], indirect=True)
def test_one_progress_bar_counts_everything(sick: Patient, capsys: pytest.CaptureFixture[str]) -> None:
    sick.examine(recorded=False)
    lines = [line for line in capsys.readouterr().err.splitlines() if "/s" in line]
    assert len({line.split()[0] for line in lines}) == 1
    done, total = lines[-1].split("━ ")[-1].split()[0].split("/")
    assert done == total
