"""Tests launches that may overlap. test_kernels_compile.py checks that the compiled kernels wait."""

import pytest
import torch
from other_gpus import use_gpu

from dflash_toolkit.kernels import launch


def test_launches_overlap_if_supported_and_enabled(monkeypatch: pytest.MonkeyPatch) -> None:
    class OnGpu:
        is_cuda, device = True, torch.device("cuda", 0)

    gpu: torch.Tensor = OnGpu()  # type: ignore[assignment]
    use_gpu(monkeypatch, (8, 9))
    assert launch.pdl(torch.empty(1)) == launch.pdl(gpu) == {"PDL": False}
    use_gpu(monkeypatch, (9, 0))
    assert launch.pdl(gpu) == {"PDL": True, "launch_pdl": True}
    monkeypatch.setattr(launch.dependent_launches, "on", False)
    assert launch.pdl(gpu) == {"PDL": False}
