"""Tries grammars in processes that can be killed, before the engine compiles them; one may need any time or memory.

One process, `python -m dflash_toolkit.grammar_process`, loads xgrammar and the vocabularies. It forks a process for
each trial, which ends when its connection to the engine closes, also while it compiles.
"""

import contextlib
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from .sampling import Grammar, GrammarError

if TYPE_CHECKING:
    from .grammar import Trial

NICE = 10  # the engine's step comes first
MEMORY = 4 << 30  # bytes of a trial
UNIX = (socket.AF_UNIX, socket.SOCK_STREAM)
DEFECT = "the grammar could not be compiled; see the server's log"


class Trying:
    """A trial in a process. One thread calls `run`; the one that created it calls `end` and `close`."""

    def __init__(self) -> None:
        ours, self._theirs = socket.socketpair()
        self._connection = Connection(ours.detach())

    def end(self) -> None:
        """Kills the process; `run` returns."""
        with contextlib.suppress(OSError), socket.fromfd(self._connection.fileno(), *UNIX) as connected:
            connected.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Frees the connection after `run` has returned."""
        self._connection.close()

    def run(self, process: "GrammarProcess", grammar: Grammar, cpu_s: int | None, wall_s: float | None) -> str | None:
        """Returns what `Trial.run` returns; None: it was ended, or needs more time or memory.

        Args:
            cpu_s, wall_s: limits of the processor time and of the time, in seconds.

        Raises:
            GrammarError: see `Trial.run`.
        """
        try:
            with self._theirs:
                process.fork(self._theirs)
            self._connection.send((grammar, cpu_s, MEMORY))
            self._connection.recv_bytes()  # it has started
            if not self._connection.poll(wall_s):
                return None
            parsed, error = self._connection.recv()
        except (OSError, EOFError):
            return None
        finally:
            self.end()
        if error is not None:
            raise GrammarError(error)
        return str(parsed)


class GrammarProcess:
    """The process that forks the trials; it starts with the first of them, and again if it was killed. Thread-safe.

    Args:
        vocabularies: see `Grammars.trial_vocabularies`.
    """

    def __init__(self, vocabularies: Callable[[], Sequence[str]]) -> None:
        self._vocabularies, self._lock = vocabularies, threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._closed = False

    def start(self) -> None:
        """Starts the process if it does not run. Raises GrammarError, see `Grammars.compile`."""
        vocabularies = self._vocabularies()
        with self._lock:
            if self._closed or (self._process is not None and self._process.poll() is None):
                return
            self._control, control = socket.socketpair()
            command = [sys.executable, "-m", "dflash_toolkit.grammar_process", str(control.fileno())]
            with control:
                self._process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, pass_fds=[control.fileno()], start_new_session=True
                )  # a session of its own, as Ctrl-C sends a signal to all of the terminal's
            if self._closed:
                self._process.kill()
            with contextlib.suppress(OSError):  # it was killed
                Connection(os.dup(self._control.fileno())).send(vocabularies)

    def fork(self, connected: socket.socket) -> None:
        """Starts a trial that is connected to the other end of `connected`. Raises OSError if the process has ended."""
        self.start()
        with self._lock:
            if self._control is None or self._closed:
                raise ConnectionError("the process has ended")
            socket.send_fds(self._control, [b"x"], [connected.fileno()])

    def close(self) -> None:
        """Kills the process. Its trials end with their connections."""
        self._closed = True
        if (process := self._process) is not None:  # `start` may wait for it
            process.kill()
        with self._lock:
            if self._process is not None and self._control is not None:
                self._control.close()
                self._process.kill()
                self._process.wait()


# ---- in the process ------------------------------------------------------------------------------------


def _main(control: socket.socket) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it ends when `control` closes
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # trials leave no zombies
    os.nice(NICE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    from .grammar import Trial

    try:
        trial = Trial(Connection(os.dup(control.fileno())).recv())
        while True:
            message, files, *_ = socket.recv_fds(control, 1, 1)
            if not message:
                return
            if os.fork() == 0:
                _try(trial, Connection(files[0]))
            os.close(files[0])
    except (OSError, EOFError):
        return  # the engine has ended


def _try(trial: "Trial", connection: Connection) -> None:
    """Runs one trial, and ends the process."""
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        grammar, cpu_s, memory = connection.recv()
        connection.send_bytes(b"")
        threading.Thread(target=_end_with, args=(connection,), daemon=True).start()
        _limit(cpu_s, memory)
        try:
            connection.send((trial.run(grammar), None))
        except GrammarError as error:
            connection.send((None, str(error)))
        except (MemoryError, ConnectionError):  # the engine does not wait for it
            pass
        except Exception:  # the engine waits for an answer
            traceback.print_exc()
            connection.send((None, DEFECT))
    finally:
        os._exit(0)


def _end_with(connection: Connection) -> None:
    """Ends the process when the connection closes; nothing else is received on it."""
    connection.poll(None)
    os._exit(0)


def _limit(cpu_s: int | None, memory: int) -> None:
    """Sets soft limits; `string_pattern.py` sets its own in a process that the trial starts."""
    if cpu_s is not None:
        resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, resource.RLIM_INFINITY))
    with contextlib.suppress(OSError), open("/proc/self/statm") as file:  # only on Linux
        data = int(file.read().split()[5]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_DATA, (data + memory, resource.RLIM_INFINITY))


if __name__ == "__main__":
    _main(socket.socket(fileno=int(sys.argv[1])))
