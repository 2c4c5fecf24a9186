"""Compile Triton kernels for sm_90 on a machine without a GPU; run as a program it prints one JSON object.

The interpreter replaces kernels that are decorated while TRITON_INTERPRET is set, so this runs as a process of its own
without it: `python tests/helpers/sm90.py` imports every `sm90_cases_*.py` beside it, whose `CASES` maps a name to a
`Case`, and prints {name: {"kernel": ..., "registers": ..., "spills": ..., "shared": ..., "serialized": ...,
"starts_next": ...}}.
"""

import contextlib
import importlib
import io
import json
import os
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Case:
    """One specialisation of a kernel."""

    kernel: Any  # the @triton.jit or @gluon.jit function
    signature: dict[str, str]  # run-time parameters: "*bf16", "i32", "fp32", ...; 16-byte aligned unless in `ragged`
    constexprs: dict[str, Any]
    num_warps: int = 4
    num_stages: int = 3
    ragged: tuple[str, ...] = field(default=())  # parameters that are not multiples of 16


def compile_case(case: Case) -> dict[str, Any]:
    """A kernel's name, its registers and spilled bytes as ptxas reports them, whether it makes products wait, and
    whether it starts the next kernel before ("early") or behind ("late") its wait for the one before, if at all."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    names = case.kernel.arg_names
    signature = {name: case.signature.get(name, "constexpr") for name in names}
    constexprs = {(names.index(name),): value for name, value in case.constexprs.items()}
    attrs = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(names)
        if not signature[name].startswith(("constexpr", "fp", "tensordesc")) and name not in case.ragged
    }
    source = (GluonASTSource if case.kernel.is_gluon() else ASTSource)(case.kernel, signature, constexprs, attrs)
    options = {"num_warps": case.num_warps, "num_stages": case.num_stages}
    triton.knobs.nvidia.dump_ptxas_log = triton.knobs.compilation.always_compile = True  # the cache keeps no log
    with contextlib.redirect_stdout(io.StringIO()) as said:
        compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    log = said.getvalue()
    spills = sum(int(n) for n in re.findall(r"(\d+) bytes spill", log))
    registers = max(int(n) for n in re.findall(r"Used (\d+) registers", log))
    order = re.findall(r"griddepcontrol\.(\w+)", compiled.asm["ptx"])
    starts_next = None if "launch_dependents" not in order else "late" if order[0] == "wait" else "early"
    serialized = int("wgmma.mma_async instructions are serialized" in log)
    return {
        "kernel": case.kernel.__name__, "registers": registers, "spills": spills, "shared": compiled.metadata.shared,
        "serialized": serialized, "starts_next": starts_next,
    }  # fmt: skip


def main() -> None:
    os.environ.pop("TRITON_INTERPRET", None)
    sys.path[:0] = [str(HERE.parents[1]), str(HERE)]
    found = {}
    for path in sorted(HERE.glob("sm90_cases_*.py")):
        for name, case in importlib.import_module(path.stem).CASES.items():
            found[f"{path.stem.removeprefix('sm90_cases_')}: {name}"] = compile_case(case)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
