"""The queue of grammars that wait to be compiled: fair between API keys, with a lane for those that take a moment.

A grammar is first tried in a process (`grammar_process.py`), which ends when no request waits for the grammar or
when it needs too much. If that succeeds, a thread of low priority compiles it for the engine, in the same time again.

Every grammar starts in the fast lane, where it may use FAST_CPU_S seconds of processor time. One that needs more starts
again in the slow lane, so that it never delays those that are compiled quickly.
"""

import contextlib
import itertools
import logging
import os
import queue
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from ..config import UserError
from ..grammar import Grammars
from ..grammar_process import DEFECT, NICE, GrammarProcess, Trying
from ..sampling import Grammar, SamplingParams
from .wire import CHUNK, Compiled, Compiling

Lane: TypeAlias = Literal["fast", "slow"]
SLOTS: dict[Lane, int] = {"fast": 2, "slow": 2}  # grammars compiled at the same time
FAST_CPU_S, FAST_S = 1, 10.0
MAX_GRAMMARS = 64  # grammars that compile or wait
MAX_OF_KEY = 16  # grammars of one API key; of a server without keys: MAX_GRAMMARS
log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class _Job:
    grammar: Grammar
    key: str  # API key of the request that came first
    order: int
    lane: Lane = "fast"
    waiting: dict[tuple[Any, int], SamplingParams] = field(default_factory=dict)  # requests, by front end and number
    trying: Trying | None = None  # None: it waits for a slot


class CompileQueue:
    """Compiles grammars for front ends. All methods are called in the loop's thread.

    Args:
        check: raises UserError if a request cannot use its grammar, which is compiled.
        send: sends a message to a front end.

    Attributes:
        woken: readable when `finish` has something to do.
    """

    def __init__(
        self, grammars: Grammars, check: Callable[[SamplingParams], Any], send: Callable[[Any, Any], None]
    ) -> None:
        self._grammars, self._check, self._send = grammars, check, send
        self._process = GrammarProcess(grammars.trial_vocabularies)
        self._threads = ThreadPoolExecutor(sum(SLOTS.values()), "grammars", _lower_priority)
        self._jobs: dict[Grammar, _Job] = {}
        self._orders, self._used, self._of_key = itertools.count(), Counter[str](), Counter[str]()  # slots in use
        self._last: dict[str, int] = {}  # when a key last got a slot
        self._done: queue.SimpleQueue[tuple[_Job, str | None, bool]] = queue.SimpleQueue()
        self.woken, self._waker = socket.socketpair()
        for end in (self.woken, self._waker):
            end.setblocking(False)

    def prepare(self) -> None:
        """Starts the process for the first request; returns at once."""
        self._threads.submit(self._process.start)

    def add(self, front: Any, number: int, params: SamplingParams, key: str) -> None:
        """Compiles the grammar of a request; `Compiling` and `Compiled` report about it."""
        grammar = params.grammar
        assert grammar is not None
        if self._grammars.ready(grammar):
            self._send(front, Compiled(number, self._error_of(params)))
            return
        job = self._jobs.get(grammar)
        if job is None:
            if busy := self._refusal(key):
                self._send(front, Compiled(number, busy, busy=True))
                return
            job = self._jobs[grammar] = _Job(grammar, key, next(self._orders))
        job.waiting[front, number] = params
        if job.trying is not None:  # another request's
            self._send(front, Compiling(number, waits=False))
        self._start()

    def remove(self, front: Any, number: int | None = None) -> None:
        """Forgets a request of a front end, or all; a grammar that no request waits for is not compiled any further."""
        for job in list(self._jobs.values()):
            for request in [each for each in job.waiting if each[0] is front and number in (None, each[1])]:
                del job.waiting[request]
            if not job.waiting:
                del self._jobs[job.grammar]
                if job.trying is not None:
                    job.trying.end()

    def finish(self) -> None:
        """Reports about grammars that are compiled, and starts the next ones."""
        with contextlib.suppress(BlockingIOError):
            self.woken.recv(CHUNK)
        for job, error, slow in self._finished():
            assert job.trying is not None
            job.trying.close()
            job.trying = None
            self._used[job.lane] -= 1
            self._of_key[job.key] -= 1
            if self._jobs.get(job.grammar) is not job:
                continue  # no request waits for it
            if slow and job.lane == "fast":
                job.lane = "slow"
                for front, number in list(job.waiting):
                    self._send(front, Compiling(number, waits=True))
                continue
            del self._jobs[job.grammar]
            for (front, number), params in list(job.waiting.items()):
                self._send(front, Compiled(number, error or self._error_of(params)))
        self._start()

    def close(self) -> None:
        """Ends all processes and threads."""
        for job in self._jobs.values():
            if job.trying is not None:
                job.trying.end()
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._process.close()
        for end in (self.woken, self._waker):
            end.close()

    def _refusal(self, key: str) -> str | None:
        own = sum(job.key == key for job in self._jobs.values())
        if key and own >= MAX_OF_KEY:
            return f"{own} grammars of this API key are compiled or wait for it; try again later"
        if len(self._jobs) >= MAX_GRAMMARS:
            return f"{len(self._jobs)} grammars are compiled or wait for it; try again later"
        return None

    def _start(self) -> None:
        """Starts grammars in free slots; keys with fewer slots come first, then those that got one longest ago."""
        for lane, slots in SLOTS.items():
            while self._used[lane] < slots:
                waiting = [job for job in self._jobs.values() if job.lane == lane and job.trying is None]
                if not waiting:
                    break
                job = min(waiting, key=lambda job: (self._of_key[job.key], self._last.get(job.key, -1), job.order))
                self._last[job.key] = next(self._orders)
                self._used[lane] += 1
                self._of_key[job.key] += 1
                job.trying = Trying()
                self._threads.submit(self._run, job, job.trying)
                for front, number in list(job.waiting):
                    self._send(front, Compiling(number, waits=False))

    def _finished(self) -> Iterator[tuple[_Job, str | None, bool]]:
        with contextlib.suppress(queue.Empty):
            while True:
                yield self._done.get_nowait()

    def _error_of(self, params: SamplingParams) -> str | None:
        try:
            self._check(params)
        except UserError as error:
            return str(error)
        except Exception:  # a defect of ours or of xgrammar must not end the loop
            log.exception("a grammar could not be used")
            return DEFECT
        return None

    # ---- in a thread -----------------------------------------------------------------------------------

    def _run(self, job: _Job, trying: Trying) -> None:
        error, slow = None, False
        try:
            limits = (FAST_CPU_S, FAST_S) if job.lane == "fast" else (None, None)
            parsed = trying.run(self._process, job.grammar, *limits)
            if slow := parsed is None:
                error = f"the {job.grammar.name} ended the process that compiled it; simplify it"
            else:
                self._grammars.compile(job.grammar, parsed)
        except UserError as refused:
            error = str(refused)
        except Exception:  # the request must get an answer
            log.exception("a grammar could not be compiled")
            error = DEFECT
        self._done.put((job, error, slow))
        with contextlib.suppress(OSError):  # the loop has ended
            self._waker.send(b"x")


def _lower_priority() -> None:
    """Lets other threads go first, those of the engine's step."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
