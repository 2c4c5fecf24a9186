"""One process or many behind one seam: who this process is, what it and the others agree on, how gradients meet.

Of a target that is too large for a GPU each of some neighbouring processes, `peers`, holds a slice. What they compute
of it they compute together: the same rows in the same order, whoever asked for them.

A launcher (torchrun, deepspeed) starts the processes and tells each its place in the environment; without one there is
a single process, and every method here is a no-op. `Replicated` is the plain and the data-parallel learner; the sharded
ones are in `fsdp.py` and `zero.py`.
"""

import contextlib
import copy
import datetime
import gc
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # its defaults hold the group that there is when it is first imported: none
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from dflash_toolkit.config import UserError
from dflash_toolkit.models.dflash.network import Drafter
from dflash_toolkit.models.target import resolve_device

from ..config import TrainConfig
from ..features.memory import OutOfMemory
from ..objective.loss import Forward, runner
from ..optim.optimizers import make_optimizer, update_average
from ..run.state import ResumePoint

PATIENCE = datetime.timedelta(days=7)  # for the first process, which answers, decodes and saves while others wait
LETTING_GO_S = 0.05  # for threads that have nothing left to do but that
T = TypeVar("T")


@dataclass(slots=True)
class Processes:
    """This process among `world` equal ones; rank 0 writes, exports and talks to the user."""

    rank: int = 0
    world: int = 1
    device: str = "auto"  # this process's own, as `Target.load` takes it
    mesh: DeviceMesh | None = None  # of peers: what the target is sharded over
    _control: Any = None  # a group with patience, over CPU tensors
    _peers: "Processes | None" = None

    @classmethod
    @contextlib.contextmanager
    def started(cls, device: str, group: bool = False, share: int = 1) -> Iterator["Processes"]:
        """Join the processes that a launcher started, for the length of a `with`.

        Args:
            device: the option `device`.
            group: make a process group for a single process too; what shards wants one.
            share: processes of a machine that hold one target together, the option `run.target_tensor_parallel_size`.

        Raises:
            UserError: no such device, fewer GPUs than processes, an environment that no launcher made, or processes
                that `share` does not divide.
        """
        world = _number("WORLD_SIZE", "1")
        here = _on_this_machine(world)
        if here % share:
            raise UserError(
                f"run.target_tensor_parallel_size={share} shares a target among {share} processes of a machine, and "
                f"{here} of them cannot be shared out: start torchrun --nproc-per-node {share}, or a multiple of it"
            )
        if world == 1 and not group:
            resolve_device(device)
            yield cls(device=device)
            return
        rank, own = _place(device, world)
        if world > 1 and not os.environ.get("MASTER_ADDR"):
            raise UserError(f"WORLD_SIZE is {world}, but MASTER_ADDR is not set: start with torchrun")
        if own.startswith("cuda"):
            torch.cuda.set_device(torch.device(own))
        backend = "cpu:gloo,cuda:nccl" if own.startswith("cuda") else "gloo"
        if world == 1:
            os.environ.setdefault("LOCAL_RANK", "0")  # which DeepSpeed asks for
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        else:
            dist.init_process_group(backend)
        processes = cls(rank, world, own, _control=dist.new_group(backend="gloo", timeout=PATIENCE))
        if share > 1:
            processes._meet_peers(share)
        try:
            yield processes
        except OutOfMemory as error:
            if world == 1:
                raise
            # of this process alone: the others wait for it, and only the launcher can end them
            print(f"error: process {rank}: {error}", file=sys.stderr, flush=True)
            os._exit(2)
        except (UserError, SystemExit):  # of all processes; after another error of this one the others are not there
            processes._leave()
            raise
        processes._leave()

    def _meet_peers(self, share: int) -> None:
        groups = [list(range(first, first + share)) for first in range(0, self.world, share)]
        control = [dist.new_group(ranks, backend="gloo", timeout=PATIENCE) for ranks in groups][self.rank // share]
        kind = torch.device(self.device).type
        mesh = init_device_mesh(kind, (len(groups), share), mesh_dim_names=("groups", "peers"))["peers"]
        self._peers = Processes(self.rank % share, share, self.device, mesh, control)

    def _leave(self) -> None:
        """End the groups and their threads: one that lets go of a tensor while Python ends aborts the process."""
        self._control = self._peers = None
        dist.destroy_process_group()
        gc.collect()  # of what holds a group, the cycles
        time.sleep(LETTING_GO_S)  # DeepSpeed keeps its groups to the end

    @property
    def main(self) -> bool:
        return self.rank == 0

    @property
    def peers(self) -> "Processes":
        """The processes that hold one target together with this one: itself alone where it holds a whole one."""
        return self._peers or Processes(device=self.device)

    @property
    def group(self) -> tuple[int, int]:
        """Which of how many groups of peers this process is of."""
        return self.rank // self.peers.world, self.world // self.peers.world

    @property
    def here(self) -> int:
        """How many of the processes run on this machine."""
        return _on_this_machine(self.world) if self.world > 1 else 1

    def mistake(self, message: str) -> UserError | SystemExit:
        """What to raise for a mistake that every process has found: the first one tells it, and of peers, who are some
        of more processes, each."""
        return UserError(message) if self.main or self.mesh else SystemExit(2)

    def sum(self, values: Tensor) -> Tensor:
        """`values` summed over all processes, in place."""
        if self.world > 1:
            dist.all_reduce(values)
        return values

    def broadcast(self, value: T) -> T:
        """The first process's `value`, for what clocks or files may say differently elsewhere."""
        return self.all_gather(value)[0]

    def all_gather(self, value: T) -> list[T]:
        """Everyone's `value`, by rank; returns when all are here."""
        if self.world == 1:
            return [value]
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value, group=self._control)
        return values

    def barrier(self, work: Callable[..., T], *args: Any) -> T:
        """`work(*args)` once every process has done its own; the mistake of any ends all of them.

        Raises:
            UserError: on the first process, whoever made the mistake; the others exit with code 2.
        """
        result: T | None = None
        mistake = None
        try:
            result = work(*args)
        except UserError as error:
            if self.world == 1:
                raise
            mistake = str(error)
        if found := [message for message in self.all_gather(mistake) if message is not None]:
            raise self.mistake(found[0])
        return result  # type: ignore[return-value]

    def rank_zero(self, work: Callable[..., T], *args: Any) -> T | None:
        """`work(*args)` by the first process alone while the others wait, to get None; its mistake ends all of them."""
        return self.barrier(work, *args) if self.main else self.barrier(lambda: None)

    def first_group(self, work: Callable[..., T], *args: Any) -> T | None:
        """As `rank_zero`, by the first process and its peers together: for what takes the target."""
        return self.barrier(work, *args) if self.group[0] == 0 else self.barrier(lambda: None)


def _number(name: str, otherwise: str) -> int:
    """A number that a launcher left in the environment."""
    try:
        return int(os.environ.get(name, otherwise))
    except ValueError as error:
        world = os.environ.get("WORLD_SIZE", "")
        raise UserError(f"WORLD_SIZE is {world!r}, but {name} is no number: start with torchrun") from error


def _place(option: str, world: int) -> tuple[int, str]:
    """Rank and device of this process."""
    rank, local = (_number(name, "0" if world == 1 else "") for name in ("RANK", "LOCAL_RANK"))
    device = resolve_device(option)
    if device.type != "cuda":
        return rank, str(device)
    if device.index is not None and world > 1:
        raise UserError(f"device is {option}, but {world} processes take a GPU each: leave it at --device cuda")
    here = _on_this_machine(local + 1)
    if here > torch.cuda.device_count():
        raise UserError(f"{here} processes on this machine, but {torch.cuda.device_count()} GPUs: start one per GPU")
    return rank, f"cuda:{device.index or local}"


def _on_this_machine(otherwise: int) -> int:
    """How many processes a launcher started on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or otherwise)


class Replicated:
    """The whole drafter on every process. Gradients are summed over processes while the backward still runs.

    Args:
        state: the resume point to continue from.
    """

    def __init__(self, drafter: Drafter, config: TrainConfig, processes: Processes, state: ResumePoint | None) -> None:
        self.drafter = drafter
        self.run: Forward = runner(config, drafter.device)
        self._clip = config.optim.clip
        self._optimizer = make_optimizer(drafter.named_parameters(), config.optim, processes.rank, processes.world)
        self.peak = self._optimizer.param_groups[0]["lr"]  # learning rate
        self._steps = state.step if state else 0
        self._decay, self._average = config.optim.ema, copy.deepcopy(drafter) if config.optim.ema else None
        if state:
            drafter.load_state_dict(state.drafter)
            try:
                self._optimizer.load_state_dict(state.optimizer)
            except (KeyError, ValueError) as error:
                raise other_optimizer() from error
            if self._average and state.average:
                self._average.load_state_dict(state.average)
        self._parameters = list(drafter.parameters())
        self._sums = _GradientSums(self._parameters, processes) if processes.world > 1 else None

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self._optimizer.param_groups

    def backward(self, weighted_sum: Tensor, last: bool) -> None:
        """Add the gradients of a micro step; `last` is the step's last one."""
        if self._sums and last:
            self._sums.begin()
        weighted_sum.backward()
        if self._sums and last:
            self._sums.end()

    def step(self, weight_sum: Tensor) -> Tensor:
        """Step on the gradients of all processes' sums divided by `weight_sum`; returns their norm before clipping."""
        if self._sums:
            self._sums.wait()
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        norm = nn.utils.get_total_norm(gradients) / weight_sum
        factor = (self._clip / (norm + 1e-6)).clamp(max=1.0) / weight_sum
        for gradient in gradients:
            gradient.mul_(factor)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._steps += 1
        if self._average:
            update_average(self._average, self.drafter, self._decay, self._steps)
        return norm

    def snapshot(self) -> tuple[dict[str, Tensor], dict[str, Any], dict[str, Tensor] | None]:
        """Weights, optimiser state and averaged weights, whole. Every process must call it, the first has them.

        What is on a GPU, or of a run on a CPU, is what the next step changes; what was gathered is in host memory.
        """
        average = self._average.state_dict() if self._average else None
        return self.drafter.state_dict(), self._optimizer.state_dict(), average

    def whole(self) -> Drafter:
        """The drafter as one process can run or export it; every process must call it, the first has the result."""
        return self._average or self.drafter


def other_optimizer() -> UserError:
    return UserError("the resume point holds another optimiser's state; give the same optim.optimizer as before")


class _GradientSums:
    """All-reduces each gradient as soon as it is final, in one order on all processes.

    torch's DistributedDataParallel would wrap the drafter's forward, which is only a part of the step, and cuts a
    compiled graph into pieces where FlexAttention cannot be cut. The drafter's matrices are large, so they need no
    buckets. The order is the one in which the first process saw gradients become final.
    """

    def __init__(self, parameters: list[nn.Parameter], processes: Processes) -> None:
        self._parameters, self._processes = parameters, processes
        self._order = list(range(len(parameters)))
        self._learned = self._active = False
        self._final: list[int] = []  # in the order they came
        self._works: list[Any] = []
        for i, parameter in enumerate(parameters):
            dist.broadcast(parameter.data, 0)
            parameter.register_post_accumulate_grad_hook(lambda _, i=i: self._hook(i))

    def begin(self) -> None:
        self._active, self._final, self._works = True, [], []

    def _hook(self, i: int) -> None:
        if not self._active:
            return
        self._final.append(i)
        final = set(self._final) if self._learned else ()
        while len(self._works) < len(self._order) and self._order[len(self._works)] in final:
            self._reduce()

    def _reduce(self) -> None:
        parameter = self._parameters[self._order[len(self._works)]]
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        self._works.append(dist.all_reduce(parameter.grad, async_op=True))

    def end(self) -> None:
        """All are on their way."""
        self._active = False
        while len(self._works) < len(self._order):
            self._reduce()

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        self._works = []
        if not self._learned:
            seen = self._processes.broadcast(self._final)
            self._order = [*seen, *(i for i in self._order if i not in seen)]
            self._learned = True
