"""Plants mistakes in Gluon kernels and runs them in `gluon_interpreter.py`."""

import inspect
from collections.abc import Callable
from types import FunctionType, ModuleType, SimpleNamespace

import pytest
from gluon_interpreter import Fault, Interpreted

from dflash_toolkit.kernels.hopper import attention as attention_hopper
from dflash_toolkit.kernels.triton import attention


def broken(patch: pytest.MonkeyPatch, module: ModuleType, name: str, changes: dict[str, str]) -> None:
    """Replaces a function of a kernel by one with an edited source."""
    function = getattr(module, name).fn
    source = inspect.getsource(function)
    for old, new in changes.items():
        assert source.count(old) == 1, f"{name} no longer has one {old!r}"
        source = source.replace(old, new)
    scratch = dict(function.__globals__)
    exec(compile(source[source.index("def ") :], f"broken {name}", "exec"), scratch)
    patch.setattr(module, name, SimpleNamespace(fn=FunctionType(scratch[name].__code__, function.__globals__)))


def complaint(kernel: Interpreted, attempt: Callable[[], None]) -> str:
    """Returns the first fault or wrong result of the attempt in any order; other errors are raised."""
    for seed in range(40):
        kernel.seed = seed
        try:
            attempt()
        except (Fault, AssertionError) as found:
            return f"{type(found).__name__}: {found}"
    pytest.fail("no order found the mistake")


Mistake = tuple[ModuleType, str, dict[str, str]]  # where, in which function, and what becomes of its text


def interpret_attention(patch: pytest.MonkeyPatch, short: int = 64) -> Interpreted:
    """Splits of one (or two) tiles, twice, and then of five; `hopper_attention_kernel` may be a broken one."""
    kernel = Interpreted(attention_hopper.hopper_attention_kernel, together=False)
    patch.setattr(attention_hopper, "hopper_attention_kernel", kernel)
    patch.setattr(attention_hopper, "fits", lambda *_: True)
    for name, keys in (("SHORT", short), ("SHORT_SPLITS", 2), ("LONG", 320)):
        patch.setattr(attention, name, type(attention.SHORT)(keys))
    return kernel
