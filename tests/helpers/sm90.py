"""Compile Triton kernels for sm_90 on a machine without a GPU; run as a program it prints one JSON object.

The interpreter replaces kernels that are decorated while TRITON_INTERPRET is set, so this runs as a process of its own
without it: `python tests/helpers/sm90.py` imports every `sm90_cases_*.py` next to it; their `CASES` maps a name to a
`Case`, or to a function that launches Gluon kernels as the library does: their own host functions choose the constexprs
and Triton's launcher specialises the arguments, so what compiles is what a GPU would be given. It prints
{name: {"kernel": ..., "registers": ..., "spills": ..., "shared": ..., "serialized": ..., "overlaps": ..., "waits": ...,
"before": ..., "starts_next": ..., "never": ...}}.
"""

import contextlib
import gc
import importlib
import io
import json
import multiprocessing
import os
import re
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
TARGET = (90, 32)  # an H100 and the threads of its warps
# instructions that read or write global memory
GLOBAL = re.compile(r"\b(?:(?:ld|st|atom|red)\.(?:\w+\.)*global|cp\.async\.(?:c[ag]|bulk\.tensor|bulk\.shared))\b")


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
    """The `report` of a kernel so specialised."""
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
    with contextlib.redirect_stdout(io.StringIO()) as said:
        compiled = triton.compile(source, target=GPUTarget("cuda", *TARGET), options=options)
    return report(case.kernel, compiled, said.getvalue())


def report(kernel: Any, compiled: Any, log: str) -> dict[str, Any]:
    """A kernel's name, its registers and spilled bytes as ptxas reports them, whether it makes products wait, whether
    its launch may overlap the one before, whether it waits for that one, how many instructions touch global memory
    before it does, whether it starts the next kernel before ("early") or behind ("late") its wait, if at all, and how
    many branches are never taken, whatever the arguments."""
    spills = sum(int(n) for n in re.findall(r"(\d+) bytes spill", log))
    registers = max(int(n) for n in re.findall(r"Used (\d+) registers", log))
    order = re.findall(r"griddepcontrol\.(\w+)", compiled.asm["ptx"])
    before, waits, _ = compiled.asm["ptx"].partition("griddepcontrol.wait")
    starts_next = None if "launch_dependents" not in order else "late" if order[0] == "wait" else "early"
    serialized = int("wgmma.mma_async instructions are serialized" in log)
    never = len(re.findall(r"(?:scf\.if|cf\.cond_br) %(?:true|false)\b", compiled.asm["ttgir"]))
    return {
        "kernel": kernel.__name__, "registers": registers, "spills": spills, "shared": compiled.metadata.shared,
        "serialized": serialized, "overlaps": "PDL" in kernel.arg_names or compiled.metadata.launch_pdl,
        "waits": bool(waits), "before": len(GLOBAL.findall(before)),
        "starts_next": starts_next, "never": never,
    }  # fmt: skip


class Driver:
    """The properties of a GPU that Triton's launcher reads before it compiles, for an H100."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", *TARGET)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@contextlib.contextmanager
def launches() -> Iterator[list[dict[str, Any]]]:
    """Launches of Gluon kernels compile them, for operands on the device "meta", and nothing runs; the reports."""
    import torch
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    from dflash_toolkit.kernels.hopper import conv_layer, layer, pipeline
    from dflash_toolkit.kernels.triton import attention, tree_attention

    run, found = JITFunction.run, list[dict[str, Any]]()

    def compile_only(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        if kernel.is_gluon():  # the others have cases of their own
            with contextlib.redirect_stdout(io.StringIO()) as said:
                compiled = run(kernel, *args, grid=grid, warmup=True, **options)
            if said.getvalue():  # else it had been compiled before
                found.append(report(kernel, compiled, said.getvalue()))

    JITFunction.run = compile_only
    driver.set_active(Driver())
    for module in (pipeline, attention, tree_attention):
        module.multiprocessors = lambda _: 132
    for module in (layer, conv_layer):
        module._barriers = lambda _: torch.empty(layer.BARRIERS, dtype=torch.int32, device="meta")
    try:
        yield found
    finally:
        JITFunction.run = run


def compile_file(path: Path) -> dict[str, dict[str, Any]]:
    """Returns the report on the kernels of a file of cases."""
    import triton

    gc.disable()  # a sixth of the time: every kernel is a large tree
    triton.knobs.nvidia.dump_ptxas_log = triton.knobs.compilation.always_compile = True  # the cache keeps no log
    kind, found = path.stem.removeprefix("sm90_cases_"), dict[str, dict[str, Any]]()
    with launches() as reports:
        for name, case in importlib.import_module(path.stem).CASES.items():
            if not callable(case):
                found[f"{kind}: {name}"] = compile_case(case)
                continue
            before = len(reports)
            case()
            assert len(reports) > before, f"{kind}: {name} compiles what a case before it does"
            found |= {f"{kind}: {name}: {each['kernel']}": each for each in reports[before:]}
    return found


def main() -> None:
    os.environ.pop("TRITON_INTERPRET", None)
    sys.path[:0] = [str(HERE.parents[1]), str(HERE)]
    files = sorted(HERE.glob("sm90_cases_*.py"), key=lambda path: -path.stat().st_size)  # the longest first
    with ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("fork")) as pool:
        found = {name: report for of_file in pool.map(compile_file, files) for name, report in of_file.items()}
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
