"""Ends the server on SIGTERM and SIGINT at any moment, also while its main thread imports or loads."""

import contextlib
import multiprocessing
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from .server import Server

NUMBERS = (signal.SIGTERM, signal.SIGINT)
JOIN_S = 1.0  # seconds that a killed process may take to disappear


def kill(process: Any) -> None:
    """Kills a child process and the processes that it has started, if it leads a process group."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):  # it is in the group of its parent
        process.kill()


class Signals:
    """Receives SIGTERM and SIGINT; child processes start with both blocked.

    Until `serve` is called, a signal kills the child processes and ends this process. A thread does that, because a
    Python handler runs in the main thread only, which may be inside a long call of a library. Later, a signal stops the
    server, which drains.

    Args:
        clean_up: called before the process ends; removes files.
    """

    def __init__(self, clean_up: Callable[[], None]) -> None:
        self._clean_up = clean_up
        self._server: Server | None = None
        self._early = False  # a handler ran before `serve`
        self._ending = threading.Lock()
        self._starting = threading.Lock()

    def __enter__(self) -> Self:
        resource_tracker.ensure_running()  # its start would unblock signals in `starting`
        self._arrived, self._waker = socket.socketpair()
        self._waker.setblocking(False)
        self._thread = threading.Thread(target=self._receive, name="signals", daemon=True)
        self._thread.start()
        self._fd_before = signal.set_wakeup_fd(self._waker.fileno())
        self._before = {number: signal.signal(number, self._handle) for number in NUMBERS}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        with self._ending:
            for number, handler in self._before.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(self._fd_before)
        self._waker.close()
        self._thread.join()
        self._arrived.close()

    @contextlib.contextmanager
    def starting(self) -> Iterator[None]:
        """Blocks signals in a child process that is started here; the end of this process waits until it is started."""
        with self._starting:
            before = signal.pthread_sigmask(signal.SIG_BLOCK, NUMBERS)
            try:
                yield
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def serve(self, server: "Server") -> None:
        """Lets later signals stop this server."""
        with self._ending:
            self._server = server
        if self._early:
            self._thread.join()

    def stay_if_ending(self) -> None:
        """Does not return if a signal has killed the child processes: this process ends too."""
        with self._ending:
            pass

    def _handle(self, number: int, frame: Any) -> None:
        if self._server is None:
            self._early = True
        else:
            self._server.handle_exit(number, frame)

    def _receive(self) -> None:
        while numbers := self._arrived.recv(1):
            with self._ending:  # held until the end, for which the main thread waits
                if numbers[0] in NUMBERS and (self._early or self._server is None):
                    self._end(numbers[0])

    def _end(self, number: int) -> None:
        with self._starting:
            children = multiprocessing.active_children()
            for child in children:
                kill(child)
            for child in children:
                child.join(JOIN_S)
            self._clean_up()
            if number == signal.SIGINT:
                print("interrupted", file=sys.stderr)
            os._exit(128 + number)
