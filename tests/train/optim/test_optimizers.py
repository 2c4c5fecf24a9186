"""The optimizers: which weights decay, and how many bytes their state has."""

import pytest
import torch
from conftest import make_dflash2

from dflash_toolkit import Target
from dflash_toolkit.train.config import TrainConfig
from dflash_toolkit.train.optim.optimizers import make_optimizer
from dflash_toolkit.train.run.cost import resume_bytes
from dflash_toolkit.train.training_options import OptimOptions


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_weight_decay_applies_to_matrices_only(kind: str, target: Target) -> None:
    drafter = make_dflash2(target).train().requires_grad_(True)
    with torch.no_grad():
        for p in drafter.parameters():
            p.add_(0.5)
            p.grad = torch.zeros_like(p)  # all that moves a weight is the decay
    before = [p.detach().clone() for p in drafter.parameters()]
    options = OptimOptions(optimizer=kind, learning_rate=0.1, weight_decay=0.5)
    optimizer = make_optimizer(drafter.named_parameters(), options)
    optimizer.step()
    assert {p.dim() for p in before} == {1, 2, 3}
    for (name, after), p in zip(drafter.named_parameters(), before, strict=True):
        decayed = p.dim() == 2 and "codebook" not in name  # a row of which is a token's own
        assert torch.allclose(after, p * (0.95 if decayed else 1.0)), name
    moments = [value for part in optimizer.parts for state in part.state.values() for value in state.values()]
    kept = sum(value.numel() for value in [*drafter.parameters(), *moments] if value.dim())
    assert resume_bytes(drafter, TrainConfig(target="t", optim=options)) == 4 * kept
