"""Runs the Python bodies of Gluon kernels on a CPU, for the tests; Triton's interpreter does not support Gluon.

It models the sources of errors in asynchronous code:
- All programs of a grid and all partitions of `warp_specialize` are threads. One runs at a time; at every operation
  that another one could notice, a seeded generator chooses the next. If none can continue, that is a fault.
- An mbarrier has its phase, the arrivals still missing and the bytes still missing, as in the PTX manual; `expect` is
  `mbarrier.arrive.expect_tx`, as Triton compiles it. Waiting for a parity ends when the current phase has the other.
- A TMA load comes late and in any order, reads global memory when it comes, and fills with zeros what is outside of
  the tensor. Shared memory holds NaN before its first load, and again from the start of a load until it arrives.
- An asynchronous product reads its operands at any time between its issue and the wait for it; values that change in
  between count as NaN. Products are of bf16 or fp8, exact (in fp64), and added to fp32 block by block along K.
- An access outside of a tensor that no mask hides is a fault, and so is a load without a wait for it.

Not modelled: layouts, registers, when writes become visible (hence fences), barriers among the warps of a partition,
the overflow of scalars, programs that start before the previous launch has ended, speed. Inline assembly is ignored,
except that the barrier of the grid acts on its counter and the clock counts steps. Maxima propagate NaN, unlike
Triton's.
"""

import heapq
import itertools
import math
import random
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
import triton.language as tl
from torch import Tensor
from triton.experimental.gluon import language as gluon_language
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

MARK = "__interpreted__"  # among the globals of the functions that run here


class Fault(Exception):
    """An invalid operation of a kernel. For a deadlock it lists the waiting workers and their barriers."""


@dataclass(eq=False)
class Worker:
    """A program, or one of its partitions."""

    name: str
    program: tuple[int, ...]
    warps: int
    weight: float  # how often it runs, relative to the others
    ready: Callable[[], bool] | None = None  # None: it can run
    waits_for: object = "its turn"
    issued: list[Any] = field(default_factory=list)  # products that it may not have waited for
    wake: Any = field(default_factory=threading.Lock)
    thread: Any = None

    def __str__(self) -> str:
        frame = sys._current_frames().get(self.thread.ident)
        while frame is not None and MARK not in frame.f_globals:  # the line of the kernel
            frame = frame.f_back
        line = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}" if frame else "its end"
        return f"program {self.program}, {self.name}, at {line}, waits for {self.waits_for}"


class Turns:
    """Runs one thread at a time, with loads that finish between turns."""

    def __init__(self, seed: object) -> None:
        self.random = random.Random(str(seed))
        self.workers: list[Worker] = []  # workers that have not ended
        self.loads: list[tuple[float, Callable[[], None]]] = []  # under way, a heap
        self.promptness = self.random.choice((0.001, 0.03, 1.0))  # how often the first of them comes
        self.now: Worker
        self.error: BaseException | None = None
        self.ended = threading.Lock()
        self.steps = 0

    def start(self, name: str, program: tuple[int, ...], warps: int, body: Callable[[], object]) -> Worker:
        """Adds a thread, which waits for its first turn."""
        worker = Worker(name, program, warps, self.random.choice((0.001, 1.0, 1.0, 4.0)))
        worker.wake.acquire()
        worker.thread = threading.Thread(target=self._live, args=(worker, body), daemon=True)
        worker.thread.start()
        self.workers.append(worker)
        return worker

    def run(self) -> None:
        """Runs until all threads have ended; raises the first error."""
        self.ended.acquire()
        self._next().wake.release()
        self.ended.acquire()
        if self.error is not None:
            raise self.error
        if self.loads:
            raise Fault(f"{len(self.loads)} loads were under way when all programs had ended")

    def pause(self, ready: Callable[[], bool] | None = None, waits_for: object = "its turn") -> None:
        """Lets other threads run and waits until `ready`."""
        me = self.now
        me.ready, me.waits_for = ready, waits_for
        chosen = self._next()
        if chosen is not me:
            chosen.wake.release()
            me.wake.acquire()
            self.now = me
        if self.error is not None:
            raise SystemExit  # ends this thread
        me.ready = None

    def later(self, load: Callable[[], None]) -> None:
        """A pending load; later ones may finish before it."""
        heapq.heappush(self.loads, (self.steps + self.random.random() * self.random.choice((1, 10, 100, 1000)), load))

    def _next(self) -> Worker:
        while self.error is None:
            self.steps += 1
            able = [worker for worker in self.workers if worker.ready is None or worker.ready()]
            weights = [self.promptness if self.loads else 0.0, *(worker.weight for worker in able)]
            if not any(weights):
                self.error = Fault("\n".join(["deadlock:", *map(str, self.workers)]))
            elif chosen := self.random.choices([None, *able], weights)[0]:
                return chosen
            else:
                heapq.heappop(self.loads)[1]()
        return self.workers[0]  # all end, one after the other

    def _live(self, worker: Worker, body: Callable[[], object]) -> None:
        worker.wake.acquire()
        self.now = worker
        try:
            if self.error is None:
                body()
        except BaseException as error:
            self.error = self.error or error
        self.workers.remove(worker)
        (self._next().wake if self.workers else self.ended).release()


class Block(Tensor):
    """A block of values, or a scalar; like Gluon's it has `.type.layout`, here always None."""

    type = SimpleNamespace(layout=None)  # type: ignore[assignment]


@dataclass(frozen=True)
class Pointer:
    """Elements of a tensor, by their offsets from its first one."""

    memory: Tensor  # flat: all from the tensor's first element to its last
    offsets: Any  # an int or an integer tensor

    def __add__(self, offsets: Any) -> "Pointer":
        return Pointer(self.memory, self.offsets + offsets)

    @property
    def dtype(self) -> SimpleNamespace:
        return SimpleNamespace(element_ty=self.memory.dtype)

    def lanes(self, mask: Any) -> tuple[Tensor, Tensor]:
        """The offsets, int64, and where the mask lets them count; those have to be inside."""
        offsets, wanted = torch.broadcast_tensors(_tensor(self.offsets).long(), _tensor(True if mask is None else mask))
        outside = wanted & ((offsets < 0) | (offsets >= len(self.memory)))
        if bool(outside.any()):
            raise Fault(f"offset {int(offsets[outside][0])} of a tensor of {len(self.memory)} elements")
        return offsets, wanted


@dataclass
class Barrier:
    """An mbarrier."""

    count: int = 0  # arrivals of a phase; 0 before `init`
    phase: int = 0
    missing: int = 0  # arrivals of the current phase
    bytes: int = 0  # expected in the current phase and not yet come

    def init(self, count: int) -> None:
        self.count = self.missing = count

    def turn(self) -> None:
        if self.missing == 0 and self.bytes == 0:
            self.phase, self.missing = self.phase + 1, self.count


@dataclass(frozen=True)
class Shared:
    """A piece of shared memory, or barriers in it."""

    data: Any

    def index(self, i: int) -> Any:
        if not 0 <= i < len(self.data):
            raise Fault(f"slot {i} of {len(self.data)}")
        return self.data[i] if isinstance(self.data, list) else Shared(self.data[i])

    def permute(self, order: Sequence[int]) -> "Shared":
        return Shared(self.data.permute(*order))

    def load(self, _layout: object) -> Tensor:
        return self.data.clone().as_subclass(Block)

    def store(self, values: Tensor) -> None:
        self.data.copy_(values)


class Product:
    """An asynchronous product on its way; its value cannot be used before the wait, except by another product."""

    dtype = torch.float32

    def __init__(self, a: Tensor | Shared, b: Shared, acc: "Tensor | Product") -> None:
        self.operands = [x.data if isinstance(x, Shared) else _tensor(x) for x in (a, b)]
        self.acc = acc if isinstance(acc, Product) else _tensor(acc)
        self.at_issue = [operand.double() for operand in self.operands]
        assert len({x.dtype for x in self.operands} | {torch.float32}) == 2 and acc.dtype == torch.float32

    def value(self) -> Tensor:
        pairs = zip(self.at_issue, self.operands, strict=True)
        a, b = (torch.where(x == y.double(), x, math.nan) for x, y in pairs)
        acc = _tensor(self.acc.value()) if isinstance(self.acc, Product) else self.acc
        return (acc.double() + a @ b).float().as_subclass(Block)


def _tensor(value: Any) -> Tensor:
    """Returns a plain Tensor, which is faster than a subclass."""
    return torch.as_tensor(value).as_subclass(Tensor)


def _poisoned(values: Tensor) -> Tensor:
    """Fills with NaN, which in bits of fp8 is 127."""
    return values.fill_(127 if values.dtype == torch.uint8 else math.nan)


def allocate_shared_memory(dtype: torch.dtype, shape: list[int], _layout: object) -> Any:
    if dtype != torch.int64:
        return Shared(_poisoned(torch.empty(shape, dtype=dtype)))
    barriers = [Barrier() for _ in range(shape[0])]
    return Shared(barriers) if len(shape) == 2 else barriers[0]


GL: dict[str, Any] = {  # values that do not depend on the worker
    **{name: getattr(torch, name) for name in ("float32", "bfloat16", "int32", "int64", "uint8")},
    **dict.fromkeys(("BlockedLayout", "SliceLayout", "NVMMADistributedLayout", "DotOperandLayout"), lambda *_: None),
    "NVMMASharedLayout": SimpleNamespace(get_default_for=lambda *_: None),
    "arange": lambda first, stop, _layout: torch.arange(first, stop, dtype=torch.int32).as_subclass(Block),
    "full": lambda shape, value, dtype, _layout: torch.full(shape, value, dtype=dtype).as_subclass(Block),
    "zeros": lambda shape, dtype, _layout: torch.zeros(shape, dtype=dtype).as_subclass(Block),
    "convert_layout": lambda x, _layout: x, "to_tensor": lambda x: x, "static_range": range, "reshape": torch.reshape,
    "float8e4nv": torch.float8_e4m3fn, "permute": torch.permute, "split": lambda x: (x[..., 0], x[..., 1]),
    "where": lambda condition, a, b: torch.where(torch.as_tensor(condition), a, b),
    "maximum": lambda a, b: torch.maximum(torch.as_tensor(a), torch.as_tensor(b)),
    "minimum": lambda a, b: torch.minimum(torch.as_tensor(a), torch.as_tensor(b)),
    "fma": lambda a, b, c: (a.double() * b + c.double()).float(),
    "max": torch.amax, "min": torch.amin, "sum": torch.sum,
    "exp": torch.exp, "exp2": torch.exp2, "rsqrt": torch.rsqrt, "abs": torch.abs, "div_rn": torch.div,
}  # fmt: skip


class Machine:
    """The values of a kernel's names during a launch."""

    def __init__(self, grid: tuple[int, ...], turns: Turns) -> None:
        self.turns, self.pause = turns, turns.pause
        self.modules: dict[int, dict[str, Any]] = {}  # the interpreted globals of every module
        self.meaning: dict[int, Any] = {
            id(gluon_language): SimpleNamespace(
                **GL, load=self.load, store=self.store, allocate_shared_memory=allocate_shared_memory,
                program_id=lambda axis: torch.tensor(turns.now.program[axis], dtype=torch.int32),
                num_programs=lambda axis: grid[axis], num_warps=lambda: turns.now.warps,
                warp_specialize=self.warp_specialize, inline_asm_elementwise=self.inline_assembly,
            ),
            id(hopper.mbarrier): SimpleNamespace(
                MBarrierLayout=lambda: None, init=Barrier.init, arrive=self.arrive, wait=self.wait,
                expect=lambda barrier, size, pred=True: self.arrive(barrier, size=size, pred=pred),
            ),
            id(hopper.tma): SimpleNamespace(async_copy_global_to_shared=self.copy),
            id(hopper.warpgroup_mma): self.multiply,
            id(hopper.warpgroup_mma_wait): self.multiplied,
            id(hopper.fence_async_shared): lambda: None,
            id(tl.debug_barrier): self.pause,
        }  # fmt: skip

    def interpreted(self, function: FunctionType) -> FunctionType:
        """The same code with other globals."""
        names = function.__globals__
        if id(names) not in self.modules:
            self.modules[id(names)] = {MARK: True}
            self.modules[id(names)].update({name: self._meaning(value) for name, value in names.items()})
        return FunctionType(function.__code__, self.modules[id(names)], function.__name__)

    def _meaning(self, value: Any) -> Any:
        if id(value) in self.meaning:
            return self.meaning[id(value)]
        if isinstance(value, tl.constexpr):
            return value.value
        inner = getattr(value, "fn", None)  # for a @gluon.jit or @gluon.constexpr_function
        return self.interpreted(inner) if isinstance(inner, FunctionType) else value

    def load(self, pointer: Pointer, mask: Any = None, other: float = math.nan) -> Tensor:
        self.pause()
        offsets, wanted = pointer.lanes(mask)
        found = pointer.memory[torch.where(wanted, offsets, 0)]
        found = found if mask is None else torch.where(wanted, found, other).to(found.dtype)
        return found.as_subclass(Block)

    def store(self, pointer: Pointer, values: Any, mask: Any = None) -> None:
        self.pause()
        offsets, wanted = pointer.lanes(mask)
        values = _tensor(values).to(pointer.memory.dtype).expand(offsets.shape)
        pointer.memory[offsets[wanted]] = values[wanted]

    def warp_specialize(self, partitions: list[Any], warps: list[int], _registers: list[int]) -> None:
        (default, default_args), *others = partitions
        me, workers = self.turns.now, self.turns.workers
        started = [
            self.turns.start(body.__name__, me.program, count, partial(body, *args))
            for (body, args), count in zip(others, warps, strict=True)
        ]
        me.name = default.__name__
        default(*default_args)
        self.pause(lambda: not any(worker in workers for worker in started), "its other partitions")

    def inline_assembly(self, code: str, _constraints: str, args: list[Any], **_kwargs: object) -> Any:
        if "red.release.gpu.global.add" in code:  # `join`
            counter, programs, threads = args
            memory, at = counter.memory.numpy(), counter.offsets
            assert threads == 32 * self.turns.now.warps, "all warps of the partition take part"
            self.pause()
            memory[at] += 1
            self.pause(lambda: memory[at] >= programs, f"{programs} programs at counter {at} of the grid")
        elif "lop3" in code:  # `in_bf16`
            bits, scales = args
            half = (bits.to(torch.int16) & 0x7F) << 4 | (bits.to(torch.int8).to(torch.int16) & -0x8000)
            return torch.where(bits == 127, math.nan, half.view(torch.bfloat16) * 2.0**120 * scales)
        elif not any(known in code for known in ("fence.proxy.async", "globaltimer", "griddepcontrol", "prefetch")):
            raise NotImplementedError(code)
        return self.turns.steps

    def arrive(self, barrier: Barrier, *, count: int = 1, size: int = 0, pred: bool = True) -> None:
        self.pause()
        if pred:
            if barrier.missing < count:
                raise Fault(f"an arrival too many at {barrier}")
            barrier.bytes += size
            barrier.missing -= count
            barrier.turn()

    def wait(self, barrier: Barrier, parity: int) -> None:
        if barrier.count == 0 or parity not in (0, 1):
            raise Fault(f"a wait for parity {parity} of {barrier}")
        self.pause(lambda: barrier.phase % 2 != parity, barrier)

    def copy(self, source: Any, at: list[int], barrier: Barrier, target: Shared, pred: bool = True) -> None:
        self.pause()
        if pred:
            if list(target.data.shape) != source.block_shape or min(at) < 0:
                raise Fault(f"a box {source.block_shape} from {at} into {list(target.data.shape)}")
            _poisoned(target.data)
            self.turns.later(partial(self._bring, source.base, [int(i) for i in at], barrier, target.data))

    def _bring(self, source: Tensor, at: list[int], barrier: Barrier, target: Tensor) -> None:
        part = source[at[0] : at[0] + target.shape[0], at[1] : at[1] + target.shape[1]]
        target.zero_()[: part.shape[0], : part.shape[1]] = part
        barrier.bytes -= target.numel() * target.element_size()
        barrier.turn()

    def multiply(self, a: Any, b: Shared, acc: Tensor, *, use_acc: bool = True, is_async: bool = False) -> Any:
        self.pause()
        product = Product(a, b, acc if use_acc else torch.zeros_like(acc))
        self.turns.now.issued.append(product)
        return product if is_async else product.value()

    def multiplied(self, outstanding: int, products: list[Product]) -> Any:
        self.pause()
        issued = self.turns.now.issued
        del issued[: len(issued) - outstanding]
        if any(product in issued for product in products):
            raise Fault("a product used before the wait for it")
        first, *others = (product.value() for product in products)
        return (first, *others) if others else first


class Interpreted:
    """Replaces a kernel: `kernel[grid](...)` runs it here, all programs `together` or one after the other.

    `seed` may change between launches; with the same one, the same launches go the same way.
    """

    def __init__(self, kernel: Any, *, seed: int = 0, together: bool = True) -> None:
        self.fn, self.seed, self.together = kernel.fn, seed, together
        self.launches: list[dict[str, Any]] = []  # the keyword arguments of each

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return partial(self._launch, grid)

    def _launch(
        self, grid: tuple[int, ...], *args: Any, num_warps: int, launch_pdl: bool = False, **named: Any
    ) -> None:
        self.launches.append(named)
        given = [_argument(value) for value in args]
        programs = list(itertools.product(*map(range, grid)))
        for some in [programs] if self.together else [[program] for program in programs]:
            turns = Turns((self.seed, len(self.launches), some[0]))
            body = Machine(grid, turns).interpreted(self.fn)
            for program in some:
                turns.start(body.__name__, program, num_warps, partial(body, *given, **named))
            turns.run()


def _argument(value: Any) -> Any:
    """Pointers to tensors, descriptors that know a dtype, and floats as a kernel receives them."""
    if isinstance(value, TensorDescriptor):
        return SimpleNamespace(**vars(value), dtype=value.base.dtype)
    if isinstance(value, Tensor):
        extent = 1 + sum((n - 1) * stride for n, stride in zip(value.shape, value.stride(), strict=True))
        return Pointer(value.as_strided((extent,), (1,)), 0)
    return torch.tensor(value, dtype=torch.float32).item() if isinstance(value, float) else value
