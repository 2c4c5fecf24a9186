"""Which kernels let the next one start before they have waited for the one before themselves.

`_rope_write_kernel` and attention read what is older than a pass before they wait (`attention_hopper.py`). That is safe
as long as there are launches between two attentions that start others only behind their own wait.
"""

import ast
from pathlib import Path

KERNELS = Path(__file__).parent.parent / "dflash_toolkit/kernels"
WAITS, STARTS = {"gdc_wait", "grid_wait"}, {"gdc_launch_dependents", "grid_launch"}


def calls(function: ast.FunctionDef) -> list[str]:
    """What a function calls, in the order of its text."""
    found = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
    found.sort(key=lambda node: (node.lineno, node.col_offset))
    return [ast.unparse(node.func).rpartition(".")[2] for node in found]


def first(names: list[str], wanted: set[str]) -> int:
    return next(i for i, name in enumerate(names) if name in wanted)


def test_kernels_that_start_the_next_one_before_they_wait() -> None:
    early: set[str] = set()
    late: set[str] = set()
    for path in sorted(KERNELS.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names = calls(node) if isinstance(node, ast.FunctionDef) else []
            if isinstance(node, ast.FunctionDef) and STARTS & {*names}:
                (early if first(names, STARTS) < first(names, WAITS) else late).add(f"{path.stem}.{node.name}")
    assert early == {
        "attention._attention_kernel",
        "attention._merge_kernel",
        "attention_hopper.hopper_attention_kernel",
        "rope._rope_write_kernel",
    }
    assert {"layer._compute", "linear._linear_kernel", "linear._swiglu_kernel", "norm._add_rms_norm_kernel"} <= late
