"""Short training runs on a tiny target: rows, configuration, metrics and interruptions."""

import contextlib
import resource
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_drafter
from programs import lines
from safetensors.torch import load_file
from torch import Tensor

from dflash_toolkit import Target
from dflash_toolkit.train.config import TrainConfig
from dflash_toolkit.train.responses.rows import Row
from dflash_toolkit.train.run import save
from dflash_toolkit.train.run.definition import Run
from dflash_toolkit.train.run.resume_point import ResumePoint
from dflash_toolkit.train.training_options import DrafterOptions, LossOptions, OptimOptions, RunOptions

TAPS = (1, 3)


def random_rows(count: int) -> list[Row]:
    """Returns rows of random tokens."""
    g = torch.Generator().manual_seed(9)
    lengths = torch.randint(20, 50, (count,), generator=g).tolist()
    return [Row(i, 6, torch.randint(0, 250, (n,), generator=g).tolist()) for i, n in enumerate(lengths)]


def config(**run: Any) -> TrainConfig:
    return TrainConfig(
        target="tiny", drafter=DrafterOptions(block_size=8), loss=LossOptions(anchors=4),
        optim=OptimOptions(optimizer="adamw", epochs=3, batch_size=4, learning_rate=3e-3),
        run=RunOptions(log_every=1, save_every=2, **run),
    )  # fmt: skip


def run_of(asked: TrainConfig, target: Target, texts: Sequence[Row], folder: Path) -> Run:
    """Returns a run of a new drafter on `texts`, with its files in `folder`."""
    folder.mkdir(exist_ok=True)
    drafter = make_drafter(target).to(target.device).train()
    return Run(asked, target, drafter, texts, [], folder, {}, lambda trained, made: None)


def forwards(target: Target) -> list[int]:
    """Returns a list that grows by one with every forward pass of the target."""
    seen: list[int] = []
    target.layers[0].register_forward_hook(lambda *_: seen.append(1))
    return seen


def repeating_rows(count: int) -> list[Row]:
    """Returns rows with responses that repeat, so that a drafter can learn them."""
    g = torch.Generator().manual_seed(9)
    lengths = torch.randint(20, 50, (count,), generator=g).tolist()
    return [Row(i, 6, (torch.randint(0, 250, (7,), generator=g).tolist() * 8)[:n]) for i, n in enumerate(lengths)]


def losses(path: Path) -> list[float]:
    return [line["loss"] for line in lines(path) if "loss" in line]


def lines_without_speed(path: Path) -> list[dict[str, Any]]:
    speed = ("_per_second", "_share", "_resident_gb", "gpu_minutes")
    return [{key: value for key, value in line.items() if not key.endswith(speed)} for line in lines(path)]


def weights(run: Path) -> list[tuple[str, bytes]]:
    tensors = load_file(run / "model.safetensors") | torch.load(run / "work" / "state.pt", "cpu")["drafter"]
    return sorted((name, bytes(tensor.view(torch.uint8).numpy())) for name, tensor in tensors.items())


@contextlib.contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Makes writes beyond `size` bytes of any file fail, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextlib.contextmanager
def interrupted(step: int, written: bool = True) -> Iterator[None]:
    """Interrupts a run after it has written the resume point of this step, or instead of writing it."""
    real = save.save_state

    def ending(state: ResumePoint, path: Path) -> None:
        if written or state.step != step:
            real(state, path)
        if state.step == step:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(save, "save_state", ending)
        yield


def flat(state: Any) -> dict[str, Tensor]:
    """Returns the tensors of a nested state by place."""
    if isinstance(state, Tensor):
        return {"": state}
    items = state.items() if isinstance(state, dict) else enumerate(state) if isinstance(state, list | tuple) else ()
    return {f"{key}.{place}": tensor for key, value in items for place, tensor in flat(value).items()}
