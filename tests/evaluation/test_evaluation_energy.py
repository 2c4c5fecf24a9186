"""Joules from NVML, by a library with the same interface and, if there is one, a real GPU."""

import ctypes
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dflash_toolkit import Drafter, SamplingParams, Target
from dflash_toolkit.evaluation import EncodedPrompt, EnginePair
from dflash_toolkit.evaluation.measure import energy
from dflash_toolkit.evaluation.measure.measurement import measure as measure_prompt
from dflash_toolkit.evaluation.report.results import Summary

GPU = torch.device("cuda:0")


class Library:
    """Behaves as NVML does in ctypes: returns error codes and writes results through pointers."""

    def __init__(self, missing: str = "") -> None:
        self.missing, self.used = missing, 0

    def nvmlInit_v2(self) -> int:
        return int(self.missing == "driver")

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes, handle: Any) -> int:
        return int(uuid != b"GPU-1234" or self.missing == "gpu")

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: ctypes.c_void_p, pointer: Any) -> int:
        self.used += 2500
        pointer._obj.value = self.used
        return 3 if self.missing == "counter" else 0


@pytest.fixture
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Library:
    found = Library(getattr(request, "param", ""))
    monkeypatch.setattr(ctypes, "CDLL", lambda name: {"libnvidia-ml.so.1": found}[name])
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="1234"))
    energy._counter.cache_clear()
    monkeypatch.setattr(energy, "_counter", energy._counter.__wrapped__)
    return found


def test_joules_come_from_the_nvml_counter(library: Library) -> None:
    count = energy._counter(GPU)
    assert count is not None and [count(), count()] == [5.0, 7.5], "one reading shows whether there is a counter"


@pytest.mark.parametrize("library", ["driver", "gpu", "counter"], indirect=True)
def test_no_joules_without_a_counter(library: Library) -> None:
    assert energy.joules(GPU) is None
    assert energy.joules(torch.device("cpu")) is None


def test_joules_per_token_need_all_answers(target: Target, drafter: Drafter) -> None:
    pair, params = EnginePair.load(target, drafter), SamplingParams(max_tokens=4, ignore_eos=True)
    found = [measure_prompt(pair, EncodedPrompt(str(i), [65 + i]), params, baseline=True) for i in range(2)]
    counted = [replace(m, joules=8.0, plain_joules=20.0) for m in found]
    assert Summary.of(found, 8).joules_per_token is None
    assert (Summary.of(counted, 8).joules_per_token, Summary.of(counted, 8).plain_joules_per_token) == (2.0, 5.0)
    assert Summary.of([counted[0], found[1]], 8).joules_per_token is None


@pytest.mark.gpu
def test_a_busy_gpu_uses_energy() -> None:
    first = energy.joules(GPU)
    if first is None:
        pytest.skip("this GPU counts no energy")
    began, x = time.perf_counter(), torch.ones(4096, 4096, device=GPU)
    while time.perf_counter() - began < 0.5:
        x = x @ x / 4096
        torch.cuda.synchronize()
    used = energy.joules(GPU) - first
    assert 5 < used < 1000
