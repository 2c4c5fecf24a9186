"""The list of published drafters: what matches a target, and what the commands say of it."""

import subprocess
import sys

import pytest

from dflash_toolkit.models.dflash.serving import SERVED
from dflash_toolkit.models.published import PUBLISHED, hint_for, named_for, published_for

Z_LAB_8B = "z-lab/Qwen3-8B-DFlash-b16"


@pytest.mark.parametrize(
    "target",
    [
        "Qwen/Qwen3-8B",
        "Qwen/Qwen3-8B-FP8",
        "RedHatAI/Qwen3-8B-FP8-dynamic",
        "RedHatAI/Qwen3-8B-quantized.w4a16",
        "Qwen/Qwen3-8B-AWQ",
        "/models/Qwen3-8B/",
        "/home/me/.cache/huggingface/hub/models--Qwen--Qwen3-8B/snapshots/0123abcd",
    ],
)
def test_a_target_folder_or_quantized_variant_has_drafters(target: str) -> None:
    assert published_for(target)[0].drafter == Z_LAB_8B


@pytest.mark.parametrize(
    "target", ["me/Qwen3-8B-tuned", "Qwen/Qwen3-4B-Instruct-2507", "Qwen/Qwen3.5-9B-Base", ".", "/"]
)
def test_another_model_has_no_published_drafter(target: str) -> None:
    assert named_for(target) == "" and hint_for(target) == ""


def test_drafters_in_z_lab_form_come_first() -> None:
    for target in {each.target for each in PUBLISHED}:
        forms = [each.form == "z-lab" for each in published_for(target)]
        assert forms == sorted(forms, reverse=True)


def test_every_published_row_is_complete() -> None:
    assert len({each.drafter for each in PUBLISHED}) == len(PUBLISHED)
    for each in PUBLISHED:
        assert each.drafter.count("/") == 1 and each.source
        assert each.architecture == "" or each.architecture in SERVED
        assert each.block_size is None or each.block_size >= 2
        assert named_for(f"org/{each.target}")


def said(*words: str) -> str:
    done = subprocess.run([sys.executable, "-m", *words], capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    return done.stderr


def test_serving_without_drafter_names_published_ones() -> None:
    # a port that cannot be bound ends the command before the target is looked for
    stderr = said("dflash_toolkit.serve.cli", "--target", "Qwen/Qwen3-8B", "--host", "203.0.113.1")
    assert f"no drafter is given, so it decodes plainly; published for Qwen/Qwen3-8B: {Z_LAB_8B}" in stderr
    assert "published" not in said("dflash_toolkit.serve.cli", "--target", "me/other", "--host", "203.0.113.1")


@pytest.mark.parametrize("words", [("evaluation", "--prompts", "gsm8k"), ("doctor",)])
def test_a_missing_drafter_error_names_published_ones(words: tuple[str, ...]) -> None:
    code = f"import sys; from dflash_toolkit.{words[0]}.cli import main; sys.exit(main())"
    line = [sys.executable, "-c", code, *words[1:], "--target", "Qwen/Qwen3-8B-FP8"]
    done = subprocess.run(line, capture_output=True, text=True)
    assert done.returncode == 2
    assert f"drafter is missing; give --drafter (published for this target: {Z_LAB_8B}" in done.stderr
