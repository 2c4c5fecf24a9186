"""The trainer of a live drafter in a process of its own: no fault of it, and no pause, touches an answer.

The engine's thread only calls `TrainerProcess.poll` between two steps. Two threads send what was served and receive new
drafters.
"""

import contextlib
import copy
import ctypes
import logging
import math
import multiprocessing
import os
import queue
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dflash_toolkit.config import UserError
from dflash_toolkit.models.dflash.config import DrafterConfig
from dflash_toolkit.models.dflash.network import Drafter
from dflash_toolkit.runtime import Engine
from dflash_toolkit.runtime.capture import Served

from ..config import TrainConfig
from ..objective.target_head import HeadWeights
from ..online import OnlineTrainer, Record
from .adapter import Adapter
from .pipe import receive, send
from .slowdown import Slowdown

ROLL_BACK, STOP_DRAFTING = "roll back", "stop drafting"  # messages
IN_FLIGHT = 16  # served requests on their way to the trainer
NICE = 10  # lower priority on the processor of a trainer on a GPU; on a CPU only its share limits it
IDLE_S = 0.05  # pause of a trainer without enough records
END_S = 5.0
MINUTE_S = 60.0
LONG_S = 1.0
THREADS = 1  # of the trainer on the processor
POLLS = 64  # between two estimates of what the trainer costs
WAITING = 16  # part of the memory for requests that wait to be sent, which is pinned
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Status:
    """The state of a trainer."""

    steps: int = 0
    records: int = 0  # in the replay buffer
    nbytes: int = 0  # of the buffer
    learnt_from: int = 0  # requests that the served version has learnt from
    held_out: float | None = None  # the served version's tokens per step on held-out requests
    live: float | None = None  # its tokens per step on live requests
    promotions: int = 0
    rollbacks: int = 0
    versions: int = 1  # that are kept; 2: the current one can be rolled back
    busy_share: float = 0.0  # share of the last minute in which it worked


class Shared(ctypes.Structure):
    """State that both processes read and write at any time."""

    busy: bool  # the engine has requests
    working: bool  # the trainer does not pause
    cost: float  # see `Slowdown`
    break_even: float  # see `Engine`
    _fields_ = (
        ("busy", ctypes.c_bool), ("working", ctypes.c_bool), ("cost", ctypes.c_double), ("break_even", ctypes.c_double),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Work:
    """The first message to the process: all that it needs."""

    head: HeadWeights
    shape: DrafterConfig
    weights: dict[str, Tensor]
    config: TrainConfig | None
    device: torch.device
    share: float
    options: dict[str, Any]  # of `Adapter`


class TrainerProcess:
    """Starts a trainer for the drafter of an engine, and gives the engine each version that the trainer promotes.

    Args:
        engine: with a drafter and `EngineOptions(keep_taps=True)`.
        head: embedding and head of the target; they are read again when the engine has new weights.
        drafter: the served drafter.
        config: see `OnlineTrainer`.
        device: of the trainer (default: that of `head`).
        share: share of the engine's speed that the trainer may cost while requests run; otherwise it always works.
        memory: bytes of captured records, in host memory.
        anchors, batch, every, fresh: see `Adapter`.
        on_swap: called with the weights of each new version when the engine has them.

    Attributes:
        status: the newest state that the trainer has sent.
        error: why the trainer has ended, if it has; the engine then keeps its drafter.
    """

    def __init__(
        self, engine: Engine, head: HeadWeights, drafter: Drafter, config: TrainConfig | None = None, *,
        device: torch.device | str | None = None, share: float = 1.0, memory: int = 1 << 30, batch: int = 8,
        every: int = 20, anchors: Sequence[Record] = (), fresh: bool = False,
        on_swap: Callable[[dict[str, Tensor]], object] = lambda tensors: None,
    ) -> None:  # fmt: skip
        if not 0.0 < share <= 1.0:
            raise UserError(f"the trainer's share is {share}; it must be in (0, 1]")
        self.status = Status()
        self.error: str | None = None
        self._on_swap = on_swap
        self._engine, self._capture = engine, engine.start_capture(memory // WAITING)
        self._head, self._target_version = head, engine.target_version
        if fresh:
            engine.stop_drafting()
        options = {"memory": memory, "batch": batch, "every": every, "anchors": list(anchors), "fresh": fresh}
        place = torch.device(device) if device is not None else head.device
        host = torch.device("cpu")  # copied now: a copy from a GPU in a thread would disturb the capture of a graph
        weights = {name: tensor.detach().to(host) for name, tensor in drafter.state_dict().items()}
        work = Work(head.to(host), drafter.config, weights, config, place, share, options)
        context = multiprocessing.get_context("spawn")
        self._connection, end = context.Pipe()
        self._shared: Shared = context.RawValue(Shared, False, False, 1.0, engine.break_even)
        self._ready, self._polls, self._last = False, 0, (0, False, 0.0)
        self._slowdown = Slowdown()
        self._process = context.Process(target=_main, args=(end, self._shared), name="trainer", daemon=True)
        self._process.start()
        end.close()
        self._going: queue.Queue[Any] = queue.Queue()
        self._going.put(work)
        self._came: deque[Any] = deque()
        self._closing = False
        for target in (self._send, self._receive):
            threading.Thread(target=target, name=f"trainer{target.__name__}", daemon=True).start()

    @property
    def alive(self) -> bool:
        return self._process.is_alive()

    @property
    def pid(self) -> int:
        return int(self._process.pid or 0)

    def poll(self) -> None:
        """Sends what was served, and swaps in a drafter that has arrived. Never waits for the trainer, never raises."""
        self._shared.busy = not self._engine.scheduler.idle
        self._count_step()
        if self._engine.target_version != self._target_version:
            self._target_version = self._engine.target_version
            self._capture.clear()
            self._going.put(self._head.to(torch.device("cpu")))
        for served in self._capture.take(max(IN_FLIGHT - self._going.qsize(), 0)):
            self._going.put(served)
        while self._came:
            message = self._came.popleft()
            if isinstance(message, Status):
                self.status, self._ready = message, True
                continue
            self._slowdown = Slowdown()  # other steps follow
            if message == STOP_DRAFTING:
                self._engine.stop_drafting()
                continue
            try:
                self._engine.update_drafter(message)
                self._on_swap(message)
            except (UserError, torch.OutOfMemoryError) as mistake:
                log.error("a new drafter was not used: %s", mistake)
            self._going.put(self._engine.drafter_version)

    def _count_step(self) -> None:
        """Counts the time since the poll before, if neither the batch nor the trainer's state has changed.

        A trainer that starts compiles kernels, which costs the engine little and says nothing of its training.
        """
        requests, working, now = len(self._engine.scheduler.running), self._shared.working, time.perf_counter()
        if requests and self._ready and self._last[:2] == (requests, working):
            self._slowdown.add(requests, working, now - self._last[2])
        self._last, self._polls = (requests, working, now), self._polls + 1
        if self._polls % POLLS == 0:
            self._shared.cost, self._shared.break_even = self._slowdown.cost, self._engine.break_even

    def roll_back(self) -> str | None:
        """Asks for the version before the served one; returns why that is impossible, if it is."""
        if self.error is not None:
            return self.error
        if self.status.versions < 2:
            return "there is no drafter before the served one"
        self._going.put(ROLL_BACK)
        return None

    def close(self) -> None:
        """Ends the process."""
        self._closing = True
        with contextlib.suppress(OSError):  # a thread waits for the connection, and would keep it open
            socket.socket(fileno=os.dup(self._connection.fileno())).shutdown(socket.SHUT_RDWR)
        self._process.join(END_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._connection.close()

    def _send(self) -> None:
        while True:
            message = self._going.get()
            try:
                send(self._connection, message)
            except (OSError, ValueError):
                return

    def _receive(self) -> None:
        try:
            while True:
                self._came.append(receive(self._connection))
        except Exception as error:  # its end, or a message that was cut off by it
            if not self._closing:
                self._process.join(END_S)
                self.error = f"the trainer has ended (exit code {self._process.exitcode}, {error!r})"
                log.error("%s; serving continues with drafter version %d", self.error, self._engine.drafter_version)


class _Link:
    """The trainer's side: an `Adapter` uses it as the engine."""

    def __init__(self, connection: Any, shared: Shared, dtype: torch.dtype, device: torch.device) -> None:
        self._connection, self._shared, self._dtype, self._device = connection, shared, dtype, device
        self.drafter_version = 0
        self.adapter: Adapter | None = None

    @property
    def break_even(self) -> float:
        return self._shared.break_even

    def start_capture(self, limit: int) -> "_Link":
        return self

    def take(self) -> list[Served]:
        """Returns what has arrived. Raises EOFError when the engine has closed."""
        found = []
        while self._connection.poll():
            message = receive(self._connection)
            if isinstance(message, Served):
                found.append(message)
                continue
            if isinstance(message, HeadWeights):
                found.clear()  # of the target before
                if self.adapter is not None:
                    self.adapter.use_target(message.to(self._device))
                continue
            if message == ROLL_BACK:
                if self.adapter is not None:
                    self.adapter.roll_back()
                continue
            self.drafter_version = message
            if self.adapter is not None:
                self.adapter.served.number = message
        return found

    def load_drafter(self, drafter: Drafter) -> None:
        send(self._connection, {name: tensor.to(self._dtype) for name, tensor in drafter.state_dict().items()})
        self.drafter_version = -1  # until the engine sends its number

    def stop_drafting(self) -> None:
        send(self._connection, STOP_DRAFTING)


def _main(connection: Any, shared: Shared) -> None:
    torch.set_num_threads(THREADS)  # the engine's thread launches steps of a millisecond, and must not wait for a core
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(THREADS))
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError, KeyboardInterrupt):  # the engine closed
        _train(receive(connection), connection, shared)


def _warm_up(trainer: OnlineTrainer) -> None:
    """Takes a step on an empty record and undoes it, and measures: kernels are compiled while the engine starts."""
    state = copy.deepcopy(trainer.state_dict())
    record = Record([1] * 64, torch.ones(63, trainer.drafter.config.feature_size), [(1, 64)])
    trainer.step([record])
    trainer.held_out([record, record])
    trainer.load_state_dict(state)


def interval(taken: float, share: float, cost: float = 1.0) -> float:
    """Returns the time from the begin of a piece of work to that of the next one, in which it costs `share`.

    A piece that takes longer than LONG_S counts as LONG_S: the first ones compile kernels, and paying for half a minute
    of that would stop the training for minutes.
    """
    return max(taken, min(taken, LONG_S) * cost / share)


def _train(work: Work, connection: Any, shared: Shared) -> None:
    if work.device.type == "cuda":
        os.nice(NICE)
    if work.device.index is not None and work.device.type == "cuda":
        torch.cuda.set_device(work.device)
    drafter = Drafter.of_tensors(work.shape, work.weights).to(work.device)
    trainer = OnlineTrainer(work.head.to(work.device), drafter, work.config)
    _warm_up(trainer)
    link = _Link(connection, shared, work.head.dtype, work.device)
    link.adapter = adapter = Adapter(link, trainer, **work.options)
    worked_s = passed_s = 0.0  # both decay, so that they are about those of the last minute
    ended = time.perf_counter()
    while True:
        began, shared.working = time.perf_counter(), True
        worked = adapter.work()
        if worked and work.device.type == "cuda":
            torch.cuda.synchronize(work.device)
        now, shared.working = time.perf_counter(), False
        taken, live, decay = now - began, adapter.served.live, math.exp((ended - now) / MINUTE_S)
        worked_s, passed_s, ended = decay * worked_s + taken * worked, decay * passed_s + now - ended, now
        status = Status(
            trainer.steps, len(adapter.buffer), adapter.buffer.nbytes, adapter.served.learnt_from,
            adapter.served.held_out, live.tau if live.requests else None, adapter.promotions, adapter.rollbacks,
            len(adapter.versions), worked_s / passed_s,
        )  # fmt: skip
        send(connection, status)
        ends = began + (interval(taken, work.share, shared.cost) if worked else IDLE_S)
        while (left := ends - time.perf_counter()) > 0 and (shared.busy or not worked):
            time.sleep(min(left, IDLE_S))
