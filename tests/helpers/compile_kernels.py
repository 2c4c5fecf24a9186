"""Compiles the kernels of the engine for GPUs that this machine lacks; run as a program it prints one JSON object.

`python tests/helpers/compile_kernels.py sm_90 sm_120` runs the passes of `compile_passes.py` with the features of each
GPU. Triton's launcher specialises the arguments, so what compiles is what a GPU would be given. Equal specialisations
compile once; without `--all` only the largest ones of a kernel compile, once for GPUs of one generation (sm_86 and
sm_89). The interpreter replaces kernels that are decorated while TRITON_INTERPRET is set, so this runs as a process of
its own without it.

It prints {target: {name: report}}; a name has the kernel and the first pass that launches it.
"""

import argparse
import contextlib
import gc
import io
import json
import math
import multiprocessing
import os
import re
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# instructions that read or write global memory
GLOBAL = re.compile(r"\b(?:(?:ld|st|atom|red)\.(?:\w+\.)*global|cp\.async\.(?:c[ag]|bulk\.tensor|bulk\.shared))\b")
OF_A_GPU = {"arch", "supported_fp8_dtypes", "deprecated_fp8_dot_operand_dtypes"}  # options that Triton derives from it


@dataclass(frozen=True)
class Launch:
    """One specialisation of a kernel."""

    target: str
    name: str
    kernel: Any  # the @triton.jit or @gluon.jit function
    signature: dict[str, str]
    constexprs: dict[tuple[int, ...], Any]
    attrs: dict[tuple[int, ...], Any]
    options: dict[str, Any]

    @property
    def arguments(self) -> dict[str, Any]:
        """The constexprs by name."""
        return {self.kernel.arg_names[at]: value for (at, *_), value in self.constexprs.items()}

    def kind(self, *, with_flags: bool) -> tuple[Any, ...]:
        """Returns the kernel, whether it reads or writes FP8, and `with_flags` also its flags."""
        eight = bool(re.search(r"\bfp8e4nv|\bu8\b", " ".join(map(str, self.signature.values()))))
        with_flags &= not (eight and "scales_p" in self.kernel.arg_names)  # for an fp8 cache: few
        flags = [(name, value) for name, value in self.arguments.items() if isinstance(value, bool)]
        return (self.kernel.__name__, eight, *(flags if with_flags else ()))

    @property
    def of_generation(self) -> tuple[Any, ...]:
        """Equal for launches that differ only in the GPU, which is of the same generation."""
        options = {name: each for name, each in self.options.items() if name not in OF_A_GPU}
        rest = self.signature, self.constexprs, self.attrs, sorted(options.items())
        return self.target[:-1], self.kernel, *map(str, rest)

    @property
    def size(self) -> int:
        """The product of the sizes, which grows with registers and shared memory."""
        sizes = (value for value in self.arguments.values() if type(value) is int)
        return math.prod(max(1, size) for size in sizes) * self.options["num_stages"]


def launches(target: str, every_model: bool) -> list[Launch]:
    """Returns the specialisations that the passes launch on a GPU."""
    import torch
    from compile_passes import FEW, MODELS, passes
    from triton.runtime.jit import JITFunction

    from dflash_toolkit.kernels import features
    from dflash_toolkit.runtime.precompile import launch_on_meta

    found, current, run = list[Launch](), "", JITFunction.run

    def record(
        kernel: Any, key: str, signature: Any, device: int, constexprs: Any, options: Any, attrs: Any, warmup: bool
    ) -> object:
        found.append(
            Launch(target, f"{kernel.__name__}, {current}", kernel, signature, constexprs, attrs, vars(options))
        )
        return kernel.device_caches[device][0].setdefault(key, object())

    launch_on_meta(features.KNOWN[target])
    JITFunction._do_compile = record
    JITFunction.run = lambda kernel, *args, warmup, **options: run(kernel, *args, warmup=True, **options)
    try:
        with torch.inference_mode():
            for current, each in passes(MODELS if every_model else FEW):  # noqa: B007  # `record` reads it
                each()
    finally:
        JITFunction.run = run
    return found


def largest(found: list[Launch], target: str) -> list[Launch]:
    """Returns the largest specialisation of every kind; with flags on sm_90, as its kernels are measured and tuned."""
    kinds: dict[tuple[Any, ...], Launch] = {}
    for each in found:
        kind = each.kind(with_flags=target == "sm_90")
        if kind not in kinds or kinds[kind].size < each.size:
            kinds[kind] = each
    return list(kinds.values())


def report(launch: Launch) -> dict[str, Any]:
    """Compiles a kernel. Returns its registers and spilled bytes as ptxas reports them, whether it makes products wait,
    whether its launch may overlap the one before, whether it waits for that one, how many instructions touch global
    memory before it does, whether it starts the next kernel before ("early") or after ("late") its wait, if at all, and
    how many branches are never taken, whatever the arguments."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    kernel, arguments = launch.kernel, launch.arguments
    source = (GluonASTSource if kernel.is_gluon() else ASTSource)(
        kernel, launch.signature, launch.constexprs, launch.attrs
    )
    target = GPUTarget("cuda", int(launch.target.removeprefix("sm_")), 32)
    with contextlib.redirect_stdout(io.StringIO()) as said:
        compiled = triton.compile(source, target=target, options=launch.options)
    log = said.getvalue()
    spills = sum(int(n) for n in re.findall(r"(\d+) bytes spill", log))
    registers = max(int(n) for n in re.findall(r"Used (\d+) registers", log))
    order = re.findall(r"griddepcontrol\.(\w+)", compiled.asm["ptx"])
    before, waits, _ = compiled.asm["ptx"].partition("griddepcontrol.wait")
    starts_next = None if "launch_dependents" not in order else "late" if order[0] == "wait" else "early"
    never = len(re.findall(r"(?:scf\.if|cf\.cond_br) %(?:true|false)\b", compiled.asm["ttgir"]))
    return {
        "kernel": kernel.__name__, "registers": registers, "spills": spills, "shared": compiled.metadata.shared,
        "stages": launch.options["num_stages"],
        "serialized": "wgmma.mma_async instructions are serialized" in log,
        "overlaps": compiled.metadata.launch_pdl, "waits": bool(waits), "before": len(GLOBAL.findall(before)),
        "starts_next": starts_next, "never": never,
        "arguments": {name: value for name, value in arguments.items() if isinstance(value, bool | int)},
    }  # fmt: skip


LAUNCHES: list[Launch] = []  # launches of all targets; the processes of the pool inherit them


def report_of(index: int) -> dict[str, Any]:
    return report(LAUNCHES[index])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("targets", nargs="+")
    parser.add_argument("--all", action="store_true", help="compile all specialisations")
    args = parser.parse_args()
    os.environ.pop("TRITON_INTERPRET", None)
    here = Path(__file__).parent
    sys.path[:0] = [str(here.parents[1]), str(here)]
    import triton

    gc.disable()  # a sixth of the time: every kernel is a large tree
    triton.knobs.nvidia.dump_ptxas_log = triton.knobs.compilation.always_compile = True  # the cache keeps no log
    for target in args.targets:
        launched = launches(target, args.all)
        LAUNCHES.extend(launched if args.all else largest(launched, target))
    keys = [index if args.all else launch.of_generation for index, launch in enumerate(LAUNCHES)]
    first = {key: keys.index(key) for key in keys}
    with ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("fork")) as pool:
        found = dict(zip(first, pool.map(report_of, first.values()), strict=True))
    reports: dict[str, dict[str, Any]] = {target: {} for target in args.targets}
    for launch, key in zip(LAUNCHES, keys, strict=True):
        of_target = reports[launch.target]
        of_target[f"{launch.name} ({len(of_target)})"] = found[key]
    print(json.dumps(reports, indent=1))


if __name__ == "__main__":
    main()
