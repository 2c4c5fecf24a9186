"""One interface for one process or many: rank, agreement between processes, and the sum of gradients.

If a target is too large for one GPU, each of a few consecutive processes (`peers`) holds a shard of it. Peers call the
target together, with the same rows in the same order.

A launcher (torchrun, deepspeed) starts the processes and sets their ranks in the environment. Without a launcher there
is a single process, and every method here is a no-op. `Replicated` is the plain and the data-parallel learner; the
sharded ones are in `fsdp.py` and `zero.py`.
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
import torch.distributed.nn.functional  # its defaults keep the process group of its first import: none
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from dflash_toolkit.config import UserError
from dflash_toolkit.models.device import resolve_device
from dflash_toolkit.models.dflash.network import Drafter

from ..config import TrainConfig
from ..features.gpu_memory import OutOfMemory
from ..objective.loss import Forward, runner
from ..optim.optimizers import make_optimizer, update_average
from ..run.resume_point import ResumePoint

PATIENCE = datetime.timedelta(days=7)  # others wait while the first process writes responses, decodes and saves
LETTING_GO_S = 0.05  # for threads to release their last tensors
T = TypeVar("T")


@dataclass(slots=True)
class Processes:
    """This process among `world` equal ones; rank 0 writes files, exports and prints."""

    rank: int = 0
    world: int = 1
    device: str = "auto"  # this process's device, as `Target.load` accepts it
    mesh: DeviceMesh | None = None  # over which the peers shard the target
    _control: Any = None  # a group over CPU tensors with a long timeout
    _peers: "Processes | None" = None

    @classmethod
    @contextlib.contextmanager
    def started(cls, device: str, group: bool = False, share: int = 1) -> Iterator["Processes"]:
        """Joins the processes of a launcher for the duration of a `with`.

        Args:
            device: the option `device`.
            group: make a process group for a single process too, for sharding.
            share: processes of a machine that share one target, the option `run.target_tensor_parallel_size`.

        Raises:
            UserError: no such device, fewer GPUs than processes, an environment without a launcher, or a number of
                processes that is not a multiple of `share`.
        """
        world = _number("WORLD_SIZE", "1")
        here = _on_this_machine(world)
        if here % share:
            raise UserError(
                f"run.target_tensor_parallel_size is {share}, but {here} processes run on this machine; start torchrun "
                f"--nproc-per-node {share}, or a multiple of it"
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
            os.environ.setdefault("LOCAL_RANK", "0")  # DeepSpeed reads it
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
            # only this process failed: the others wait for it, and only the launcher can end them
            print(f"error: process {rank}: {error}", file=sys.stderr, flush=True)
            os._exit(2)
        except (UserError, SystemExit):  # all processes raise these; after another error the others are gone
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
        """Ends the groups and their threads: a thread that frees a tensor during Python's exit aborts the process."""
        self._control = self._peers = None
        dist.destroy_process_group()
        gc.collect()  # cycles that hold a group
        time.sleep(LETTING_GO_S)  # DeepSpeed keeps its groups until the process ends

    @property
    def main(self) -> bool:
        return self.rank == 0

    @property
    def peers(self) -> "Processes":
        """The processes that share a target with this one; this process alone if it holds a whole target."""
        return self._peers or Processes(device=self.device)

    @property
    def group(self) -> tuple[int, int]:
        """Index of this process's group of peers, and the number of groups."""
        return self.rank // self.peers.world, self.world // self.peers.world

    @property
    def here(self) -> int:
        """Number of processes on this machine."""
        return _on_this_machine(self.world) if self.world > 1 else 1

    def mistake(self, message: str) -> UserError | SystemExit:
        """Returns the exception for an error that every process has found: one process prints it, of peers each."""
        return UserError(message) if self.main or self.mesh else SystemExit(2)

    def sum(self, values: Tensor) -> Tensor:
        """Sums `values` over all processes, in place."""
        if self.world > 1:
            dist.all_reduce(values)
        return values

    def broadcast(self, value: T) -> T:
        """Returns the first process's `value`, where clocks or files may differ between processes."""
        return self.all_gather(value)[0]

    def all_gather(self, value: T) -> list[T]:
        """Returns the `value` of every process, by rank, once all have called it."""
        if self.world == 1:
            return [value]
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value, group=self._control)
        return values

    def barrier(self, work: Callable[..., T], *args: Any) -> T:
        """Returns `work(*args)` after every process has done its own; an error in any process ends all.

        Raises:
            UserError: on the first process, for an error in any; the others exit with code 2.
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
        """Runs `work(*args)` on the first process alone; the others wait and get None. Its error ends all processes."""
        return self.barrier(work, *args) if self.main else self.barrier(lambda: None)

    def first_group(self, work: Callable[..., T], *args: Any) -> T | None:
        """Like `rank_zero`, on the first process and its peers together, for work that calls the target."""
        return self.barrier(work, *args) if self.group[0] == 0 else self.barrier(lambda: None)


def _number(name: str, otherwise: str) -> int:
    """Returns a number that the launcher left in the environment."""
    try:
        return int(os.environ.get(name, otherwise))
    except ValueError as error:
        world = os.environ.get("WORLD_SIZE", "")
        raise UserError(f"WORLD_SIZE is {world!r}, but {name} is not a number; start with torchrun") from error


def _place(option: str, world: int) -> tuple[int, str]:
    """Returns rank and device of this process."""
    rank, local = (_number(name, "0" if world == 1 else "") for name in ("RANK", "LOCAL_RANK"))
    device = resolve_device(option)
    if device.type != "cuda":
        return rank, str(device)
    if device.index is not None and world > 1:
        raise UserError(f"device is {option}, but each of {world} processes needs its own GPU; give --device cuda")
    here = _on_this_machine(local + 1)
    if here > torch.cuda.device_count():
        raise UserError(f"{here} processes run here, but there are {torch.cuda.device_count()} GPUs; start one per GPU")
    return rank, f"cuda:{device.index or local}"


def _on_this_machine(otherwise: int) -> int:
    """Returns the number of processes that the launcher started on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or otherwise)


class Replicated:
    """The whole drafter on every process. Gradients are summed over processes during the backward pass.

    Args:
        state: the resume point to continue from.
    """

    def __init__(self, drafter: Drafter, config: TrainConfig, processes: Processes, state: ResumePoint | None) -> None:
        self.drafter = drafter
        self.run: Forward = runner(config, drafter.device)
        self._clip = config.optim.clip
        self._optimizer = make_optimizer(drafter.named_parameters(), config.optim, processes.rank, processes.world)
        self.peak = self._optimizer.param_groups[0]["lr"]  # learning rate
        self._steps = 0
        self._decay, self._average = config.optim.ema, copy.deepcopy(drafter) if config.optim.ema else None
        if state:
            self.restore(state.drafter, state.optimizer, state.average, state.step)
        self._parameters = list(drafter.parameters())
        self._sums = _GradientSums(self._parameters, processes) if processes.world > 1 else None

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self._optimizer.param_groups

    def backward(self, weighted_sum: Tensor, last: bool) -> None:
        """Adds the gradients of a micro step; `last` marks the step's last one."""
        if self._sums and last:
            self._sums.begin()
        weighted_sum.backward()
        if self._sums and last:
            self._sums.end()

    def step(self, weight_sum: Tensor) -> Tensor:
        """Steps with the gradients of all processes, divided by `weight_sum`; returns their norm before clipping."""
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
        """Returns weights, optimiser state and averaged weights, whole, on the first process; all must call it.

        The next step changes tensors on a GPU, or on the CPU of a CPU run; gathered tensors are copies in host memory.
        """
        average = self._average.state_dict() if self._average else None
        return self.drafter.state_dict(), self._optimizer.state_dict(), average

    def restore(
        self, weights: dict[str, Tensor], optimizer: dict[str, Any], average: dict[str, Tensor] | None, steps: int
    ) -> None:
        """Continues from a `snapshot` after `steps` steps. Raises UserError for the state of another optimiser."""
        self.drafter.load_state_dict(weights)
        try:
            self._optimizer.load_state_dict(optimizer)
        except (KeyError, ValueError) as error:
            raise other_optimizer() from error
        if self._average and average:
            self._average.load_state_dict(average)
        self._steps = steps

    def whole(self) -> Drafter:
        """Returns the whole drafter, to run or export, on the first process; every process must call it."""
        return self._average or self.drafter


def other_optimizer() -> UserError:
    return UserError("the resume point has the state of another optimiser; give the same optim.optimizer as before")


class _GradientSums:
    """All-reduces each gradient as soon as it is final, in one order on all processes.

    torch's DistributedDataParallel would wrap the drafter's forward, which is only a part of the step, and splits a
    compiled graph where FlexAttention cannot be split. The drafter's matrices are large, so they need no buckets. The
    order is the one in which the first process saw gradients become final.
    """

    def __init__(self, parameters: list[nn.Parameter], processes: Processes) -> None:
        self._parameters, self._processes = parameters, processes
        self._order = list(range(len(parameters)))
        self._learned = self._active = False
        self._final: list[int] = []  # in order of arrival
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
        """Starts the remaining reductions."""
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
