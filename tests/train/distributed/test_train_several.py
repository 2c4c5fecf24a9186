"""Several processes share Muon's work and step as one does; on GPUs a whole run of them learns what one GPU learns."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from forked import free_port, run_several
from hypothesis import given
from hypothesis import strategies as st
from paths import ROOT
from programs import Program
from programs import train_argv as argv
from several_processes import run_rank as _one
from torch import Tensor, nn
from training_runs import flat, losses

from dflash_toolkit.train.optim.optimizers import FlatMuon, Optimizers, deal, make_optimizer, rows_of
from dflash_toolkit.train.training_options import OptimOptions

SHAPES = [(24, 8), (8, 24), (16, 16), (40, 8), (5, 7)]

AS_USERS = ["dtype=bfloat16", "run.attention=flex", "run.compile=auto", "drafter.head_dim=16"]


def module() -> nn.Module:
    g = torch.Generator().manual_seed(3)
    found = nn.Module()
    for i, shape in enumerate([*SHAPES, (9,)]):
        found.register_parameter(f"p{i}", nn.Parameter(torch.randn(shape, generator=g)))
    return found


def stepped(optimizer: Optimizers, weights: nn.Module, steps: range) -> None:
    for step in steps:
        for i, p in enumerate(weights.parameters()):
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(100 * step + i))
        optimizer.step()
        optimizer.zero_grad()


def _process(rank: int, world: int, folder: Path, first: int) -> None:
    """Continues from the file of step `first`, for two steps."""
    dist.init_process_group("gloo")
    weights = module()
    optimizer = make_optimizer(
        weights.named_parameters(), OptimOptions(optimizer="muon", weight_decay=0.1), rank, world
    )
    if first:
        kept = torch.load(folder / f"{first}.pt")
        weights.load_state_dict(kept["weights"])
        optimizer.load_state_dict(kept["optimizer"])
    stepped(optimizer, weights, range(first, first + 2))
    state = optimizer.state_dict()
    everyone: list[Any] = [None] * world
    dist.all_gather_object(everyone, weights.state_dict())
    assert all(torch.equal(everyone[0][name], other[name]) for other in everyone for name in other)
    if rank == 0:
        torch.save({"weights": weights.state_dict(), "optimizer": state}, folder / f"{first + 2}.pt")
    dist.destroy_process_group()


def test_shared_muon_equals_one_process_and_resumes_on_any(tmp_path: Path) -> None:
    for first, world in ((0, 3), (2, 7), (4, 1)):  # two of seven have no matrix
        assert run_several(world, _process, world, tmp_path, first) == [0] * world
    weights = module()
    optimizer = make_optimizer(weights.named_parameters(), OptimOptions(optimizer="muon", weight_decay=0.1))
    stepped(optimizer, weights, range(6))
    found = torch.load(tmp_path / "6.pt")
    alone = {"weights": weights.state_dict(), "optimizer": optimizer.state_dict()}
    assert flat(alone).keys() == flat(found).keys()
    assert all(torch.equal(tensor, flat(found)[place]) for place, tensor in flat(alone).items())


def _in_shards(rank: int, world: int) -> None:
    """Compares steps of Muon on whole matrices with those on rows of them and on ZeRO's flat partitions."""
    dist.init_process_group("gloo")
    options, steps = OptimOptions(optimizer="muon", weight_decay=0.1), range(3)
    whole = module()
    stepped(make_optimizer(whole.named_parameters(), options), whole, steps)
    shapes = [torch.Size(shape) for shape in SHAPES]

    start = module()
    rows = nn.ParameterList(rows_of(p.data, world)[rank].clone() if p.dim() == 2 else p for p in start.parameters())
    optimizer = make_optimizer(rows.named_parameters(), options, rank, world, shapes)
    for step in steps:
        for i, (p, full) in enumerate(zip(rows, whole.parameters(), strict=True)):
            gradient = torch.randn(full.shape, generator=torch.Generator().manual_seed(100 * step + i))
            p.grad = rows_of(gradient, world)[rank] if p.dim() == 2 else gradient
        optimizer.step()
    for p, full in zip(rows, whole.parameters(), strict=True):
        assert torch.equal(p, rows_of(full, world)[rank] if p.dim() == 2 else full)

    def partition(tensors: list[Tensor], by_matrix: bool) -> Tensor:
        """Returns the partitions of each padded matrix, or of all matrices concatenated."""
        runs = [t.flatten() for t in tensors] if by_matrix else [torch.cat([t.flatten() for t in tensors])]
        padded = [torch.cat([run, run.new_zeros(-len(run) % world)]) for run in runs]
        return torch.cat([run.chunk(world)[rank] for run in padded])

    for by_matrix in (False, True):
        flat = nn.Parameter(partition([p.data for p in list(module().parameters())[: len(SHAPES)]], by_matrix))
        parts = make_optimizer(module().named_parameters(), options).parts
        sharded = FlatMuon(parts[0], parts[1], rank, world)  # type: ignore[arg-type]
        sharded.shapes[flat], sharded.by_matrix = shapes, by_matrix
        sharded.param_groups[0]["params"], sharded.param_groups[1]["params"] = [flat], []
        for step in steps:
            generators = (torch.Generator().manual_seed(100 * step + i) for i in range(len(SHAPES)))
            gradients = [torch.randn(s, generator=g) for s, g in zip(SHAPES, generators, strict=True)]
            flat.grad = partition(gradients, by_matrix)
            sharded.step()
        expected = partition([p.data for p in list(whole.parameters())[: len(SHAPES)]], by_matrix)
        assert torch.equal(flat, expected), by_matrix
    dist.destroy_process_group()


@pytest.mark.parametrize("world", [2, 7])
def test_muon_on_shards_is_bit_identical_to_whole_matrices(world: int) -> None:
    assert run_several(world, _in_shards, world) == [0] * world


@given(costs=st.lists(st.integers(1, 1000), min_size=1, max_size=40), world=st.integers(1, 9))
def test_matrices_are_dealt_once_with_balanced_cost(costs: list[int], world: int) -> None:
    rounds = deal(costs, world)
    assert sorted(i for owners in rounds for i in owners.values()) == list(range(len(costs)))
    loads = [sum(costs[owners[rank]] for owners in rounds if rank in owners) for rank in range(world)]
    assert max(loads) - min(loads) <= max(costs)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("way", "tolerance"),
    [
        (["optim.optimizer=muon"], 1e-2),  # its products are in bf16
        (["optim.optimizer=adamw"], 1e-5),
        (["optim.optimizer=muon", "run.fsdp=true"], 1e-2),
        (["optim.optimizer=muon", "run.zero=2"], 1e-2),
        (["optim.optimizer=adamw", "run.fsdp=true"], 1e-5),
        (["optim.optimizer=adamw", "run.zero=1"], 1e-5),
        (["optim.optimizer=adamw", "run.zero=2"], 1e-5),
        (["optim.optimizer=adamw", "run.zero=3"], 1e-5),
        (["optim.optimizer=adamw", "run.target_tensor_parallel_size=2"], 1e-4),  # features differ by rounding
        (["optim.optimizer=adamw", "run.fsdp=true", "run.target_tensor_parallel_size=2"], 1e-4),
        (AS_USERS, 3e-2),
        ([*AS_USERS, "run.fsdp=true"], 3e-2),
    ],
    ids=lambda way: "-".join(option.split("=")[1] for option in way) if isinstance(way, list) else "",
)
@pytest.mark.parametrize("world", [2, 4])
def test_several_gpus_train_the_same_as_one(
    world: int, way: list[str], tolerance: float, target_dir: Path, tmp_path: Path
) -> None:
    """The same micro batches on several GPUs at a time as on one after the other; in fp32 but for the last."""
    if torch.cuda.device_count() < world:
        pytest.skip(f"needs {world} GPUs")
    data = tmp_path / "prompts.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"say {i} and {i * 7}"}) + "\n" for i in range(24)))
    options = [
        "dtype=float32", "run.attention=sdpa", "run.compile=off", "optim.pack_tokens=128", "optim.pack_blocks=12",
        "optim.steps=8", "responses.runtime=reference", "run.evaluate_runtime=reference", *way,
    ]  # fmt: skip
    curves = []
    for gpus in (1, world):
        output = tmp_path / f"on{gpus}"
        taken = [option for option in options if gpus > 1 or "target_tensor" not in option]
        arguments = argv(target_dir, data, output, *taken, f"optim.accumulate={world // gpus}")
        torchrun = [f"--nproc-per-node={gpus}", f"--master-port={free_port()}", "-m", "dflash_toolkit.train.cli"]
        done = subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", *torchrun, *arguments],
            cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        curves.append(losses(output / "work/metrics.jsonl"))
    # sums have another order, and every update adds to what the ones before it made of that
    assert len(curves[0]) == 8
    for step, (one, several) in enumerate(zip(*curves, strict=True)):
        assert several == pytest.approx(one, rel=tolerance * max(step, 1))


def _apart(rank: int, arguments: list[list[str]], log: Path) -> None:
    _one(rank, arguments[rank], log)


def test_machines_without_a_shared_directory_are_refused(short_run: Program, tmp_path: Path) -> None:
    log = tmp_path / "log"
    arguments = [short_run.words("optim.optimizer=adamw", output=f"run{rank}") for rank in (0, 1)]
    assert run_several(2, _apart, arguments, log) == [2, 2], log.read_text()
    errors = [line for line in log.read_text().splitlines() if "Error" in line or line.startswith("error:")]
    assert len(errors) == 1 and "all machines must share the output directory" in errors[0]
