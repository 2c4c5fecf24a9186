"""The peak rates of GPUs: found by name, computed for other GPUs, and used by the estimate and the benchmark."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dflash_toolkit import roofline
from dflash_toolkit.roofline import FLOPS_PER_CYCLE, SHEETS, computed, roofline_of, sheet_of
from dflash_toolkit.train.config import configure
from dflash_toolkit.train.run.metrics_log import Speed
from dflash_toolkit.train.run.speed import machine_of
from scripts.shapes import named_shape

# as `deviceQuery` prints them: capability, multiprocessors, their clock and the memory's in MHz, bits of the bus
DEVICES = {
    "NVIDIA GeForce RTX 3090": (8, 6, 82, 1695, 9751, 384),
    "NVIDIA GeForce RTX 4070": (8, 9, 46, 2475, 10501, 192),
    "NVIDIA GeForce RTX 4070 Ti SUPER": (8, 9, 66, 2610, 10501, 256),
    "NVIDIA GeForce RTX 4080": (8, 9, 76, 2505, 11201, 256),
    "NVIDIA GeForce RTX 4080 SUPER": (8, 9, 80, 2550, 11501, 256),
    "NVIDIA GeForce RTX 4090": (8, 9, 128, 2520, 10501, 384),
    "NVIDIA GeForce RTX 5070 Ti": (12, 0, 70, 2452, 14001, 256),
    "NVIDIA GeForce RTX 5080": (12, 0, 84, 2617, 15001, 256),
    "NVIDIA GeForce RTX 5090": (12, 0, 170, 2407, 14001, 512),
    "NVIDIA RTX A6000": (8, 6, 84, 1800, 8001, 384),
    "NVIDIA RTX 6000 Ada Generation": (8, 9, 142, 2505, 10001, 384),
    "NVIDIA RTX PRO 6000 Blackwell Workstation Edition": (12, 0, 188, 2617, 14001, 512),
    "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition": (12, 0, 188, 2280, 14001, 512),
    "NVIDIA RTX PRO 6000 Blackwell Server Edition": (12, 0, 188, 2430, 12481, 512),
    "NVIDIA A10": (8, 6, 72, 1695, 6251, 384),
    "NVIDIA L4": (8, 9, 58, 2040, 6251, 192),
    "NVIDIA L40S": (8, 9, 142, 2520, 9001, 384),
    "NVIDIA A100-SXM4-40GB": (8, 0, 108, 1410, 1215, 5120),
    "NVIDIA A100-PCIE-40GB": (8, 0, 108, 1410, 1215, 5120),
    "NVIDIA A100-SXM4-80GB": (8, 0, 108, 1410, 1593, 5120),
    "NVIDIA A100 80GB PCIe": (8, 0, 108, 1410, 1512, 5120),
    "NVIDIA H100 80GB HBM3": (9, 0, 132, 1980, 2619, 5120),
    "NVIDIA H100 PCIe": (9, 0, 114, 1755, 1593, 5120),
    "NVIDIA H100 NVL": (9, 0, 132, 1785, 2619, 6016),
    "NVIDIA H200": (9, 0, 132, 1980, 3201, 6144),
    "NVIDIA B200": (10, 0, 148, 1965, 3996, 8192),
}


Device = tuple[int, int, int, int, int, int]


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Device], Any]:
    """Makes this machine's GPU one with a name and such numbers, and returns PyTorch's properties of it."""

    def make(name: str, numbers: Device) -> Any:
        major, minor, count, clock, memory, bus = numbers
        attributes = {13: 1000 * clock, 36: 1000 * memory, 37: bus}
        monkeypatch.setattr(roofline, "driver_attribute", lambda number, index: attributes[number])
        found = SimpleNamespace(name=name, major=major, minor=minor, multi_processor_count=count, total_memory=24 << 30)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: found)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        return found

    return make


@pytest.mark.parametrize(("name", "numbers"), DEVICES.items())
def test_computed_rates_are_near_the_data_sheet(
    name: str, numbers: Device, device: Callable[[str, Device], Any]
) -> None:
    sheet, found = sheet_of(name), computed(device(name, numbers), 0)
    assert sheet and found.capability == sheet.capability
    assert found.bandwidth_tb_s == pytest.approx(sheet.bandwidth_tb_s, rel=0.03)
    assert found.bf16_tflops == pytest.approx(sheet.bf16_tflops, rel=0.16)  # some sheets have a lower clock
    assert found.fp8_tflops == pytest.approx(sheet.fp8_tflops, rel=0.16)


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("NVIDIA GeForce RTX 4070 Ti SUPER", "RTX 4070 Ti SUPER"),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", "RTX PRO 6000 Blackwell Max-Q"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX PRO 6000 Blackwell Server"),
        ("NVIDIA A100-PCIE-40GB", "A100 40GB"),
        ("NVIDIA A100 80GB PCIe", "A100 80GB PCIe"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA H200 NVL", "H200 NVL"),
        ("NVIDIA GB10", "GB10"),
        ("NVIDIA GeForce RTX 4070 Ti", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 5090 D", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA GH200 480GB", None),
        ("Tesla T4", None),
    ],
)
def test_a_card_is_found_by_its_whole_name(device: str, name: str | None) -> None:
    found = sheet_of(device)
    assert (found and found.name) == name


def test_data_sheets_have_dense_rates() -> None:
    for name, sheet in SHEETS.items():
        assert sheet_of(f"NVIDIA {name}") is sheet
        assert bool(sheet.fp8_tflops) == (sheet.capability >= (8, 9))
        assert sheet.fp8_tflops == pytest.approx(2 * sheet.bf16_tflops if sheet.fp8_tflops else 0, rel=0.02)
        assert 0.8 <= sheet.read_tb_s / sheet.bandwidth_tb_s < 1
        assert sheet.capability in FLOPS_PER_CYCLE or sheet.capability in {(8, 9), (12, 1)}


def test_a_gpu_without_bf16_tensor_cores_or_a_memory_clock(device: Callable[[str, Device], Any]) -> None:
    old = computed(device("Tesla T4", (7, 5, 40, 1590, 5001, 256)), 0)
    assert 8 < old.bf16_tflops < 9 and not old.fp8_tflops and old.bandwidth_tb_s == pytest.approx(0.32, rel=0.01)
    integrated = computed(device("NVIDIA Next", (12, 1, 48, 2418, 0, 256)), 0)
    assert integrated.bandwidth_tb_s == SHEETS["GB10"].bandwidth_tb_s and integrated.fp8_tflops > 0


@pytest.mark.parametrize(
    ("name", "numbers", "shown"),
    [
        ("NVIDIA GeForce RTX 4090", DEVICES["NVIDIA GeForce RTX 4090"], "RTX 4090"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", (8, 9, 76, 2040, 9001, 256), "GeForce RTX 4090 Laptop GPU"),
        ("Tesla T4", (7, 5, 40, 1590, 5001, 256), "Tesla T4"),
    ],
)
def test_estimate_and_mfu_use_the_rates_of_this_gpu(
    name: str, numbers: Device, shown: str, device: Callable[[str, Device], Any]
) -> None:
    device(name, numbers)
    machine, found = machine_of(configure({"target": "t"}), named_shape("qwen3-8b")), roofline_of(torch.device("cuda"))
    assert (machine.name, machine.memory_gib) == (shown, 24)
    assert 0 < machine.tflops == found.bf16_tflops < 200 and machine.read_tb_s == found.read_tb_s < 1
    assert Speed(torch.device("cuda")).peak == 1e12 * found.bf16_tflops


def test_estimate_and_mfu_are_of_the_chosen_gpu(
    device: Callable[[str, Device], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "NVIDIA GeForce RTX 4090"
    cards = [device(each, DEVICES[each]) for each in ("NVIDIA H100 PCIe", name)]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: cards[index])
    for chosen, found in (("cuda:1", "RTX 4090"), ("cuda:0", "H100 PCIe"), ("auto", "H100 PCIe")):
        assert machine_of(configure({"target": "t", "device": chosen}), named_shape("qwen3-8b")).name == found
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert roofline_of(torch.device("cuda")).name == "RTX 4090"


@pytest.mark.gpu
def test_rates_computed_on_this_gpu_are_near_its_data_sheet() -> None:
    properties = torch.cuda.get_device_properties(0)
    found, sheet = computed(properties, 0), sheet_of(properties.name)
    assert found.bandwidth_tb_s > 0 and found.bf16_tflops > 0
    if sheet:
        assert found.bandwidth_tb_s == pytest.approx(sheet.bandwidth_tb_s, rel=0.05)
        assert found.bf16_tflops == pytest.approx(sheet.bf16_tflops, rel=0.16)
