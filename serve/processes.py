"""Runs the engine and the other front-end processes; the engine's interpreter lock is then free of HTTP and text."""

import contextlib
import copy
import gc
import logging
import multiprocessing
import multiprocessing.connection
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash_toolkit.command_line import one_line
from dflash_toolkit.config import UnsupportedModel, UserError
from dflash_toolkit.runtime.wire import Channel, Info, Lost

from .access import set_up_logs
from .report_options import check_target
from .server import share_address
from .signals import NUMBERS, Signals, kill

if TYPE_CHECKING:
    from dflash_toolkit.runtime import Engine

    from .config import ServeConfig
    from .server import Server

log = logging.getLogger("dflash_toolkit.serve")
CAPTURE_S = 4.0  # seconds of captures before the first request; small batches come first
END_S = 5.0  # seconds that the engine gets to end by itself
STEADY_S = 60.0  # an engine that ran this long restarts after a second; otherwise the wait doubles
LONGEST_WAIT_S = 60.0


class EngineProcess:
    """Starts and restarts the engine's process, which reads the weights itself.

    Args:
        folder: directory for sockets.

    Attributes:
        path: path of the Unix socket that the engine listens on.
    """

    def __init__(self, config: "ServeConfig", folder: Path, signals: Signals) -> None:
        self._config, self._signals = config, signals
        self.path = folder / "engine"
        self._process: Any = None
        self._control: socket.socket | None = None
        self._ready = self._closing = False
        self._starting = threading.Lock()  # held while a process is started

    def start(self) -> None:
        """Starts a process; `ready` waits for it."""
        self._ready = False
        self.path.unlink(missing_ok=True)
        self._control, control = socket.socketpair()
        context = multiprocessing.get_context("spawn")
        self._process = context.Process(target=_engine_main, args=(self._config, self.path, control), name="engine")
        with self._signals.starting():
            self._process.start()
        control.close()

    def ready(self) -> Info:
        """Waits until the engine accepts requests.

        Raises:
            UserError: the engine could not start.
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
        """Logs when the process ends by itself and, with `restart`, starts another one; returns at once."""
        threading.Thread(target=self._watch, args=(restart,), name="watch", daemon=True).start()

    def _watch(self, restart: bool) -> None:
        wait_s = 1.0
        while True:
            began = time.monotonic()
            self._process.join()
            self._signals.stay_if_ending()
            if self._closing:
                return
            end = f"the engine ended by itself (exit code {self._process.exitcode})"
            if not restart:
                log.error("%s; requests are refused until you restart the server; --restart does it for you", end)
                return
            wait_s = 1.0 if time.monotonic() - began > STEADY_S else min(2 * wait_s, LONGEST_WAIT_S)
            log.error("%s; it restarts in %.0f s", end, wait_s)
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
                log.warning("the engine accepts requests again")

    def close(self) -> None:
        """Ends the process: after its current step if possible, otherwise by force."""
        with self._starting:
            self._closing = True
        loading = not self._ready
        if self._control is not None:
            self._control.close()
        if self._process is not None and self._process.pid is not None:  # None: it could not be started
            self._process.join(0 if loading else END_S)
            if self._process.is_alive():  # a long prefill, or a kernel is being compiled
                kill(self._process)
                self._process.join()


class Fronts:
    """Runs the front-end processes other than this one, which is the first.

    They listen on the same address and use the same engine. If one ends by itself, all drain and end.

    Args:
        keys: API keys.
        bound: this process's listening socket.
        path: the engine's socket.

    Attributes:
        failed: a process has ended by itself.
    """

    def __init__(
        self, config: "ServeConfig", keys: Sequence[str], bound: socket.socket, path: Path, signals: Signals
    ) -> None:
        self.failed = False
        self._signals = signals
        self._ready = self._closing = False
        self._wait_s = config.drain_timeout + 2 * END_S
        self._processes: list[tuple[Any, Any]] = []  # and the pipe to each
        context = multiprocessing.get_context("spawn")
        for number in range(1, config.front_ends):
            control, child_end = context.Pipe()
            with share_address(bound) as listener, child_end, signals.starting():
                options = (config, keys, listener, path, number, child_end)
                process = context.Process(target=_front_main, args=options, name=f"front{number}")
                process.start()
            self._processes.append((process, control))

    def ready(self, info: Info, server: "Server") -> None:
        """Waits until all processes accept requests.

        Args:
            server: this process's server, which stops when one of the processes has ended.

        Raises:
            UserError: a process could not start.
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
            self._signals.stay_if_ending()
            if not self._closing:
                process = processes[sentinel]
                process.join()
                self.failed = True
                log.error("%s ended by itself (exit code %s); the server ends", process.name, process.exitcode)
                server.should_exit = True

    def drain(self) -> None:
        """Lets the processes finish their answers and end."""
        self._closing = True
        for _, control in self._processes:
            control.close()

    def close(self) -> None:
        """Drains, and kills processes that do not end in time."""
        self.drain()
        ends = time.monotonic() + (self._wait_s if self._ready else 0.0)
        for process, _ in self._processes:
            process.join(max(0.0, ends - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()


def _front_main(*options: Any) -> None:
    _follow_parent()
    from .front import front_main

    front_main(*options)


def _follow_parent() -> None:
    """Leaves signals to the first process, and ends this process when the first one ends, also while it loads."""
    for number in NUMBERS:
        signal.signal(number, signal.SIG_IGN)

    def watch() -> None:
        if (parent := multiprocessing.parent_process()) is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=watch, name="parent", daemon=True).start()


def _engine_main(config: "ServeConfig", path: Path, control: socket.socket) -> None:
    os.setpgid(0, 0)  # `kill` then also ends compilers that it has started
    _follow_parent()
    set_up_logs(config.log_json, config.access_log)
    channel = Channel(control)
    code = 0
    try:
        code = _serve(config, path, channel)
    except Exception as error:
        line = one_line(error)
        if line is None:
            log.exception("the engine failed")
        gpus = error.gpus if isinstance(error, UnsupportedModel) else 0
        with contextlib.suppress(OSError):  # the server has ended
            channel.send(Lost(line or f"the engine failed: {error!r}", gpus))
        code = 2 if line else 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # an interpreter that ends while a thread is inside C++ code aborts the process


def _serve(config: "ServeConfig", path: Path, channel: Channel) -> int:
    import transformers

    from dflash_toolkit.runtime import load_engine
    from dflash_toolkit.runtime.loop import EngineLoop, info_of
    from dflash_toolkit.threads import use_threads

    use_threads(config.threads)
    transformers.utils.logging.disable_progress_bar()  # errors are one line
    drafter: Any = config.drafter
    runtime = config.runtime
    if config.adaptation.adapt:
        from .adapt import Adapting, first_drafter, with_room  # imports the trainer

        drafter = first_drafter(config)
        runtime = replace(with_room(runtime, drafter, config.adaptation.adapt_device), keep_taps=True)
    own = copy.deepcopy(drafter)  # the engine moves a module to its device and dtype
    engine, _ = load_engine(config.target, own, config.device, config.dtype, runtime, config.chat_template)
    if config.from_report is not None:
        weights = engine.runner.target
        dtype = str(weights.embedding.dtype).removeprefix("torch.")
        check_target(config.from_report, weights.parameter_views(stacked=True).items(), dtype)
    threading.Thread(target=_read_grammars, args=(engine,), name="first grammars", daemon=True).start()
    background = Adapting(engine, drafter, config) if config.adaptation.adapt else None  # it starts meanwhile
    _capture(engine)
    loop = EngineLoop(engine, path, channel.socket, background)
    gc.collect()
    gc.freeze()  # these objects stay; collecting them repeatedly would pause every answer
    channel.send(info_of(engine))
    loop.compiling.prepare()
    loop.run()
    return 1 if loop.failure else 0


def _read_grammars(engine: "Engine") -> None:
    """Loads xgrammar and its view of the vocabulary before the first request needs them; does nothing without xgrammar.

    Runs in a thread while steps are captured.
    """
    from dflash_toolkit.sampling import Grammar, SamplingParams

    free = Grammar("structural_tag", '{"type": "structural_tag", "format": {"type": "any_text"}}')
    for grammar in (Grammar("json", '{"type": "object"}'), free):
        with contextlib.suppress(UserError):
            engine.matcher(SamplingParams(grammar=grammar))


def _capture(engine: "Engine") -> None:
    """Captures steps that requests may need, for CAPTURE_S at most. The others are captured later, see `EngineLoop`."""
    from dflash_toolkit.progress import Progress

    until = time.monotonic() + CAPTURE_S
    try:
        if engine.prepare():
            with Progress("capturing steps", None) as bar:
                bar.advance()
                while time.monotonic() < until and engine.prepare():
                    bar.advance()
    except RuntimeError as error:
        log.warning("a step could not be captured, so the rest are captured when a batch first needs them: %s", error)
        engine.runner.check()
