"""The engine's side of its socket: one loop that accepts requests, steps the engine, and sends the results.

It runs in its own process (`serve/processes.py`), so that nothing else uses its interpreter lock, or in a thread
(`client.AsyncEngine`).
"""

import functools
import itertools
import logging
import os
import selectors
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch

from ..config import UserError
from ..generation import Step
from .compile_queue import CompileQueue
from .engine import Engine
from .request import Request
from .weight_reader import WeightReader
from .wire import (
    Adaptation,
    Ask,
    Cancel,
    Channel,
    Compile,
    Info,
    Item,
    Lost,
    Ping,
    Pong,
    Replaced,
    ReplaceWeights,
    RollBack,
    SaveDrafter,
    Stats,
    Update,
)

IDLE_S = 1.0  # time without requests after which more steps are captured
BACKGROUND_S = 0.05  # between two polls of the background while the engine is idle
TRAINED = "the drafter learns from the requests (--adapt) and would be replaced soon; start the server with it"
NOT_TRAINED = "no drafter is trained; start the server with --adapt"
FAILED = "the request could not be computed; see the server's log"
log = logging.getLogger(__name__)


def info_of(engine: Engine) -> Info:
    """Returns the engine's description for front ends."""
    runner = engine.runner
    dtype = str(runner.dtype).removeprefix("torch.")
    place, method = f"{dtype} on {runner.device}", engine.options.draft_sample_method
    cache = "fp8" if engine.options.fp8_cache else "auto"
    return Info(engine.capacity, runner.max_num_seqs, runner.max_block, place, method, cache)


class _Front:
    """A front end: its connection, and its requests by number."""

    def __init__(self, connected: socket.socket) -> None:
        self.channel = Channel(connected)
        self.requests: dict[int, Request] = {}
        self.items: list[Item] = []  # results of the current step


class Background(Protocol):
    """Work next to the engine, in short pieces between two steps."""

    def poll(self) -> None: ...

    def roll_back(self) -> str | None: ...

    def save(self, folder: str | None, done: Callable[[str | None], object]) -> None: ...

    def report(self) -> Adaptation: ...

    def close(self) -> None: ...


class EngineLoop:
    """Serves an engine on a Unix socket until the other end of `control` closes, or the device fails.

    Args:
        path: the socket's path; the socket is created here.
        control: a connected socket; the loop ends when it closes.
        background: what trains the drafter; None trains nothing.

    Attributes:
        failure: the error that ended the loop, if any.
    """

    def __init__(
        self, engine: Engine, path: Path, control: socket.socket, background: Background | None = None
    ) -> None:
        self.engine, self._background = engine, background
        self.failure: Exception | None = None
        self._control = control
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.setblocking(False)
        self._listener.bind(str(path))
        os.chmod(path, 0o600)
        self._listener.listen(128)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, None)
        self._selector.register(control, selectors.EVENT_READ, None)
        self._fronts: dict[int, _Front] = {}  # by file descriptor
        self._group_numbers = itertools.count()
        self.compiling = CompileQueue(engine.grammars, engine.matcher, self._send_message)
        self._selector.register(self.compiling.woken, selectors.EVENT_READ, None)
        self._weights = WeightReader(engine)
        self._selector.register(self._weights.woken, selectors.EVENT_READ, None)
        self._closed = False
        self._captures = True  # whether to capture steps while idle; not after a failure

    def run(self) -> None:
        if (device := self.engine.runner.device).type == "cuda":
            torch.cuda.set_device(device)  # every thread has its own
        self.engine.runner.graphs.started = True  # also if captures of the start were cut short
        try:
            while not self._closed:
                if self.engine.scheduler.idle:
                    self._wait()
                else:
                    self._poll(0.0)
                try:
                    self.engine.step()
                except Exception as error:
                    self._break(error)
                self._send()
                if self._background is not None:
                    self._background.poll()
        finally:
            if self._background is not None:
                self._background.close()
            for front in list(self._fronts.values()):
                self._discard(front)
            self.compiling.close()
            self._weights.close()
            for end in (self._listener, self._control):
                end.close()
            self._selector.close()

    # ---- messages from front ends ----------------------------------------------------------------------

    def _wait(self) -> None:
        """Waits for messages and handles them. If none comes for IDLE_S, captures steps that have no graph."""
        pause = None if self._background is None else BACKGROUND_S
        more = self._captures
        timeout_s = IDLE_S if more else pause
        while not self._closed and not self._poll(timeout_s):
            more = more and self._capture()
            if self._background is not None:
                self._background.poll()
            timeout_s = 0.0 if more else pause

    def _capture(self) -> bool:
        """Captures a step that has no graph yet; returns False if there is none."""
        try:
            return self.engine.prepare(everything=True)
        except RuntimeError as error:
            log.warning("a step could not be captured; steps without a graph take longer: %s", error)
            self._captures = False
            self._check_device()
            return False

    def _poll(self, timeout_s: float | None) -> bool:
        """Handles messages; waits for one up to `timeout_s` seconds. Returns whether there was any."""
        events = self._selector.select(timeout_s)
        for key, _ in events:
            if key.fileobj is self._listener:
                connected, _ = self._listener.accept()
                front = self._fronts[connected.fileno()] = _Front(connected)
                self._selector.register(connected, selectors.EVENT_READ, front)
            elif key.fileobj is self.compiling.woken:
                self.compiling.finish()
            elif key.fileobj is self._weights.woken:
                for front, reply in self._weights.finish():
                    self._send_message(front, reply)
            elif key.fileobj is self._control:
                self._closed = self._closed or not self._control.recv(1)
            else:
                self._receive(key.data)
        return bool(events)

    def _receive(self, front: _Front) -> None:
        for message in front.channel.receive():
            match message:
                case Ask():
                    self._ask(front, message)
                case Cancel(numbers=numbers):
                    self._cancel([front.requests.pop(n) for n in numbers if n in front.requests])
                    for number in numbers:
                        self.compiling.remove(front, number)
                case Compile(number=number, params=params, key=key):
                    self.compiling.add(front, number, params, key)
                case RollBack(number=number):
                    self._reply(front, number, self._background.roll_back() if self._background else NOT_TRAINED)
                case SaveDrafter(number=number, folder=folder):
                    reply = functools.partial(self._reply, front, number)
                    self._background.save(folder, reply) if self._background else reply(NOT_TRAINED)
                case ReplaceWeights(number=number, part="drafter") if self._background is not None:
                    self._reply(front, number, TRAINED)
                case ReplaceWeights():
                    self._weights.add(front, message)
                case Ping():
                    self._send_message(front, Pong(self.stats()))
        if front.channel.gone:
            self._discard(front)
        elif front.channel.pending:
            self._send_message(front, None)

    def _ask(self, front: _Front, ask: Ask) -> None:
        group = f"{next(self._group_numbers)}" if len(ask.numbers) > 1 else ""
        for number, prompt, seed in zip(ask.numbers, ask.prompts, ask.seeds, strict=True):
            on_progress = functools.partial(self._on_progress, front, number)
            params = replace(ask.params, seed=seed)
            try:
                request = self.engine.request(
                    prompt, params, on_progress, key=ask.key, group=group, priority=ask.priority, name=ask.name,
                    cache_salt=ask.cache_salt, store=ask.store,
                )  # fmt: skip
            except UserError as error:  # the front end did not check it against `Info`
                front.items.append(_ended(number, str(error)))
                continue
            front.requests[number] = request
            self.engine.scheduler.add(request)

    def _discard(self, front: _Front) -> None:
        """Removes a front end that has closed, and cancels its requests."""
        del self._fronts[front.channel.fileno()]
        self._selector.unregister(front.channel.socket)
        front.channel.close()
        self.compiling.remove(front)
        requests, front.requests = list(front.requests.values()), {}
        self._cancel(requests)

    # ---- messages to front ends ------------------------------------------------------------------------

    def _on_progress(self, front: _Front, number: int, request: Request, step: Step | None) -> None:
        generation = request.generation
        # `step` is None for the prefill's token, and for an error, which is the last message
        tokens = step.tokens if step is not None else [] if request.error else generation.tokens
        logprobs = generation.logprobs[len(generation.tokens) - len(tokens) :] if generation.logprobs else []
        drafted, accepted = (-1, 0) if step is None else (step.drafted, step.accepted)
        front.items.append(
            Item(
                number,
                list(tokens),
                drafted,
                accepted,
                generation.finish_reason,
                logprobs,
                request.cached_tokens,
                generation.prompt_logprobs if step is None else None,
                None if request.error is None else _message_of(request.error),
                self.engine.versions,
            )
        )
        if request.finished:
            front.requests.pop(number, None)

    def _send(self) -> None:
        for front in list(self._fronts.values()):
            if front.items:
                items, front.items = front.items, []
                self._send_message(front, Update(items))

    def _reply(self, front: _Front, number: int, error: str | None) -> None:
        self._send_message(front, Replaced(number, error, self.engine.versions))

    def _send_message(self, front: _Front, message: Any | None) -> None:
        if front.channel.fileno() < 0:
            return  # it was discarded
        try:
            if message is None:
                front.channel.flush()
            else:
                front.channel.send(message)
        except OSError:
            self._discard(front)
            return
        # if it reads slowly, the rest is sent later
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if front.channel.pending else 0)
        self._selector.modify(front.channel.socket, events, front)

    def stats(self) -> Stats:
        engine, scheduler = self.engine, self.engine.scheduler
        return Stats(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting) + len(scheduler.prefilling),
            cache_used=engine.pool.used,
            prefix_queries=engine.stats.prompt_tokens,
            prefix_hits=engine.stats.cached_prompt_tokens,
            preemptions=scheduler.preemptions,
            draft_lengths=dict(engine.stats.draft_lengths),
            step_rows=dict(engine.runner.step_rows),
            tree_rows=dict(engine.runner.tree_rows),
            tree_nodes=list(engine.stats.tree_nodes),
            tree_nodes_accepted=list(engine.stats.tree_nodes_accepted),
            versions=engine.versions,
            by_version=dict(engine.stats.by_version),
            adaptation=self._background.report() if self._background else None,
        )

    # ---- failures --------------------------------------------------------------------------------------

    def _break(self, error: Exception) -> None:
        """Ends all requests with the error. Later requests are served if the device still works."""
        log.error("a step failed", exc_info=error)
        lost: list[Request] = []
        for front in self._fronts.values():
            front.items += [_ended(number, FAILED) for number in front.requests]
            lost += front.requests.values()
            front.requests = {}
        self._cancel(lost)
        self._check_device()

    def _check_device(self) -> None:
        """Frees all rows, or gives up if the device has failed."""
        try:  # cancelling requests without a row does not use the device
            self.engine.runner.check()
            self.engine.scheduler.remove_rows()
        except Exception as failure:
            self._give_up(failure)

    def _cancel(self, requests: list[Request]) -> None:
        try:
            for request in requests:
                self.engine.cancel(request)
        except Exception as failure:
            self._give_up(failure)

    def _give_up(self, failure: Exception) -> None:
        if self._closed:
            return
        log.error("the device has failed", exc_info=failure)
        self.failure, self._closed = failure, True
        self.engine.scheduler.abandon()
        for front in list(self._fronts.values()):
            front.items.clear()
            self._send_message(front, Lost(str(failure)))


def _message_of(error: Exception) -> str:
    """Returns the error message for a client."""
    return str(error) if isinstance(error, UserError) else FAILED


def _ended(number: int, error: str) -> Item:
    return Item(number, [], -1, 0, None, [], 0, error=error)
