"""Programs in processes of their own that begin in no time: forked from a server that has imported them already."""

import importlib
import multiprocessing
import multiprocessing.forkserver
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from paths import FOLDERS, ROOT

CONTEXT = multiprocessing.get_context("forkserver")
IMPORTED = ["conftest", "train.cli", "train.data_cli", "deepspeed"]  # what is not there is left out


def start_server() -> None:
    """Start the server that imports everything, if it does not run; processes get the environment of this moment."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([*map(str, FOLDERS), str(ROOT), os.environ.get("PYTHONPATH", "")]))
        patch.setenv("DS_ACCELERATOR", "cpu")
        CONTEXT.set_forkserver_preload(IMPORTED)
        multiprocessing.forkserver.ensure_running()


def start(program: str, arguments: list[str], until: tuple[Path, int] | None = None) -> BaseProcess:
    """`main(arguments)` of a module, as a command would run it; `until` as for `stop_at`."""
    return call(_run, program, arguments, until)


def call(function: Callable[..., None], *arguments: Any) -> BaseProcess:
    """`function(*arguments)` in a process that has begun."""
    start_server()
    process = CONTEXT.Process(target=function, args=arguments)
    process.start()
    return process


def _run(program: str, arguments: list[str], until: tuple[Path, int] | None) -> None:
    torch.set_num_threads(1)
    if until:
        stop_at(*until)
    sys.exit(importlib.import_module(program).main(arguments))


def stop_at(path: Path, lines: int) -> None:
    """Have this process stand still (SIGSTOP) once it has written so many lines: it cannot end before it is killed."""

    def look(frame: FrameType, event: str, _: object) -> None:
        if event == "return" and frame.f_globals.get("__name__", "").startswith("train.") and line_count(path) >= lines:
            sys.setprofile(None)
            os.kill(os.getpid(), signal.SIGSTOP)

    sys.setprofile(look)


def line_count(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def wait_stopped(process: BaseProcess) -> None:
    """Wait until `stop_at` has stopped a process. One that ends before that fails the test."""
    deadline = time.monotonic() + 240
    while Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        assert process.is_alive(), "it has ended before it came there"
        assert time.monotonic() < deadline
        time.sleep(0.002)


# ---- several processes that are one run ------------------------------------------------------------------------


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def start_several(world: int, function: Callable[..., None], *arguments: Any) -> list[BaseProcess]:
    """`function(rank, *arguments)` in processes of one launcher, which would also end the others when one dies."""
    start_server()
    port = free_port()
    made = [CONTEXT.Process(target=_placed, args=(rank, world, port, function, arguments)) for rank in range(world)]
    for process in made:
        process.start()
    return made


def _placed(rank: int, world: int, port: int, function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in place.items()} | {"MASTER_ADDR": "127.0.0.1"})
    torch.set_num_threads(1)
    function(rank, *arguments)


def ended(processes: list[BaseProcess]) -> list[int | None]:
    """Exit codes; None is a process that hangs."""
    for process in processes:
        process.join(120)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    return codes


def run_several(world: int, function: Callable[..., None], *arguments: Any) -> list[int | None]:
    return ended(start_several(world, function, *arguments))
