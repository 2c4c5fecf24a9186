"""`dflash-doctor` on two drafters, each broken in every known way: with the record the cause is certain; without it
no wrong thing is ever named as the fault.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import MASK, make_target
from safetensors.torch import load_file, save_file
from test_doctor import edit, fit

from dflash_toolkit import Drafter, SamplingParams, Target, generate, load_drafter, save_drafter
from dflash_toolkit.data.prompts import Prompt, encode_chat
from dflash_toolkit.doctor.cli import judge
from dflash_toolkit.doctor.files import Case
from dflash_toolkit.doctor.finding import Finding
from dflash_toolkit.models.dflash.checkpoint import PROVENANCE_KEY
from dflash_toolkit.models.dflash.speculators import save_speculators
from dflash_toolkit.record import RECORD_KEY, export_record
from train.responses.rows import Row

TEXTS = ("Count to ten.", "What is 2+2?", "Hello!")
TOKENS = 36
BLOCK = 6
Tensors = dict[str, torch.Tensor]


@dataclass(slots=True)
class Patient:
    """A drafter that has memorised its target's answers, on disk with and without a record of its export."""

    target: Target
    drafter: Drafter
    path: Path
    tau: float = 0.0

    @property
    def taps(self) -> list[int]:
        return list(self.drafter.config.target_layer_ids)

    @property
    def layers(self) -> int:
        return self.drafter.config.num_layers

    def examine(
        self,
        break_it: Callable[["Patient", Path], None] | None = None,
        *,
        recorded: bool = True,
        texts: tuple[str, ...] = TEXTS,
        target: Target | None = None,
    ) -> dict[str, list[Finding]]:
        """The findings by severity of a copy, broken or not."""
        shutil.rmtree(copy := self.path / "copy", ignore_errors=True)
        shutil.copytree(self.path / "exported", copy)
        if not recorded:
            change_config(copy, lambda values: values.pop(PROVENANCE_KEY))
        if break_it:
            break_it(self, copy)
        used = target or self.target
        case = Case.read(str(copy), used.config, used.tokenizer, None)
        prompts = [Prompt(text, ({"role": "user", "content": text},)) for text in texts]
        found: dict[str, list[Finding]] = {"ok": [], "warning": [], "fault": []}
        for finding in judge(case, prompts, lambda: used, TOKENS):
            assert finding.measured and bool(finding.remedy) == (finding.severity != "ok")
            found[finding.severity].append(finding)
        return found


def change_config(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    values = json.loads((path / "config.json").read_text())
    change(values)
    (path / "config.json").write_text(json.dumps(values))


def change_tensors(path: Path, change: Callable[[Tensors], Tensors]) -> None:
    held = change(load_file(path / "model.safetensors"))
    save_file({name: tensor.contiguous().clone() for name, tensor in held.items()}, path / "model.safetensors")


def patient(path: Path, kind: str, taps: int, layers: int, learning_rate: float) -> Patient:
    target = make_target(kind, layers=8)
    rows = []
    for i, text in enumerate(TEXTS):
        prompt = encode_chat(target.tokenizer, [{"role": "user", "content": text}])
        answer = generate(target, None, prompt, SamplingParams(max_new_tokens=TOKENS)).tokens
        assert len(answer) == TOKENS and len(set(answer)) > 18, "a long and varied answer"
        rows.append(Row(i, len(prompt), prompt + answer))
    made = fit(
        target, rows, path, block_size=BLOCK, steps=250, anchors=12, taps=taps, layers=layers,
        learning_rate=learning_rate,
    )  # fmt: skip
    note = {"target": "tiny", "acceptance_length": 5.5, "trained_block_size": BLOCK}
    save_drafter(made, path / "exported", note | {RECORD_KEY: export_record(made, target)})
    return Patient(target, made, path)


@pytest.fixture(scope="module", params=["qwen3, 5 taps, 3 layers", "llama, 3 taps, 2 layers"])
def sick(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Patient:
    kind, taps, layers = request.param.replace(" taps", "").replace(" layers", "").split(", ")
    return patient(tmp_path_factory.mktemp(kind), kind, int(taps), int(layers), 8e-3)


# ---- twelve ways to break it -------------------------------------------------------------------------------------


def reversed_taps(patient: Patient, path: Path) -> None:
    edit(target_layer_ids=patient.taps[::-1])(path)


def swapped_taps(patient: Patient, path: Path) -> None:
    ids = patient.taps
    edit(target_layer_ids=[ids[1], ids[0], *ids[2:]])(path)


def ids_off_by_one(patient: Patient, path: Path) -> None:
    edit(target_layer_ids=[i + 1 for i in patient.taps])(path)


def wrong_mask(patient: Patient, path: Path) -> None:
    edit(mask_token_id=MASK - 1)(path)


def wrong_theta(patient: Patient, path: Path) -> None:
    edit(rope_theta=1e2)(path)


def swapped_layers(patient: Patient, path: Path) -> None:
    def swap(held: Tensors) -> Tensors:
        names = {"0": "1", "1": "0"}
        return {
            ".".join([a, names.get(i, i), *rest]) if a == "layers" else ".".join([a, i, *rest]): tensor
            for name, tensor in held.items()
            for a, i, *rest in [name.split(".")]
        }

    change_tensors(path, swap)


def interleaved(patient: Patient, path: Path) -> None:
    """Pair beside pair, as a RoPE that turns neighbours wants the rows."""
    half = patient.drafter.config.head_dim // 2

    def rows(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if "q_proj" not in name and "k_proj" not in name:
            return tensor
        heads = tensor.view(-1, 2, half, tensor.shape[-1])
        return heads.transpose(1, 2).reshape(tensor.shape)

    change_tensors(path, lambda held: {name: rows(name, tensor) for name, tensor in held.items()})


def minus_one(patient: Patient, path: Path) -> None:
    def less(name: str, tensor: torch.Tensor) -> torch.Tensor:
        return (tensor.float() - 1).bfloat16() if name.endswith("norm.weight") else tensor

    change_tensors(path, lambda held: {name: less(name, tensor) for name, tensor in held.items()})


def cut_off(patient: Patient, path: Path) -> None:
    """The last layer gone, and config.json agrees."""
    last = patient.layers - 1
    change_tensors(path, lambda held: {n: t for n, t in held.items() if not n.startswith(f"layers.{last}.")})
    change_config(path, lambda values: values.update(num_hidden_layers=last, layer_types=values["layer_types"][:last]))


def exchange(one: str, other: str) -> Callable[[Patient, Path], None]:
    def swap(patient: Patient, path: Path) -> None:
        def renamed(name: str) -> str:
            return name.replace(one, "?").replace(other, one).replace("?", other)

        change_tensors(path, lambda held: {renamed(name): tensor for name, tensor in held.items()})

    return swap


def zeroed(patient: Patient, path: Path) -> None:
    name = "layers.0.self_attn.v_proj.weight"
    change_tensors(path, lambda held: held | {name: torch.zeros_like(held[name])})


def noisy(patient: Patient, path: Path) -> None:
    """One matrix overwritten: nothing but the record can tell."""
    name = "layers.1.mlp.down_proj.weight"
    noise = torch.randn(patient.drafter.get_parameter(name).shape, generator=torch.Generator().manual_seed(3))
    change_tensors(path, lambda held: held | {name: (0.3 * noise).bfloat16()})


def longer_block(patient: Patient, path: Path) -> None:
    edit(block_size=2 * BLOCK)(path)


# the break, the check that names it, and words of its remedy
BREAKS: dict[str, tuple[Callable[[Patient, Path], None], str, Callable[[Patient], str]]] = {
    "taps reversed": (reversed_taps, "tap order", lambda p: f"target_layer_ids to {p.taps}"),
    "two taps swapped": (swapped_taps, "tap order", lambda p: f"target_layer_ids to {p.taps}"),
    "ids off by one": (ids_off_by_one, "layer ids", lambda p: f"target_layer_ids to {p.taps}"),
    "another mask row": (wrong_mask, "mask row", lambda p: f"mask_token_id to {MASK}"),
    "another theta": (wrong_theta, "rope", lambda p: "rope_theta to 10000.0"),
    "layers swapped": (swapped_layers, "layer order", lambda p: "layers.0 and layers.1 are swapped"),
    "rope rows interleaved": (interleaved, "rope rows", lambda p: "de-interleave the 8 rows of every head"),
    "norms minus one": (minus_one, "norm weights", lambda p: "add 1 to every norm's weight"),
    "last layer cut off": (cut_off, "layers", lambda p: f"with all {p.layers} layers"),
    "gate and up swapped": (
        exchange("gate_proj", "up_proj"), "gate and up", lambda p: "gate_proj and up_proj are swapped",
    ),
    "q and k norms swapped": (
        exchange("q_norm", "k_norm"), "q and k norms", lambda p: "q_norm and k_norm are swapped",
    ),
    "a tensor zeroed": (zeroed, "weights", lambda p: "the export lost these tensors"),
    "a tensor overwritten": (noisy, "weights", lambda p: "copy the export again"),
    "a longer block": (longer_block, "curve", lambda p: f"set block_size to {BLOCK}"),
}  # fmt: skip

# an exchange of norms that are nearly alike does no harm, and one layer of three may be missed little
HARMLESS_TAU = 2.5


def named(findings: list[Finding]) -> set[str]:
    return {finding.check for finding in findings}


@pytest.mark.parametrize("name", BREAKS)
def test_with_a_record_the_cause_is_certain_and_nothing_else_is_blamed(sick: Patient, name: str) -> None:
    break_it, check, remedy = BREAKS[name]
    found = sick.examine(break_it, texts=TEXTS[:1])
    assert named(found["fault"]) == {check}
    (fault,) = found["fault"]
    assert remedy(sick) in fault.remedy
    assert not any("prompts" in finding.remedy for finding in found["warning"]), "the cause is known"
    assert named(found["warning"]) <= {"serving", "recall", "acceptance"}


@pytest.mark.parametrize("name", BREAKS)
def test_without_a_record_no_wrong_thing_is_named(sick: Patient, name: str) -> None:
    break_it, check, remedy = BREAKS[name]
    found = sick.examine(break_it, recorded=False)
    (acceptance,) = (f for severity in found.values() for f in severity if f.check == "acceptance")
    blamed = named(found["fault"])
    assert blamed <= {check, "acceptance"}
    assert blamed or found["warning"] or acceptance.figures["tau"] > HARMLESS_TAU
    for fault in found["fault"]:
        if fault.check == check:
            assert remedy(sick) in fault.remedy
        else:  # as good as none, and that is all that can be said
            assert "no known mistake explains it" in fault.remedy and "left no record to tell" in fault.remedy
    for finding in found["warning"]:
        assert " set " not in finding.remedy and not finding.remedy.startswith("set "), "only a fault has a cure"


def test_a_drafter_that_is_well_is_called_well(sick: Patient) -> None:
    for recorded in (True, False):
        found = sick.examine(recorded=recorded)
        assert (found["fault"], found["warning"]) == ([], [])
        (record,) = (finding for finding in found["ok"] if finding.check == "record")
        assert ("those of the export" in record.measured) == recorded


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


def test_another_target_of_the_same_shape_is_told_by_its_hidden_states(sick: Patient) -> None:
    other = make_target(sick.target.config.model_type, layers=8)
    with torch.no_grad():
        other.layers[2].mlp.down_proj.weight.mul_(-1)
    found = sick.examine(target=other)
    assert named(found["fault"]) == {"target"}
    first = next(i for i in sorted(sick.taps) if i >= 2)
    assert f"first at layers.{first}, " in found["fault"][0].measured
    assert found["fault"][0].figures["distance"]["embedding"] == 0


def test_two_faults_of_the_weights_and_one_of_the_configuration_are_all_certain(sick: Patient) -> None:
    def thrice(patient: Patient, path: Path) -> None:
        swapped_layers(patient, path)
        interleaved(patient, path)
        wrong_mask(patient, path)

    found = sick.examine(thrice)
    assert named(found["fault"]) == {"layer order", "rope rows", "mask row"}
    (mended,) = (finding for finding in found["ok"] if finding.check == "record")
    assert mended.figures["tau"] < 2 < 5 < mended.figures["tau_as_exported"]


def test_a_drafter_that_was_broken_before_it_was_recorded_is_told_by_trying(sick: Patient) -> None:
    def recorded_later(patient: Patient, path: Path) -> None:
        swapped_layers(patient, path)
        record = export_record(load_drafter(str(path)), patient.target)
        change_config(path, lambda values: values[PROVENANCE_KEY].update({RECORD_KEY: record}))

    (fault,) = sick.examine(recorded_later)["fault"]
    assert fault.check == "layer order" and "layers.0 and layers.1 are swapped" in fault.remedy


def test_an_edited_record_is_not_believed(sick: Patient) -> None:
    def throughout(patient: Patient, path: Path) -> None:
        text = (path / "config.json").read_text()
        (path / "config.json").write_text(text.replace(f'"mask_token_id": {MASK}', f'"mask_token_id": {MASK - 1}'))

    found = sick.examine(throughout)
    assert named(found["fault"]) == {"mask row"} and f"to {MASK}" in found["fault"][0].remedy
    assert "record" in named(found["warning"])


def test_the_record_serves_the_speculators_form_too(sick: Patient) -> None:
    def converted(patient: Patient, path: Path) -> None:
        drafter, note = load_drafter(str(path)), json.loads((path / "config.json").read_text())[PROVENANCE_KEY]
        shutil.rmtree(path)
        target = patient.target
        copies = (target.embedding.weight, target.head_weight)
        save_speculators(drafter, path, target.config, *copies, provenance=note)

    found = sick.examine(converted)
    assert (found["fault"], found["warning"]) == ([], [])

    def swapped(patient: Patient, path: Path) -> None:
        converted(patient, path)
        ids = [i + 1 for i in patient.taps[::-1]]
        change_config(path, lambda values: values.update(aux_hidden_state_layer_ids=ids))

    (fault,) = sick.examine(swapped)["fault"]
    assert fault.check == "tap order"
    assert f"aux_hidden_state_layer_ids to {[i + 1 for i in sick.taps]}" in fault.remedy


def test_one_bar_counts_everything(sick: Patient, capsys: pytest.CaptureFixture[str]) -> None:
    sick.examine(recorded=False)
    lines = [line for line in capsys.readouterr().err.splitlines() if "/s" in line]
    assert len({line.split()[0] for line in lines}) == 1
    done, total = lines[-1].split("━ ")[-1].split()[0].split("/")
    assert done == total
