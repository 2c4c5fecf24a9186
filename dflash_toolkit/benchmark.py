"""What the programs under scripts/ share: what every result file says of machine, versions and command, and graphs."""

import importlib.metadata
import platform
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

PACKAGES = ("dflash-toolkit", "torch", "triton", "transformers")


def setting(script: str, argv: Sequence[str] | None = None) -> dict[str, Any]:
    """`gpu`, `versions` and `command` of a run of `scripts/{script}`.

    Args:
        argv: the script's arguments; None takes those of this process.
    """
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else f"cpu, {torch.get_num_threads()} threads"
    versions = {"python": platform.python_version()} | {
        name: importlib.metadata.version(name) for name in PACKAGES if _installed(name)
    }
    words = without_output(sys.argv[1:] if argv is None else argv)
    return {"gpu": gpu, "versions": versions, "command": ["python", f"scripts/{script}", *words]}


def without_output(argv: Sequence[str]) -> list[str]:
    """A command's arguments for the record: where the result went does not matter to a reader."""
    kept = list(argv)
    if "--output" in kept:
        at = kept.index("--output")
        del kept[at : at + 2]
    return kept


def without_folders(argument: str) -> str:
    """The command as others may read it: absolute paths are cut to their last part."""
    return re.sub(r"(^|=)/(?:[^/]*/)*", r"\1", argument)


def captured(work: Callable[..., Any], *args: Any) -> torch.cuda.CUDAGraph:
    """`work(*args)` as a CUDA graph that has run once."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        work(*args)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work(*args)
    graph.replay()
    return graph


def _installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
