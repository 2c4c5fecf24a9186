"""Tests what a GPU can do, and the emulation of a smaller one."""

from types import SimpleNamespace

import pytest
import torch
import triton.language as tl
from triton import knobs
from triton.compiler import compiler
from triton.runtime.jit import JITFunction

import dflash_toolkit.kernels.triton  # noqa: F401  (corrects the keys)
from dflash_toolkit import UserError
from dflash_toolkit.kernels import features
from dflash_toolkit.kernels.features import KNOWN, VARIABLE, Features, features_of
from dflash_toolkit.kernels.ops import unsupported
from dflash_toolkit.models.device import use_device

GPU = torch.device("cuda")
FLAGS = ("dependent_launches", "fp8_products", "hopper", "cublas_fp8_rows", "cublas_fp8_blocks")


@pytest.fixture
def h100(monkeypatch: pytest.MonkeyPatch) -> None:
    found = SimpleNamespace(major=9, minor=0, shared_memory_per_block_optin=227 << 10, multi_processor_count=114)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: found)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "Some GPU")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(features, "_features", {})
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(compiler, "max_shared_mem", lambda _: 227 << 10)
    monkeypatch.setattr(knobs.runtime, "override_arch", None)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("sm_80", ()),
        ("sm_86", ()),
        ("sm_89", ("fp8_products", "cublas_fp8_rows")),
        ("sm_90", FLAGS),
        ("sm_100", ("dependent_launches", "fp8_products", "cublas_fp8_rows")),
        ("sm_120", ("dependent_launches", "fp8_products", "cublas_fp8_rows")),
    ],
)
@pytest.mark.usefixtures("h100")
def test_an_emulated_card_has_only_its_own_features(
    name: str, expected: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(VARIABLE, name)
    found = features_of(GPU)
    assert features_of(GPU) is found, "asked once"
    assert tuple(flag for flag in FLAGS if getattr(found, flag)) == expected
    assert (found.capability, found.shared_memory) == (KNOWN[name].capability, KNOWN[name].shared_memory)
    assert compiler.max_shared_mem(0) == found.shared_memory, "Triton refuses a kernel that needs more"
    assert knobs.runtime.override_arch == (None if name in ("sm_90", "sm_100") else name.replace("_", ""))
    assert found.multiprocessors == 114, "as many programs run at once as on the real GPU"
    assert [record.getMessage() for record in caplog.records] == [
        f"DFLASH_EMULATE_GPU={name}: cuda:0 runs the kernels for that card"
    ]


@pytest.mark.usefixtures("h100")
def test_no_card_is_emulated_by_default(caplog: pytest.LogCaptureFixture) -> None:
    assert features_of(GPU) == Features.of((9, 0), 227 << 10, 114)
    assert caplog.records == []


@pytest.mark.usefixtures("h100")
def test_cuda_without_an_index_is_the_current_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine may have GPUs of different kinds."""
    small = SimpleNamespace(major=8, minor=6, shared_memory_per_block_optin=99 << 10, multi_processor_count=82)
    large = torch.cuda.get_device_properties(0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: [large, small][device.index])
    for current, capability in ((0, (9, 0)), (1, (8, 6))):
        monkeypatch.setattr(torch.cuda, "current_device", lambda current=current: current)
        assert features_of(GPU).capability == capability
        assert features_of(GPU) is features_of(torch.device("cuda", current)), "the driver is asked once"


def test_emulation_adds_no_feature_that_the_gpu_lacks() -> None:
    assert KNOWN["sm_86"].limited_to(KNOWN["sm_100"]).shared_memory == 99 << 10
    found = KNOWN["sm_86"].limited_to(KNOWN["sm_90"])
    assert not any(getattr(found, flag) for flag in FLAGS)


@pytest.mark.usefixtures("h100")
def test_an_unknown_card_to_emulate_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "sm_70")
    line = "DFLASH_EMULATE_GPU is 'sm_70'; it must be one of sm_80, sm_86"
    assert (unsupported(GPU) or "").startswith(line)
    with pytest.raises(UserError, match=line):
        use_device("cpu")


@pytest.mark.usefixtures("h100")
def test_interpreted_kernels_take_the_tiles_of_the_card(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    assert features_of(cpu).shared_memory == 227 << 10 and not features_of(cpu).hopper
    monkeypatch.setattr(features, "_features", {})
    monkeypatch.setenv(VARIABLE, "sm_86")
    assert features_of(cpu).shared_memory == 99 << 10


SIZE = tl.constexpr(8)


def test_a_cache_key_has_constants_of_called_functions() -> None:
    def inner(x_p):
        tl.store(x_p + tl.arange(0, SIZE), 0.0)

    def outer(x_p):
        called(x_p)

    called = JITFunction(inner)
    kernel = JITFunction(outer)
    assert kernel.cache_key  # before that of `called`
    assert [name for name, _ in kernel.used_global_vals] == ["SIZE"]
