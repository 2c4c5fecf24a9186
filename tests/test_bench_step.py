"""The breakdown of a step, from the ends of its kernels."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("triton")

SCRIPT = Path(__file__).parents[1] / "scripts" / "bench_step.py"
CONTEXT = [("_linear_kernel", 3.0), ("_context_write_kernel", 1.0)]
HEAD = [("_argmax_kernel", 20.0), ("_reduce_kernel", 2.0)]
LAYER = [("_rope_write_kernel", 1.0), ("_attention_kernel", 4.0), ("_merge_kernel", 1.0), ("layer_kernel", 100.0)]


@pytest.fixture(scope="module")
def bench_step() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_step", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def ends(step: list[tuple[str, float]], count: int) -> list[tuple[float, str]]:
    now, found = 1000.0, []
    for name, took in step * count:
        now += took
        found.append((now, name))
    return found


def test_a_drafted_step_is_charged_kernel_by_kernel(bench_step: ModuleType) -> None:
    draft, verify = LAYER * 2, LAYER * 3
    step = [("embedding", 2.0), *draft, *HEAD, ("cat", 1.0), *verify, *HEAD, ("_accept_kernel", 1.0), *CONTEXT]
    found = bench_step.attribute(ends(step, 4))
    assert found == pytest.approx(
        {"products": 300.0, "draft": 214.0, "head": 44.0, "attention": 18.0, "context": 4.0, "rest": 2.0}
    )
    assert sum(found.values()) == pytest.approx(sum(took for _, took in step))


def test_a_plain_step_has_no_draft(bench_step: ModuleType) -> None:
    step = [("embedding", 2.0), *LAYER, *HEAD, ("_accept_kernel", 1.0)]
    assert bench_step.attribute(ends(step, 3)) == pytest.approx(
        {"products": 100.0, "head": 22.0, "attention": 6.0, "rest": 3.0}
    )
