"""FSDP2 and ZeRO step as whole drafters do, with AdamW and with Muon, and hand a run over to each other."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_dflash2, make_dspine, make_target
from forked import run_several
from training_runs import flat
from training_runs import repeating_rows as rows

from dflash_toolkit.models.dflash.architecture import of_kind
from dflash_toolkit.train.config import TrainConfig
from dflash_toolkit.train.distributed.parallel import Processes
from dflash_toolkit.train.distributed.zero import make_learner
from dflash_toolkit.train.features.source import FeatureSource
from dflash_toolkit.train.objective.blocks import sample_blocks
from dflash_toolkit.train.objective.loss import compute_loss
from dflash_toolkit.train.run.resume_point import ResumePoint
from dflash_toolkit.train.training_options import OptimOptions, RunOptions

KINDS = ("full_attention", "sliding_attention")
FSDP = RunOptions(fsdp=True)
WAYS = [FSDP, RunOptions(zero=1), RunOptions(fsdp=True, fsdp_reshard_after_forward=False), RunOptions(zero=2),
        RunOptions(), RunOptions(zero=3), FSDP]  # fmt: skip


def _steps(
    ways: list[RunOptions], optim: OptimOptions, processes: Processes, work: Path, kind: str
) -> tuple[ResumePoint, list[float]]:
    """A step by each learner, from the resume point of the one before it; and the norms of their gradients."""
    target, state, norms = make_target(), None, []
    for step, way in enumerate(ways):
        ema = 0.0 if way.zero else optim.ema
        config = TrainConfig(target="tiny", optim=replace(optim, ema=ema), run=way)
        # rows that two processes cannot halve, layers that see other things, both parts of DFlash 2
        shape: dict[str, Any] = {"intermediate_size": 49, "sliding_window": 6, "input_embedding_scale": 2.0}
        if kind == "dspine":
            config = replace(config, loss=config.loss.of_kind(of_kind(kind)))
            drafter = make_dspine(target, layer_types=2 * KINDS, **shape).train()
        else:
            drafter = make_dflash2(target, layer_types=KINDS, **shape).train()
        learner = make_learner(drafter, config, processes, state, work, packed=False)
        weight: Any = 0
        for micro in range(optim.accumulate):
            turn = (step * optim.accumulate + micro) * processes.world + processes.rank
            source = FeatureSource(target, drafter.config.target_layer_ids, 64, final=kind == "dspine")
            features = source(rows(60)[2 * turn : 2 * turn + 2])
            blocks = sample_blocks(features, 6, 8, 299, torch.Generator().manual_seed(turn))
            parts = blocks.split(optim.splits or 1)
            for k, part in enumerate(parts, 1):
                result = compute_loss(drafter, target, features, part, config, False, learner.run)
                learner.backward(result.weighted_sum, micro == optim.accumulate - 1 and k == len(parts))
                weight = weight + result.totals()[1]
        norms.append(float(learner.step(processes.sum(weight))))
        weights, moments, average = learner.snapshot()
        point = ResumePoint(step + 1, {}, weights, moments, 0.0, 0.0, 0, average)
        state = processes.broadcast(point)
        whole = learner.whole()
        if processes.main:
            expected = average or weights
            assert all(torch.equal(p, expected[name]) for name, p in whole.named_parameters())
    return state, norms


def _process(rank: int, folder: Path, optim: OptimOptions, ways: list[RunOptions], kind: str) -> None:
    os.environ["DS_ACCELERATOR"] = "cpu"
    with Processes.started("cpu") as processes:
        plain = [RunOptions()] * len(ways)
        for name, taken in (("plain", plain), ("sharded", ways)):
            state, norms = _steps(taken, optim, processes, folder, kind)
            if processes.main:
                tensors = {"weights": state.drafter, "moments": state.optimizer, "average": state.average}
                torch.save({"tensors": flat(tensors), "norms": norms}, folder / name)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("optim", "ways", "tolerance", "kind"),
    [
        # Muon's products are in bf16 and make more of another order of sums; seven steps move weights by 4 %
        (OptimOptions(optimizer="muon", weight_decay=0.1), WAYS, 1e-2, "dflash2"),
        (
            OptimOptions(optimizer="adamw", accumulate=2, weight_decay=0.1, clip=0.01, recompute=True, splits=2),
            WAYS,
            1e-4,
            "dflash2",
        ),
        (OptimOptions(optimizer="muon", ema=0.9), [FSDP, RunOptions(), FSDP], 1e-3, "dflash2"),
        (OptimOptions(optimizer="muon", accumulate=2, weight_decay=0.1), WAYS, 1e-2, "dflash2"),
        (OptimOptions(optimizer="adamw", recompute=True, splits=2), [FSDP, RunOptions(zero=3), FSDP], 1e-4, "dspine"),
    ],
    ids=["muon", "adamw", "average", "muon, accumulated", "dspine"],
)
def test_learners_resume_each_others_state(
    optim: OptimOptions, ways: list[RunOptions], tolerance: float, kind: str, tmp_path: Path
) -> None:
    assert run_several(2, _process, tmp_path, optim, ways, kind) == [0, 0]
    plain, sharded = (torch.load(tmp_path / name) for name in ("plain", "sharded"))
    assert sharded["norms"] == pytest.approx(plain["norms"], rel=tolerance)
    assert plain["tensors"].keys() == sharded["tensors"].keys()
    for place, tensor in plain["tensors"].items():
        assert (sharded["tensors"][place].float() - tensor.float()).norm() <= tolerance * tensor.float().norm(), place
