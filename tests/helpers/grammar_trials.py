"""Trials of grammars, and the processes that run them."""

import contextlib
from pathlib import Path

from dflash_toolkit.grammar_process import GrammarProcess, Trying
from dflash_toolkit.sampling import Grammar


def tried(
    process: GrammarProcess, grammar: Grammar, cpu_s: int | None = None, wall_s: float | None = None
) -> str | None:
    trying = Trying()
    try:
        return trying.run(process, grammar, cpu_s, wall_s)
    finally:
        trying.close()


def children(pid: int) -> list[int]:
    """Returns the running child processes of a process."""
    found = [each for task in Path(f"/proc/{pid}/task").iterdir() for each in (task / "children").read_text().split()]
    return [int(each) for each in found if running(int(each))]


def running(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    return False


def pid_of(process: GrammarProcess) -> int:
    assert process._process is not None
    return process._process.pid
