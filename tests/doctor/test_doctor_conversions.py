"""`dflash-doctor` on weights that a converter mixed up: it finds the edit that restores the acceptance."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import doctor_cases
import pytest
import torch
from conftest import make_drafter, make_target
from doctor_cases import (
    BLOCK,
    SHORT_TEXTS,
    TOKENS,
    Break,
    Patient,
    answered,
    edit,
    every,
    exchange,
    fit,
)
from torch import Tensor

from dflash_toolkit import Drafter, save_drafter
from dflash_toolkit.record import RECORD_KEY, export_record

TAPS, KERNEL, GROUPS = 3, 3, 4
CONVOLUTIONS = {"conv_kernel_size": KERNEL, "conv_group_size": 8}


@pytest.fixture(scope="module")
def sick(tmp_path_factory: pytest.TempPathFactory) -> Patient:
    """A drafter whose convolutions differ in every axis, so that each mistake does harm."""

    def uneven(*given: Any, **shape: Any) -> Drafter:
        drafter = make_drafter(*given, **shape)
        generator = torch.Generator().manual_seed(2)
        for name, weight in drafter.named_parameters():
            if "_conv." in name:
                weight.data += 0.5 * torch.randn(weight.shape, generator=generator)
        return drafter

    target, path = make_target(), tmp_path_factory.mktemp("converted")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(doctor_cases, "make_drafter", uneven)
        rows = answered(target, SHORT_TEXTS, TOKENS)
        drafter = fit(target, rows, path, steps=110, taps=TAPS, layers=2, block_size=BLOCK, **CONVOLUTIONS)
    note = {"target": "tiny", "acceptance_length": 5.0, "trained_block_size": BLOCK}
    save_drafter(drafter, path / "exported", note | {RECORD_KEY: export_record(drafter, target)})
    return Patient(target, drafter, path)


def rows(pattern: str, *axes: int, order: tuple[int, ...]) -> Break:
    """Stores the rows of a matrix with their axes in another order."""
    return every(pattern, lambda t: t.unflatten(0, axes).permute(*order, len(axes)).flatten(0, len(axes) - 1))


def both(*breaks: Break) -> Break:
    def run(path: Path) -> None:
        for each in breaks:
            each(path)

    return run


def kernel_flip(axis: int) -> Break:
    return both(
        every("base_kernel", lambda t: t.flip(axis)),
        every("kernel_projection", lambda t: t.unflatten(0, (2, KERNEL, -1)).flip(axis).flatten(0, 2)),
    )


def fc(change: Callable[[Tensor], Tensor]) -> Break:
    return every(r"^fc\.weight$", lambda t: change(t.unflatten(1, (TAPS, -1))).flatten(1))


def adjacent_pairs(weight: Tensor) -> Tensor:
    """Permutes rows as llama.cpp does for Llama: the halves of a head become adjacent pairs."""
    return weight.view(-1, 2, 4, weight.shape[-1]).transpose(1, 2).reshape(weight.shape)


# the break, the check that names it, and words of its remedy
BREAKS: dict[str, tuple[Break, str, str]] = {
    "convolution taps flipped": (kernel_flip(1), "convolution taps", "base_kernel and kernel_projection: reverse"),
    "convolution sides swapped": (kernel_flip(0), "convolution sides", "base_kernel and kernel_projection: reverse"),
    "base kernels flipped": (
        every("base_kernel", lambda t: t.flip(1)), "convolution taps", "in reverse in base_kernel: reverse",
    ),
    "convolutions exchanged": (
        exchange("attention_conv", "mlp_conv"), "convolution places", "attention_conv and mlp_conv are swapped",
    ),
    "kernel rows by group": (
        rows("kernel_projection", 2, KERNEL, GROUPS, order=(2, 0, 1)), "kernel rows", "as [groups, sides, taps]",
    ),
    "kernel rows transposed": (
        rows("kernel_projection", 2, KERNEL, GROUPS, order=(2, 1, 0)), "kernel rows", "as [groups, taps, sides]",
    ),
    "fc blocks transposed": (fc(lambda t: t.transpose(0, 2)), "fc blocks", "transpose each block of [D, D]"),
    "fc columns interleaved": (fc(lambda t: t.transpose(1, 2)), "fc blocks", "columns of one tap after another"),
    "q heads permuted": (rows("q_proj", 2, 2, 8, order=(1, 0, 2)), "q heads", "query heads of q_proj are"),
    "q and o heads permuted": (
        both(
            rows("q_proj", 2, 2, 8, order=(1, 0, 2)),
            every("o_proj", lambda t: t.unflatten(1, (2, 2, 8)).transpose(1, 2).flatten(1)),
        ),
        "q heads", "query heads of q_proj and o_proj are",
    ),
    "k and v swapped": (exchange("k_proj", "v_proj"), "k and v", "k_proj and v_proj are swapped"),
    "rope of gguf": (every("[qk]_proj", adjacent_pairs), "rope rows", "as GGUF files of Llama are"),
}  # fmt: skip


@pytest.mark.parametrize("name", BREAKS)
@pytest.mark.sampled
def test_a_conversion_mistake_is_named_without_a_record(sick: Patient, name: str) -> None:
    break_it, check, remedy = BREAKS[name]
    (fault,) = sick.examine(break_it, recorded=False)["fault"]
    assert fault.check == check and remedy in fault.remedy


@pytest.mark.parametrize("name", ["convolution sides swapped", "q and o heads permuted", "kernel rows by group"])
def test_a_conversion_mistake_is_certain_with_a_record(sick: Patient, name: str) -> None:
    break_it, check, remedy = BREAKS[name]
    (fault,) = sick.examine(break_it)["fault"]
    assert fault.check == check and remedy in fault.remedy and "restored with" in fault.measured


def test_a_healthy_drafter_has_no_findings(sick: Patient) -> None:
    for recorded in (True, False):
        found = sick.examine(recorded=recorded)
        assert (found["fault"], found["warning"]) == ([], [])


def test_a_wrong_size_is_corrected_from_the_record(sick: Patient) -> None:
    right = sick.drafter.config.vocab_size
    (fault,) = sick.examine(edit(vocab_size=right + 12))["fault"]
    assert fault.check == "fit" and f"set vocab_size to {right} in config.json" in fault.remedy
    (fault,) = sick.examine(edit(vocab_size=right + 12), recorded=False)["fault"]
    assert "use the target that this drafter was made for" in fault.remedy


def test_a_target_in_four_bits_is_called_quantized(sick: Patient) -> None:
    rounded = make_target()
    with torch.no_grad():
        for weight in rounded.layers.parameters():
            if weight.dim() == 2 and weight.shape[1] % 32 == 0:
                groups = weight.view(-1, 32)
                scale = groups.abs().amax(1, keepdim=True) / 7
                weight.copy_(((groups / scale).round() * scale).view(weight.shape))
    (fault,) = sick.examine(target=rounded)["fault"]
    assert fault.check == "target" and "quantized to 4 bits" in fault.remedy and "--init-from" in fault.remedy
