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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
TARGET = (90, 32)  # an H100 and the threads of its warps
# instructions that read or write global memory
GLOBAL = re.compile(r"\b(?:(?:ld|st|atom|red)\.(?:\w+\.)*global|cp\.async\.(?:c[ag]|bulk\.tensor|bulk\.shared))\b")


# types of run-time parameters by name; another pointer is of bf16, another number an int32
KINDS = {
    name: kind
    for kind, names in {
        "*fp32": "a_log_p acc_p acceptance_p ba_p best_p cross_entropy_p d_base_p decay_p expected_p gates_p kl_p l_p "
        "log_probs_p lse_p m_p min_p_p out_gates_p part_p rope_p row_log_probs_p row_scale_p scale_p sums_p "
        "temperature_p top_p_p tops_p unary_p values_p w_scale_p weight_p x_scale_p",
        "*fp64": "calibration_p uniform_p",
        "*fp8e4nv": "data_p",
        "*i1": "active_p",
        "*i32": "bounds_p count_p counts_p depths_p expert_p forced_p index_p keys_p lengths_p limits_p masks_p "
        "nonfinite_p pages_p pair_p parents_p paths_p positions_p rank_p ranks_p requests_p row_depths_p row_parents_p "
        "row_slots_p slots_p starts_p stay_p",
        "*i64": "ancestors_p anchors_p at_p candidates_p choice_p columns_p draft_p drafted_p ids_p labels_p last_p "
        "path_p row_ancestors_p row_tokens_p tokens_p top_k_p",
        "fp32": "cap eps eta inverse_t least multiplier scale w_ce w_hybrid w_kl w_lk w_tv",
    }.items()
    for name in names.split()
}
# numbers that are not multiples of 16
ODD = {
    "B", "GROUP", "LAYERS", "M", "P", "S", "SPLITS", "TILES", "WORDS", "blocks", "dynamic_parts", "first", "paired",
    "parts", "stride_draft", "stride_lse", "stride_paths", "stride_uniform", "sums", "tiles",
}  # fmt: skip
CONSTEXPRS = {
    "EVEN_H": True, "EVEN_K": True, "EVEN_N": True, "FP8_MAX": 448.0, "LEAST": 1e-12, "PAGE": 64, "PDL": True,
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One specialisation of a kernel."""

    kernel: Any  # the @triton.jit or @gluon.jit function
    signature: dict[str, str]  # run-time parameters: "*bf16", "i32", "fp32", ...; 16-byte aligned unless in `odd`
    constexprs: dict[str, Any]
    num_warps: int
    num_stages: int
    odd: set[str]


def case(
    kernel: Any, warps: int = 4, stages: int = 3, odd: str = "", kinds: dict[str, str] | None = None, **constexprs: Any
) -> Case:
    """Returns a case of a kernel, given the names that are `odd` and of other `kinds` than above; it may lack some."""
    known = {name: value for name, value in (CONSTEXPRS | constexprs).items() if name in kernel.arg_names}
    named = KINDS | (kinds or {})
    given = {
        name: named.get(name, "*bf16" if name.endswith("_p") else "i32")
        for name in kernel.arg_names
        if name not in known
    }
    return Case(kernel, given, known, warps, stages, ODD | set(odd.split()))


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
        if not signature[name].startswith(("constexpr", "fp", "tensordesc")) and name not in case.odd
    }
    source = (GluonASTSource if case.kernel.is_gluon() else ASTSource)(case.kernel, signature, constexprs, attrs)
    options = {"num_warps": case.num_warps, "num_stages": case.num_stages}
    with contextlib.redirect_stdout(io.StringIO()) as said:
        compiled = triton.compile(source, target=GPUTarget("cuda", *TARGET), options=options)
    return report(case.kernel, compiled, said.getvalue())


def report(kernel: Any, compiled: Any, log: str) -> dict[str, Any]:
    """A kernel's name, its registers and spilled bytes as ptxas reports them, whether it makes products wait, whether
    its launch may overlap the one before, whether it waits for that one, how many instructions touch global memory
    before it does, whether it starts the next kernel before ("early") or after ("late") its wait, if at all, and how
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
