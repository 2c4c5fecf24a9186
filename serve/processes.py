"""The engine in a process of its own, so that HTTP and text have no share in its interpreter lock."""

import contextlib
import gc
import logging
import multiprocessing
import multiprocessing.connection
import os
import select
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash_toolkit.config import UnsupportedModel, UserError, one_line
from dflash_toolkit.runtime.wire import Channel, Info, Lost

from .access import set_up_logs
from .server import beside

if TYPE_CHECKING:
    from dflash_toolkit.runtime import Engine

    from .config import ServeConfig
    from .server import Server

log = logging.getLogger("dflash_toolkit.serve")
END_S = 5.0  # seconds that the engine gets to end by itself
STEADY_S = 60.0  # an engine that ran for so long starts again after a second, others after twice what it was last
LONGEST_WAIT_S = 60.0


class EngineProcess:
    """Starts the engine, and starts it again.

    Args:
        config: what the engine is made of; weights are read in its own process.

    Attributes:
        path: of the Unix socket that it listens on.
    """

    def __init__(self, config: "ServeConfig") -> None:
        self._config = config
        self._folder = tempfile.TemporaryDirectory(prefix="dflash-")  # for its owner only
        self.path = Path(self._folder.name) / "engine"
        self._process: Any = None
        self._control: socket.socket | None = None
        self._ready = self._closing = False
        self._starting = threading.Lock()  # held while a process is started

    def start(self) -> None:
        """Start a process, which `ready` waits for."""
        self._ready = False
        self.path.unlink(missing_ok=True)
        self._control, control = socket.socketpair()
        context = multiprocessing.get_context("spawn")
        self._process = context.Process(target=_engine_main, args=(self._config, self.path, control), name="engine")
        self._process.start()
        control.close()

    def ready(self) -> Info:
        """Wait until it takes requests.

        Raises:
            UserError: why it cannot.
        """
        assert self._control is not None
        channel = Channel(self._control)
        while not channel.gone:
            select.select([channel], [], [])
            for message in channel.receive():
                if isinstance(message, Info):
                    self._ready = True
                    return message
                if isinstance(message, Lost):
                    raise UnsupportedModel(message.reason, message.gpus) if message.gpus else UserError(message.reason)
        self._process.join()
        raise UserError(f"the engine ended while it started (exit code {self._process.exitcode}); see above")

    @property
    def pid(self) -> int:
        return int(self._process.pid)

    def watch(self, restart: bool) -> None:
        """Say so when the process ends by itself and, if asked, start another; returns at once."""
        threading.Thread(target=self._watch, args=(restart,), name="watch", daemon=True).start()

    def _watch(self, restart: bool) -> None:
        wait_s = 1.0
        while True:
            began = time.monotonic()
            self._process.join()
            if self._closing:
                return
            end = f"the engine ended by itself (exit code {self._process.exitcode})"
            if not restart:
                log.error("%s; requests are refused until the server is started again, see --restart", end)
                return
            wait_s = 1.0 if time.monotonic() - began > STEADY_S else min(2 * wait_s, LONGEST_WAIT_S)
            log.error("%s; another one starts in %.0f s", end, wait_s)
            time.sleep(wait_s)
            with self._starting:
                if self._closing:
                    return
                self.start()
            try:
                self.ready()
            except UserError as error:
                log.error("%s", error)
            else:
                log.warning("the engine takes requests again")

    def close(self) -> None:
        """End it: by itself, if it can, after the step under way."""
        with self._starting:
            self._closing = True
        loading = not self._ready
        if self._control is not None:
            self._control.close()
        if self._process is not None and self._process.pid is not None:  # where it could not start, it never ran
            self._process.join(0 if loading else END_S)
            if self._process.is_alive():  # a long prefill, a kernel that is compiled
                self._process.kill()
                self._process.join()
        self._folder.cleanup()


class Fronts:
    """The front processes beside this one, which is the first.

    They listen on the same address and ask the same engine. If one ends by itself, all drain and end.

    Args:
        keys: API keys.
        bound: this process's listening socket.
        path: the engine's.

    Attributes:
        failed: one has ended by itself.
    """

    def __init__(self, config: "ServeConfig", keys: Sequence[str], bound: socket.socket, path: Path) -> None:
        self.failed = False
        self._ready = self._closing = False
        self._wait_s = config.drain_timeout + 2 * END_S
        self._processes: list[tuple[Any, Any]] = []  # and the pipe to each
        context = multiprocessing.get_context("spawn")
        for number in range(1, config.api_server_count):
            control, theirs = context.Pipe()
            with beside(bound) as listener, theirs:
                options = (config, keys, listener, path, number, theirs)
                process = context.Process(target=_front_main, args=options, name=f"front{number}")
                process.start()
            self._processes.append((process, control))

    def ready(self, info: Info, server: "Server") -> None:
        """Wait until all take requests.

        Args:
            server: this process's, which is told to end when one of them has.

        Raises:
            UserError: one could not.
        """
        for step in ("loaded", "ready"):
            for process, control in self._processes:
                try:
                    assert control.recv() == step
                    if step == "loaded":
                        control.send(info)
                except (EOFError, OSError) as error:
                    process.join(END_S)
                    raise UserError(
                        f"{process.name} ended while it started (exit code {process.exitcode}); see above"
                    ) from error
        self._ready = True
        threading.Thread(target=self._watch, args=(server,), name="fronts", daemon=True).start()

    def _watch(self, server: "Server") -> None:
        processes = {process.sentinel: process for process, _ in self._processes}
        for sentinel in multiprocessing.connection.wait(list(processes)):
            if not self._closing:
                process = processes[sentinel]
                process.join()
                self.failed = True
                log.error("%s ended by itself (exit code %s); the server ends", process.name, process.exitcode)
                server.should_exit = True

    def drain(self) -> None:
        """Have them finish what they have, and end."""
        self._closing = True
        for _, control in self._processes:
            control.close()

    def close(self) -> None:
        """Drain, and end those that do not end."""
        self.drain()
        ends = time.monotonic() + (self._wait_s if self._ready else 0.0)
        for process, _ in self._processes:
            process.join(max(0.0, ends - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()


def _front_main(*options: Any) -> None:
    """The process."""
    for number in (signal.SIGINT, signal.SIGTERM):  # the first front says when to end
        signal.signal(number, signal.SIG_IGN)
    from .front import front_main

    front_main(*options)


def _engine_main(config: "ServeConfig", path: Path, control: socket.socket) -> None:
    """The process."""
    for number in (signal.SIGINT, signal.SIGTERM):  # the server says when to end; its own end closes `control`
        signal.signal(number, signal.SIG_IGN)
    set_up_logs(config.log_json, config.access_log)
    told = Channel(control)
    code = 0
    try:
        code = _serve(config, path, told)
    except Exception as error:
        said = one_line(error)
        if said is None:
            log.exception("the engine failed")
        gpus = error.gpus if isinstance(error, UnsupportedModel) else 0
        with contextlib.suppress(OSError):  # the server has gone
            told.send(Lost(said or f"the engine failed: {error!r}", gpus))
        code = 2 if said else 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # an interpreter that ends while a thread is inside C++ code aborts the process


def _serve(config: "ServeConfig", path: Path, told: Channel) -> int:
    import transformers

    from dflash_toolkit.runtime import load_engine
    from dflash_toolkit.runtime.loop import EngineLoop, info_of
    from dflash_toolkit.threads import use_threads

    use_threads(config.threads)
    transformers.utils.logging.disable_progress_bar()  # errors are one line
    engine, _ = load_engine(config.target, config.drafter, config.device, config.dtype, config.runtime)
    threading.Thread(target=_read_grammars, args=(engine,), name="first grammars", daemon=True).start()
    _capture(engine)
    loop = EngineLoop(engine, path, told.socket)
    gc.collect()
    gc.freeze()  # what is here stays; every answer would wait while Python looks through it
    told.send(info_of(engine))
    loop.run()
    return 1 if loop.failure else 0


def _read_grammars(engine: "Engine") -> None:
    """Load xgrammar, and show it the vocabulary, so that no request waits for that; where it is not installed, nothing.

    In a thread, while steps are captured.
    """
    from dflash_toolkit.sampling import Grammar, SamplingParams

    free = Grammar("structural_tag", '{"type": "structural_tag", "format": {"type": "any_text"}}')
    for grammar in (Grammar("json", '{"type": "object"}'), free):
        with contextlib.suppress(UserError):
            engine.matcher(SamplingParams(grammar=grammar))


def _capture(engine: "Engine") -> None:
    """Capture every step that requests may ask for, so that none of them waits for one."""
    from dflash_toolkit.progress import Progress

    try:
        if engine.prepare():
            with Progress("capturing steps", None) as bar:
                bar.advance()
                while engine.prepare():
                    bar.advance()
    except RuntimeError as error:
        log.warning("steps are captured when a batch first needs them, as one could not be now: %s", error)
        engine.runner.check()
