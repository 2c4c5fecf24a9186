"""SIGTERM and Ctrl-C at every stage of the start end all processes, without a traceback."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from forked import Command
from live_server import LATE_S, wait_until

SIGNALS = pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "Ctrl-C"])


def options(target_dir: Path, drafter_dir: Path) -> list[str]:
    words = ["--target", str(target_dir), "--drafter", str(drafter_dir), "--device", "cpu", "--port", "0"]
    return [*words, "--api-server-count", "2"]


def in_session(leader: int) -> dict[int, str]:
    """Returns the processes of a session and their command lines."""
    found = {}
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            running = folder.name.isdecimal() and os.getsid(int(folder.name)) == leader
            if running and (folder / "stat").read_text().rpartition(")")[2].split()[0] != "Z":
                found[int(folder.name)] = (folder / "cmdline").read_text().replace("\0", " ")
    return found


def spawned(leader: int) -> list[int]:
    return sorted(pid for pid, line in in_session(leader).items() if "spawn_main" in line)


def imports_torch(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return "libtorch_cpu" in Path(f"/proc/{pid}/maps").read_text()
    return False


STAGES: dict[str, Callable[[int, Path], bool]] = {
    "first line": lambda pid, err: "loads target" in err.read_text(),
    "processes exist": lambda pid, err: len(spawned(pid)) == 2,
    "engine imports torch": lambda pid, err: any(map(imports_torch, spawned(pid))),
    "first front imports torch": lambda pid, err: imports_torch(pid),
}


@SIGNALS
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.sampled(2)
def test_signal_during_imports_ends_all_processes(
    target_dir: Path, drafter_dir: Path, tmp_path: Path, stage: str, number: signal.Signals
) -> None:
    words = [sys.executable, "-m", "dflash_toolkit", "serve", *options(target_dir, drafter_dir)]
    folder, err = tmp_path / "tmp", tmp_path / "err"
    folder.mkdir()
    with err.open("w") as file:
        environment = os.environ | {"TMPDIR": str(folder)}
        process = subprocess.Popen(words, stderr=file, env=environment, start_new_session=True)
    try:

        def reached() -> bool:
            assert process.poll() is None, err.read_text()
            return STAGES[stage](process.pid, err)

        wait_until(reached)
        os.killpg(process.pid, number)  # as terminals and service managers do
        assert process.wait(LATE_S) == 128 + number
        assert not spawned(process.pid)
        wait_until(lambda: not in_session(process.pid))  # the resource tracker of multiprocessing
    finally:
        for pid in in_session(process.pid):
            os.kill(pid, signal.SIGKILL)
    first, *more = err.read_text().splitlines()
    assert "loads target" in first and more == (["interrupted"] if number == signal.SIGINT else [])
    assert list(folder.iterdir()) == []


def test_killed_command_ends_its_processes_while_they_load(target_dir: Path, drafter_dir: Path, tmp_path: Path) -> None:
    endless = tmp_path / "template"
    os.mkfifo(endless)  # the processes wait here for ever
    words = [sys.executable, "-m", "dflash_toolkit", "serve", *options(target_dir, drafter_dir)]
    words += ["--chat-template", str(endless)]
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    process = subprocess.Popen(words, stderr=subprocess.DEVNULL, env=environment, start_new_session=True)
    try:
        wait_until(lambda: any(map(imports_torch, spawned(process.pid))))
        process.kill()
        process.wait()
        wait_until(lambda: not in_session(process.pid))
    finally:
        for pid in in_session(process.pid):
            os.kill(pid, signal.SIGKILL)


LATER: dict[str, Callable[[Path], bool]] = {
    "sockets exist": lambda folder: any(folder.glob("tmp/dflash-*")),
    "engine listens": lambda folder: any(folder.glob("tmp/dflash-*/engine")),
    "another front serves": lambda folder: any(folder.glob("tmp/dflash-*/front1")),
    "all serve": lambda folder: (folder / "out").exists() and "/v1 serves" in (folder / "out").read_text(),
}


@SIGNALS
@pytest.mark.parametrize("stage", LATER)
@pytest.mark.sampled(2)
def test_signal_after_imports_ends_all_processes(
    target_dir: Path, drafter_dir: Path, tmp_path: Path, stage: str, number: signal.Signals
) -> None:
    (tmp_path / "tmp").mkdir()
    words = options(target_dir, drafter_dir)
    process = Command("dflash_toolkit.serve.cli", words, tmp_path, TMPDIR=str(tmp_path / "tmp"))
    try:
        wait_until(lambda: LATER[stage](tmp_path))
        children = process.children()
        for pid in (process.pid, *children):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        code = process.end(LATE_S)
        assert not process.children()
    finally:
        process.kill()
    said = process.err.read_text()
    if "/v1 serves" in process.out.read_text():
        assert code == 0 and said.count("\n") == 1
    else:
        assert code == 128 + number and said.splitlines()[1:] == (["interrupted"] if number == signal.SIGINT else [])
    assert not any((tmp_path / "tmp").glob("dflash-*"))
