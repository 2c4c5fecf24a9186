"""Tests that run as if this machine had another GPU."""

import pytest
import torch

from dflash_toolkit.kernels import features
from dflash_toolkit.kernels.features import KNOWN, Features


def use_gpu(patch: pytest.MonkeyPatch, capability: tuple[int, int], shared: int | None = None) -> None:
    """Makes CUDA devices have this capability and so many KiB of shared memory (default: of a known card, else 227)."""
    card = KNOWN.get(f"sm_{capability[0]}{capability[1]}", KNOWN["sm_90"])
    found = Features.of(capability, card.shared_memory if shared is None else shared << 10, card.multiprocessors)
    patch.setattr(features, "_features", {torch.device("cuda"): found, torch.device("cuda", 0): found})
