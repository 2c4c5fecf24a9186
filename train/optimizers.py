"""AdamW, or Muon for the matrices with AdamW for the rest, behind one interface."""

import itertools
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from .config import OptimKnobs


class Optimizers:
    """Several optimisers over disjoint parameters, stepped and saved as one."""

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
    """Muon over processes with equal weights and gradients: each steps matrices of its own and sends them round.

    Its products are most of what it costs and do not shrink with the batch; done by every process they would be done
    `world` times. Momentum is kept where its matrix is stepped. The state has the form of torch's Muon.
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
        """A matrix travels while the next one is computed."""
        gradients = [p.grad for p in self._matrices]
        for p in self._matrices:
            p.grad = None  # a matrix without gradient is left alone
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
        """The whole state, with momentum in host memory, on the first process; all must call it."""
        whole = super().state_dict()
        whole["state"] = {}
        for rank, i in (item for owners in self._rounds for item in owners.items()):
            p = self._matrices[i]
            momentum = self.state[p].get("momentum_buffer") if rank == self._rank else None
            if momentum is None:  # another's, or of a matrix that was not stepped yet
                momentum = torch.zeros_like(p)
            dist.broadcast(momentum, rank)
            if self._rank == 0:
                whole["state"][i] = {"momentum_buffer": momentum.cpu()}
        return whole

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """What any number of processes left; each keeps the momentum of its own matrices."""
        mine = {owners.get(self._rank) for owners in self._rounds}
        super().load_state_dict(state | {"state": {i: kept for i, kept in state["state"].items() if i in mine}})


def products(rows: int, columns: int) -> int:
    """FLOPs of a Newton-Schulz step on a matrix, by which matrices are dealt to processes."""
    short, long = sorted((rows, columns))
    return 4 * short * short * long + 2 * short**3


def deal(costs: list[int], world: int) -> list[dict[int, int]]:
    """Rounds of {process: index} that give every process about the same, each its largest first."""
    load, dealt = [0] * world, [list[int]() for _ in range(world)]
    for i in sorted(range(len(costs)), key=lambda i: -costs[i]):
        least = load.index(min(load))
        load[least] += costs[i]
        dealt[least].append(i)
    most = max(map(len, dealt))
    return [{rank: own[k] for rank, own in enumerate(dealt) if k < len(own)} for k in range(most)]


@torch.no_grad()
def update_average(average: nn.Module, module: nn.Module, decay: float, step: int) -> None:
    """Move `average` towards `module` behind 1-based `step`: an exponential moving average of the weights.

    A young average forgets faster, min(decay, (1 + step) / (10 + step)), so that it does not hold on to the start.
    """
    keep = min(decay, (1 + step) / (10 + step))
    torch._foreach_lerp_(list(average.parameters()), list(module.parameters()), 1 - keep)


def peak_rate(knobs: OptimKnobs, muon: bool) -> float:
    """The learning rate behind the warm-up."""
    return knobs.learning_rate or (3e-3 if muon else 6e-4)


def make_optimizer(module: nn.Module, knobs: OptimKnobs, rank: int = 0, world: int = 1) -> Optimizers:
    """The optimiser over fp32 weights; norms are never decayed. With several processes they share Muon's work.

    Muon (Jordan et al. 2024) steps along the orthogonalised momentum of a matrix. Its step is scaled to the size of
    AdamW's (Liu et al. 2025, arXiv 2502.16982), so both share one learning rate.
    """
    matrices = [p for p in module.parameters() if p.dim() == 2]
    vectors = [p for p in module.parameters() if p.dim() != 2]
    fused = next(module.parameters()).is_cuda
    # its products are in bf16, which most CPUs compute very slowly
    muon = knobs.optimizer == "muon" or (knobs.optimizer == "auto" and fused)
    rate = peak_rate(knobs, muon)
    if muon:
        of_matrices: torch.optim.Optimizer
        if world > 1:
            of_matrices = SharedMuon(matrices, rate, knobs.weight_decay, rank, world)
        else:
            of_matrices = torch.optim.Muon(matrices, rate, knobs.weight_decay, adjust_lr_fn="match_rms_adamw")
        return Optimizers(of_matrices, torch.optim.AdamW(vectors, rate, weight_decay=0.0, fused=fused))
    groups = [{"params": matrices, "weight_decay": knobs.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return Optimizers(torch.optim.AdamW(groups, rate, fused=fused))
