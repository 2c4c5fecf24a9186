"""`dflash-doctor` on a drafter whose files are right: a gap to decoding, prompts unlike those of training, recall."""

# ruff: noqa: F811  # the fixture `clinic` is another file's

import json
from dataclasses import replace

import pytest
import torch
from test_doctor import BREAKS, Clinic, clinic, tensors  # noqa: F401

import dflash_toolkit.decode
from dflash_toolkit.drafter import ContextKV, Drafter
from dflash_toolkit.target import Target

# ---- training against serving ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("every", "severity"), [(5, "warning"), (2, "fault"), (1, "fault")])
def test_features_that_are_others_while_it_decodes_are_told_as_the_gap(
    every: int,
    severity: str,
    clinic: Clinic,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    honest, blocks = dflash_toolkit.decode.propose, 0

    def forgetful(target: Target, drafter: Drafter, context: ContextKV, last: int, position: int) -> list[int]:
        """Sees nothing of what the target has read, in one block of `every`."""
        nonlocal blocks
        blocks += 1
        if blocks % every == 0:
            keys, values = ([torch.zeros_like(t) for t in held] for held in (context.keys, context.values))
            context = replace(context, keys=keys, values=values)
        return honest(target, drafter, context, last, position)

    monkeypatch.setattr(dflash_toolkit.decode, "propose", forgetful)
    found = clinic.examine()
    (gap,) = (f for f in found[severity] if f["check"] == "serving" and "teacher-forced" in f["measured"])
    assert found["fault"] == ([gap] if severity == "fault" else [])
    assert "the features of decoding differ from those of a whole text" in gap["remedy"]
    assert gap["figures"]["teacher_forced"] > 5 > gap["figures"]["decoded"]
    if every == 1:
        (recorded,) = (f for f in found["warning"] if "when it was trained" in f["measured"])
        assert recorded["remedy"] == "mend the faults named here"


@pytest.fixture(scope="module")
def other_prompts(clinic: Clinic) -> str:
    texts = ("Tell a story of a fox.", "Which way is north?", "List ten facts.", "Translate: good day.")
    path = clinic.path / "others.jsonl"
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    return f"p={path}"


def test_prompts_unlike_those_of_training_are_told_by_what_was_recorded_then(
    clinic: Clinic,
    other_prompts: str,
) -> None:
    (warning,) = (f for f in clinic.examine("--prompts", other_prompts)["warning"] if f["check"] == "serving")
    assert "5.50 when it was trained" in warning["measured"]
    assert warning["remedy"] == "these prompts are unlike those of training"


def test_what_was_recorded_is_not_held_against_the_prompts_where_a_fault_explains_it(clinic: Clinic) -> None:
    found = clinic.examine(break_it=BREAKS["theta"][0])
    (warning,) = (f for f in found["warning"] if f["check"] == "serving")
    assert [f["check"] for f in found["fault"]] == ["rope"] and warning["remedy"] == "mend the faults named here"


# ---- recall ----------------------------------------------------------------------------------------------------


def test_a_drafter_that_does_not_know_what_comes_next_lacks_data(clinic: Clinic, other_prompts: str) -> None:
    found = clinic.examine("--prompts", other_prompts)
    (warning,) = (f for f in found["warning"] if f["check"] == "recall")
    assert warning["figures"]["recall_16"][0] < 0.3 and "does not know what comes next" in warning["remedy"]
    assert [f["check"] for f in found["fault"]] == ["acceptance"]


def test_a_drafter_that_knows_the_token_but_ranks_it_too_low_was_trained_too_short(clinic: Clinic) -> None:
    def blur(held: dict[str, torch.Tensor]) -> None:
        g = torch.Generator().manual_seed(0)
        for weight in held.values():
            if weight.dim() == 2:
                weight += 0.45 * weight.std() * torch.randn(weight.shape, generator=g).to(weight.dtype)

    found = clinic.examine(break_it=tensors(blur))
    (warning,) = (f for f in found["warning"] if f["check"] == "recall")
    assert warning["figures"]["top_1"][0] < 0.5 < 0.6 < warning["figures"]["recall_16"][0]
    assert "knows the token but ranks it too low" in warning["remedy"]
    assert not found["fault"]


def test_recall_warns_of_nothing_where_a_fault_explains_it(clinic: Clinic) -> None:
    found = clinic.examine(break_it=BREAKS["mask row"][0])
    (recall,) = (f for f in found["ok"] if f["check"] == "recall")
    assert recall["figures"]["top_1"][0] < 0.3
