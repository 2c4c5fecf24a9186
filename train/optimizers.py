"""AdamW, or Muon for the matrices with AdamW for the rest, behind one interface."""

import itertools
from typing import Any

import torch
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


def make_optimizer(module: nn.Module, knobs: OptimKnobs) -> Optimizers:
    """The optimiser over fp32 weights; norms are never decayed.

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
        return Optimizers(
            torch.optim.Muon(matrices, rate, knobs.weight_decay, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(vectors, rate, weight_decay=0.0, fused=fused),
        )
    groups = [{"params": matrices, "weight_decay": knobs.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return Optimizers(torch.optim.AdamW(groups, rate, fused=fused))
