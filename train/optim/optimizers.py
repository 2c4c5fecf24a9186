"""AdamW, or Muon for the matrices with AdamW for the rest, in one interface; Muon over whole matrices or shards."""

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..config import TrainConfig
from ..training_options import OptimOptions


class Optimizers:
    """Several optimisers over disjoint parameters that step and save as one."""

    def __init__(self, *parts: torch.optim.Optimizer) -> None:
        self.parts = parts

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return list(itertools.chain.from_iterable(part.param_groups for part in self.parts))

    def step(self) -> None:
        for part in self.parts:
            part.step()

    def zero_grad(self) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none=True)

    def state_dict(self) -> dict[str, Any]:
        return {str(i): part.state_dict() for i, part in enumerate(self.parts)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for i, part in enumerate(self.parts):
            part.load_state_dict(state[str(i)])


class SharedMuon(torch.optim.Muon):
    """Muon over processes with equal weights and gradients: each steps its own matrices and broadcasts them.

    Muon's products are most of its cost and do not shrink with the batch, so every process would repeat them `world`
    times. A matrix's momentum is on the process that steps it. The state has the form of torch's Muon.
    """

    def __init__(self, matrices: list[nn.Parameter], rate: float, decay: float, rank: int, world: int) -> None:
        super().__init__(matrices, rate, decay, adjust_lr_fn="match_rms_adamw")
        self._rank = rank
        self._rounds = deal([products(*p.shape) for p in matrices], world)

    @property
    def _matrices(self) -> list[nn.Parameter]:
        return self.param_groups[0]["params"]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Steps; a matrix is sent while the next one is computed."""
        gradients = [p.grad for p in self._matrices]
        for p in self._matrices:
            p.grad = None  # matrices without gradient are skipped
        sent = []
        for owners in self._rounds:
            if (mine := owners.get(self._rank)) is not None:
                self._matrices[mine].grad = gradients[mine]
                super().step()
                self._matrices[mine].grad = None
            sent += [dist.broadcast(self._matrices[i], rank, async_op=True) for rank, i in owners.items()]
        for work in sent:
            work.wait()

    def state_dict(self) -> dict[str, Any]:
        """Returns the whole state, with momentum in host memory, on the first process; all must call it."""
        whole = super().state_dict()
        whole["state"] = {}
        for rank, i in (item for owners in self._rounds for item in owners.items()):
            p = self._matrices[i]
            momentum = self.state[p].get("momentum_buffer") if rank == self._rank else None
            if momentum is None:  # another process has it, or it was not stepped yet
                momentum = torch.zeros_like(p)
            dist.broadcast(momentum, rank)
            if self._rank == 0:
                whole["state"][i] = {"momentum_buffer": momentum.cpu()}
        return whole

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Loads the state of any number of processes; each keeps the momentum of its own matrices."""
        mine = {owners.get(self._rank) for owners in self._rounds}
        super().load_state_dict(state | {"state": {i: kept for i, kept in state["state"].items() if i in mine}})


@dataclass(slots=True)
class Shard:
    """This process's shard of a matrix: consecutive elements in row order, after those of lower ranks."""

    shape: tuple[int, int]  # the whole matrix's
    sizes: list[int]  # elements on each process
    weight: Tensor  # [sizes[rank]], fp32, as the next two
    momentum: Tensor
    gradient: Tensor


@torch.no_grad()
def muon_step(shards: Sequence[Shard], rank: int, group: dict[str, Any]) -> None:
    """Runs the step of torch's Muon on matrices that all processes hold in shards; each must call it.

    Momentum is element-wise and stays on its shard's process. The matrix to orthogonalise is gathered in bf16, the
    dtype of its products, on the process that it is dealt to, and scattered back. In every round each process has its
    own matrix; the next round's matrices are sent while this round's are multiplied.

    Args:
        group: the options of torch's Muon, as in its `param_groups`.
    """
    world = len(shards[0].sizes)
    rounds = deal([products(*shard.shape) for shard in shards], world)
    momentum, rate = group["momentum"], group["lr"]

    def gather(owners: dict[int, int]) -> tuple[Tensor, list[int], list[int], Any]:
        """Starts to send this process's shards to their owners and to receive the shards of its own matrix."""
        updates = []
        for shard in (shards[owners[r]] for r in sorted(owners)):
            shard.momentum.lerp_(shard.gradient, 1 - momentum)
            update = shard.gradient.lerp(shard.momentum, momentum) if group["nesterov"] else shard.momentum
            updates.append(update.bfloat16())
        sent = [shards[owners[r]].sizes[rank] if r in owners else 0 for r in range(world)]
        got = shards[owners[rank]].sizes if rank in owners else [0] * world
        whole = updates[0].new_empty(sum(got))
        return whole, got, sent, dist.all_to_all_single(whole, torch.cat(updates), got, sent, async_op=True)

    def finish(owners: dict[int, int], update: Tensor, sent: list[int], work: Any) -> None:
        work.wait()
        for r, part in enumerate(update.split(sent)):
            if r in owners:
                shard = shards[owners[r]]
                size = 0.2 * math.sqrt(max(shard.shape))  # as large as AdamW's steps
                shard.weight.mul_(1 - rate * group["weight_decay"]).add_(part, alpha=-rate * size)

    coming = gather(rounds[0])
    going = None
    for k, owners in enumerate(rounds):
        whole, got, sent, work = coming
        if k + 1 < len(rounds):
            coming = gather(rounds[k + 1])
        work.wait()
        if rank in owners:
            matrix = whole.view(shards[owners[rank]].shape)
            whole = orthogonalized(matrix, group["ns_coefficients"], group["ns_steps"], group["eps"]).flatten()
        update = whole.new_empty(sum(sent))
        work = dist.all_to_all_single(update, whole, sent, got, async_op=True)
        if going:
            finish(*going)
        going = owners, update, sent, work
    assert going
    finish(*going)


def orthogonalized(matrix: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """Newton-Schulz iteration (Jordan et al. 2024) in place on a bf16 matrix, as in torch's Muon."""
    a, b, c = coefficients
    wide = matrix.shape[0] <= matrix.shape[1]
    x = matrix if wide else matrix.T
    x.div_(x.norm().clamp(min=eps))
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x if wide else x.T


class RowsMuon(torch.optim.Muon):
    """Muon for matrices whose rows are distributed over all processes, see `muon_step`.

    Args:
        rows: this process's rows of each matrix.
        shapes: of the whole matrices.
    """

    def __init__(
        self, rows: list[nn.Parameter], shapes: list[torch.Size], rate: float, decay: float, rank: int, world: int
    ) -> None:
        super().__init__(rows, rate, decay, adjust_lr_fn="match_rms_adamw")
        self._rank = rank
        self._places = [((s[0], s[1]), [part.numel() for part in rows_of(torch.empty(s, device="meta"), world)])
                        for s in shapes]  # fmt: skip

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        (group,) = self.param_groups
        shards = []
        for p, (shape, sizes) in zip(group["params"], self._places, strict=True):
            if "momentum_buffer" not in self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p)
            tensors = (t.view(-1) for t in (p, self.state[p]["momentum_buffer"], p.grad))
            shards.append(Shard(shape, sizes, *tensors))
        muon_step(shards, self._rank, group)


class FlatMuon(torch.optim.AdamW):
    """Muon for one group, of matrices, and AdamW for one, of vectors, on the flat partitions of DeepSpeed's ZeRO.

    DeepSpeed has its own Muon, but it orthogonalises gradients before they are divided and clipped: another method.
    Here DeepSpeed passes partitions of final gradients, one group, or a part of one, after another.
    """

    def __init__(self, muon: torch.optim.Muon, adamw: torch.optim.AdamW, rank: int, world: int) -> None:
        super().__init__([dict(part.param_groups[0]) for part in (muon, adamw)])
        self._rank, self._world = rank, world
        self.shapes: dict[Tensor, list[torch.Size]] = {}  # shapes of the matrices in each flat partition
        self.by_matrix = False  # stage 3 splits each matrix over all processes; others split all of them together

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        groups = self.param_groups
        for group in groups:
            if "ns_steps" in group:
                for flat in group["params"]:
                    self._muon(flat, group)
        self.param_groups = [group for group in groups if "ns_steps" not in group]
        super().step()
        self.param_groups = groups

    def _muon(self, flat: Tensor, group: dict[str, Any]) -> None:
        assert flat.grad is not None
        if "momentum_buffer" not in self.state[flat]:
            self.state[flat]["momentum_buffer"] = torch.zeros_like(flat)
        shards, start = [], 0  # a matrix in the concatenation of all partitions
        for shape in self.shapes[flat]:
            size = shape.numel()
            each = -(-size // self._world) if self.by_matrix else flat.numel()
            first = 0 if self.by_matrix else start
            ends = [min(max((r + 1) * each - first, 0), size) for r in range(self._world)]
            sizes = [end - begin for begin, end in zip([0, *ends], ends, strict=False)]
            here = start if self.by_matrix else max(start - self._rank * each, 0)
            tensors = (
                t.narrow(0, min(here, flat.numel()), sizes[self._rank])
                for t in (flat, self.state[flat]["momentum_buffer"], flat.grad)
            )
            shards.append(Shard((shape[0], shape[1]), sizes, *tensors))
            start += each if self.by_matrix else size
        muon_step(shards, self._rank, group)


def rows_of(tensor: Tensor, world: int) -> list[Tensor]:
    """Returns the rows of each of `world` processes, as FSDP2 splits a tensor: the last has fewer, or none."""
    parts = list(tensor.chunk(world))
    return parts + [tensor[:0]] * (world - len(parts))


def products(rows: int, columns: int) -> int:
    """Returns the FLOPs of a Newton-Schulz step on a matrix, the cost for dealing matrices to processes."""
    short, long = sorted((rows, columns))
    return 4 * short * short * long + 2 * short**3


def deal(costs: list[int], world: int) -> list[dict[int, int]]:
    """Returns rounds of {process: index} with about equal cost for every process, its largest first."""
    load, dealt = [0] * world, [list[int]() for _ in range(world)]
    for i in sorted(range(len(costs)), key=lambda i: -costs[i]):
        least = load.index(min(load))
        load[least] += costs[i]
        dealt[least].append(i)
    most = max(map(len, dealt))
    return [{rank: own[k] for rank, own in enumerate(dealt) if k < len(own)} for k in range(most)]


@torch.no_grad()
def update_average(average: nn.Module, module: nn.Module, decay: float, step: int) -> None:
    """Moves `average` towards `module` after 1-based `step`: an exponential moving average of the weights.

    Early steps use a smaller decay, min(decay, (1 + step) / (10 + step)), so that the initial weights fade.
    """
    keep = min(decay, (1 + step) / (10 + step))
    torch._foreach_lerp_(list(average.parameters()), list(module.parameters()), 1 - keep)


def uses_muon(config: TrainConfig, gpu: bool) -> bool:
    """Whether a run's matrices are trained by Muon."""
    auto = gpu and not config.run.zero  # most CPUs compute its bf16 products very slowly
    return config.optim.optimizer == "muon" or (config.optim.optimizer == "auto" and auto)


def peak_rate(optim: OptimOptions, muon: bool, *, warm: bool = False) -> float:
    """Returns the learning rate after the warm-up. Args: warm: whether the run starts from a trained drafter."""
    return optim.learning_rate or ((3e-4 if muon else 6e-5) if warm else (3e-3 if muon else 6e-4))


def is_matrix(name: str, parameter: Tensor) -> bool:
    """Whether Muon steps a parameter and weight decay applies; not to matrices with a row per token, since a step
    updates only a few of their rows."""
    return parameter.dim() == 2 and not name.endswith("_codebook")


def make_optimizer(
    named: Iterable[tuple[str, nn.Parameter]],
    optim: OptimOptions,
    rank: int = 0,
    world: int = 1,
    shapes: list[torch.Size] | None = None,
) -> Optimizers:
    """Makes the optimiser over a drafter's fp32 weights. Several processes share Muon's work.

    Args:
        named: the parameters by their names.
        shapes: of the whole matrices, if `named` has only this process's rows of each.

    Muon (Jordan et al. 2024) steps along the orthogonalised momentum of a matrix. Its step is scaled to the size of
    AdamW's (Liu et al. 2025, arXiv 2502.16982), so both share one learning rate.
    """
    matrices, vectors = list[nn.Parameter](), list[nn.Parameter]()
    for name, parameter in named:
        (matrices if is_matrix(name, parameter) else vectors).append(parameter)
    fused = vectors[0].is_cuda
    muon = optim.optimizer == "muon" or (optim.optimizer == "auto" and fused)
    rate = peak_rate(optim, muon)
    if muon:
        of_matrices: torch.optim.Optimizer
        if shapes is not None:
            of_matrices = RowsMuon(matrices, shapes, rate, optim.weight_decay, rank, world)
        elif world > 1:
            of_matrices = SharedMuon(matrices, rate, optim.weight_decay, rank, world)
        else:
            of_matrices = torch.optim.Muon(matrices, rate, optim.weight_decay, adjust_lr_fn="match_rms_adamw")
        return Optimizers(of_matrices, torch.optim.AdamW(vectors, rate, weight_decay=0.0, fused=fused))
    groups = [{"params": matrices, "weight_decay": optim.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return Optimizers(torch.optim.AdamW(groups, rate, fused=fused))
