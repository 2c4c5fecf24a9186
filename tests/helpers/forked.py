"""Starts programs quickly: forks them from a server that has already imported them."""

import importlib
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from paths import FOLDERS, ROOT

from dflash_toolkit import grammar_process
from dflash_toolkit.files import append_lines

CONTEXT = multiprocessing.get_context("forkserver")
# missing ones are skipped
IMPORTED = ["conftest", "deepspeed", "preloaded"]
IMPORTED += [f"dflash_toolkit.{name}" for name in ("train.pipeline", "train.data_run", "train.distributed.fsdp")]
IMPORTED += ["dflash_toolkit.serve.front", "dflash_toolkit.runtime.loop", "xgrammar"]


def start_server() -> None:
    """Starts the fork server unless it runs. Processes get the current environment, without a test's API key."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([*map(str, FOLDERS), str(ROOT), os.environ.get("PYTHONPATH", "")]))
        patch.setenv("DS_ACCELERATOR", "cpu")
        patch.delenv("DFLASH_API_KEY", raising=False)
        CONTEXT.set_forkserver_preload(IMPORTED)
        multiprocessing.forkserver.ensure_running()


def start(program: str, arguments: list[str], until: tuple[Path, int] | None = None) -> BaseProcess:
    """Runs `main(arguments)` of a module like a command; `until` as for `stop_at`."""
    return call(_run, program, arguments, until)


def call(function: Callable[..., None], *arguments: Any) -> BaseProcess:
    """Returns a started process that runs `function(*arguments)`."""
    start_server()
    process = CONTEXT.Process(target=function, args=arguments)
    process.start()
    return process


def fork_processes(patch: pytest.MonkeyPatch) -> None:
    """Makes this process fork where it would spawn."""
    start_server()
    patch.setattr(multiprocessing, "get_context", lambda method=None: CONTEXT)


def _run(program: str, arguments: list[str], until: tuple[Path, int] | None) -> None:
    torch.set_num_threads(1)
    main = importlib.import_module(program).main
    if until:
        stop_at(*until)
    sys.exit(main(arguments))


def stop_at(path: Path, lines: int) -> None:
    """Stops this process (SIGSTOP) once a journal has so many lines: it cannot end before it is killed."""

    def append(to: Path, rows: Iterable[Any]) -> None:
        append_lines(to, rows)
        if line_count(path) >= lines:
            os.kill(os.getpid(), signal.SIGSTOP)

    for names in [getattr(module, "__dict__", {}) for module in sys.modules.values()]:
        if names is not globals() and names.get("append_lines") is append_lines:
            names["append_lines"] = append


class Module:
    """Replaces `subprocess.Popen` in `launch.py`: runs `python -m MODULE ...` in a forked process.

    Args:
        said: file that gets its output.
    """

    def __init__(self, said: Path, command: list[str], env: dict[str, str]) -> None:
        module, *arguments = command[command.index("-m") + 1 :]
        self._process = call(_run_in, str(said), env, module, arguments)
        self.terminate = self._process.terminate

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> None:
        self._process.join(timeout)


def _run_in(said: str, environment: dict[str, str], module: str, arguments: list[str]) -> None:
    _write_to((said, said))
    os.environ |= environment
    _run(module, arguments, None)


def line_count(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def wait_stopped(process: BaseProcess) -> None:
    """Waits until `stop_at` has stopped a process. Fails the test if the process ends before that."""
    deadline = time.monotonic() + 240
    while Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        assert process.is_alive(), "it has ended before it came there"
        assert time.monotonic() < deadline
        time.sleep(0.002)


class GrammarTrials:
    """Replaces `subprocess.Popen` in `grammar_process.py`: a new process would import for seconds in each engine.

    Attributes:
        started: those that may still run. They ignore SIGTERM, so Python would wait for them when it ends.
    """

    started: ClassVar[list["GrammarTrials"]] = []

    def __init__(self, command: list[str], **_: Any) -> None:
        start_server()
        with socket.socket(fileno=os.dup(int(command[-1]))) as control:
            self._process = CONTEXT.Process(target=_try_grammars, args=(control,), daemon=True)
            self._process.start()
        self.pid, self.kill = self._process.pid, self._process.kill
        self.started.append(self)

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self) -> None:
        self._process.join()


def _try_grammars(control: socket.socket) -> None:
    os.setsid()
    grammar_process._main(control)


# ---- a server with its processes -------------------------------------------------------------------------------


class Command:
    """A program with forked processes of its own, instead of spawned ones.

    Args:
        folder: gets its files `out` and `err`, unless `said` is where both go, and `children`.
        environment: its variables, in addition to those of the tests.
    """

    def __init__(
        self, program: str, arguments: list[str], folder: Path, said: str | None = None, **environment: str
    ) -> None:
        self.out, self.err, self._started = (folder / name for name in ("out", "err", "children"))
        written = (said or str(self.out), said or str(self.err))
        self._process = call(_serve, program, arguments, written, self._started, environment)
        self.pid = self._process.pid or 0

    def line(self) -> str:
        """Returns the first line of stdout."""
        while "\n" not in (said := self.out.read_text() if self.out.exists() else ""):
            assert self._process.is_alive(), self.err.read_text()
            time.sleep(0.01)
        return said.partition("\n")[0]

    def children(self) -> list[int]:
        """Returns the running child processes in the order of their start."""
        started = map(int, self._started.read_text().split())
        return [pid for pid in started if Path(f"/proc/{pid}").exists()]

    def end(self, timeout_s: float) -> int | None:
        """Waits for the end and returns the exit code."""
        self._process.join(timeout_s)
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()


class _Child(CONTEXT.Process):  # type: ignore[name-defined, misc]
    """A process that writes to the output of its parent."""

    said: tuple[str, str]
    started: Path

    def start(self) -> None:
        self.__dict__["said"] = self.said
        super().start()
        with self.started.open("a") as file:
            file.write(f"{self.pid}\n")

    def run(self) -> None:
        _write_to(self.said)
        super().run()


def _serve(
    program: str, arguments: list[str], said: tuple[str, str], started: Path, environment: dict[str, str]
) -> None:
    os.environ |= environment | {"OMP_NUM_THREADS": "1"}
    tempfile.tempdir = None  # from the fork server's environment
    torch.set_num_threads(1)
    _write_to(said)
    _Child.said, _Child.started = said, started
    started.touch()
    server: Any = multiprocessing.forkserver._forkserver
    server.ensure_running = multiprocessing.resource_tracker.ensure_running  # the one of the tests runs
    spawned: Any = SimpleNamespace(Process=_Child, Pipe=CONTEXT.Pipe)
    multiprocessing.get_context = lambda method=None: spawned
    sys.exit(importlib.import_module(program).main(arguments))


def _write_to(said: tuple[str, str]) -> None:
    for stream, path in enumerate(said, 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)


# ---- several processes that are one run ------------------------------------------------------------------------


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def start_several(world: int, function: Callable[..., None], *arguments: Any) -> list[BaseProcess]:
    """Runs `function(rank, *arguments)` in processes of one launcher, which ends all of them when one dies."""
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
