"""Time a target that processes hold together, in slices, beside one that each of them has whole.

    python scripts/bench/sharded_target.py --output sharded_target.json  # starts itself again under torchrun
    python scripts/bench/sharded_target.py --shape qwen3-32b --layers 40
    python scripts/bench/sharded_target.py --tiny --device cpu

Weights are random and made where they belong: no checkpoint is written. Features are those of a training step that
keeps none; training is the trainer's own step of a plain drafter, with the target's forward in every one. Rates are
of all processes together, memory is of the fullest GPU. A target that does not fit a GPU whole is said not to.
"""

import argparse
import faulthandler
import gc
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoModelForCausalLM, PreTrainedConfig

from dflash_toolkit.benchmark import setting
from dflash_toolkit.files import finite, write_json
from dflash_toolkit.models.dflash.network import Drafter
from dflash_toolkit.models.dflash.shape import drafter_shape
from dflash_toolkit.models.sharded import load
from dflash_toolkit.models.target import Target, resolve_device, resolve_dtype
from dflash_toolkit.runtime.shapes import named_shape
from dflash_toolkit.train.config import TrainConfig
from dflash_toolkit.train.distributed.parallel import Processes
from dflash_toolkit.train.distributed.zero import make_learner
from dflash_toolkit.train.features.source import FeatureSource
from dflash_toolkit.train.objective.blocks import sample_blocks
from dflash_toolkit.train.objective.loss import compute_loss, use_flex
from dflash_toolkit.train.optim.schedule import packing, rng_for
from dflash_toolkit.train.responses.rows import Row

WARMUP = 4  # steps that compile, and one more
LIMIT_S = 280  # for one way; past it something hangs
TINY = {
    "vocab_size": 512, "hidden_size": 32, "intermediate_size": 64, "moe_intermediate_size": 16, "num_hidden_layers": 8,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "num_experts": 8,
}  # fmt: skip


def shape_of(args: argparse.Namespace) -> PreTrainedConfig:
    config = named_shape(args.shape)
    values = config.to_dict() | (TINY if args.tiny else {})
    if args.layers:
        values["num_hidden_layers"] = args.layers
    for key in ("layer_types", "mlp_only_layers"):
        values.pop(key, None)  # as many as there were layers
    return type(config)(**values)


def random_target(config: PreTrainedConfig, device: torch.device, mesh: DeviceMesh | None) -> Target:
    """A target that never was on a disk, over the processes of a mesh if there is one."""
    dtype = resolve_dtype("auto", device)
    if mesh is not None:
        return Target(load(None, config, mesh, dtype=dtype), name="random", mesh=mesh)
    with device:
        return Target(AutoModelForCausalLM.from_config(config, dtype=dtype), name="random")


class Bench:
    """Features and steps of training over endless random rows, all of them answer."""

    def __init__(self, args: argparse.Namespace, target: Target, processes: Processes) -> None:
        self.args, self.target, self.processes, self.turn = args, target, processes, processes.rank
        self.shape = drafter_shape(target.config)
        config = TrainConfig(target="random")
        if args.tiny:
            config = replace(config, optim=replace(config.optim, pack_tokens=128, pack_blocks=8))
        self.config = config
        tokens, self.anchors = packing(config, target.device)
        self.length = min(args.length, tokens)
        self.rows = tokens // self.length
        peers = processes.peers if target.mesh is not None else None
        self.source = FeatureSource(target, self.shape.target_layer_ids, self.length, packed=tokens, peers=peers)

    def next_rows(self) -> list[Row]:
        self.turn += self.processes.world
        ids = torch.randint(0, self.shape.mask_token_id, (self.rows, self.length), generator=rng_for(0, 3, self.turn))
        return [Row(i, 0, row) for i, row in enumerate(ids.tolist())]

    def features(self) -> None:
        self.source(self.next_rows())

    def start_training(self) -> None:
        with torch.device("meta"):
            drafter = Drafter(self.shape)
        self.drafter = drafter.to_empty(device=self.target.device).train()
        self.drafter.init_weights(torch.Generator(self.target.device).manual_seed(0))
        self.learner = make_learner(drafter, self.config, self.processes, None, Path(tempfile.mkdtemp()), packed=True)
        self.flex = use_flex("auto", self.target.device)

    def train(self) -> None:
        features, random = self.source(self.next_rows()), rng_for(0, 2, self.turn)
        size, mask = self.shape.block_size, self.shape.mask_token_id
        blocks = sample_blocks(features, self.anchors, size, mask, random, fixed=True)
        result = compute_loss(self.drafter, self.target, features, blocks, self.config, self.flex, self.learner.run)
        self.learner.backward(result.weighted_sum, last=True)
        self.learner.step(self.processes.sum(result.totals())[1])

    def timed(self, step: Callable[[], None]) -> float:
        """Seconds a step, of the slowest process."""
        for _ in range(WARMUP):
            step()
        synchronize(self.target.device)
        self.processes.all_gather(None)
        began = time.perf_counter()
        for _ in range(self.args.steps):
            step()
        synchronize(self.target.device)
        return max(self.processes.all_gather(time.perf_counter() - began)) / self.args.steps


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure(args: argparse.Namespace, config: PreTrainedConfig, processes: Processes, shared: bool) -> dict[str, Any]:
    """One line of the result."""
    device, everyone = resolve_device(processes.device), processes.world
    row: dict[str, Any] = {"processes_to_a_target": processes.peers.world if shared else 1}
    if device.type == "cuda":
        row["held_before_gib"] = torch.cuda.memory_allocated() / 2**30

    def part(name: str, work: Callable[[], Any]) -> Any:
        """`work()`, and what a GPU held at most meanwhile; None where one has too little for it."""
        if "error" in row:
            return None
        found = None
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        try:
            found = work()
        except torch.OutOfMemoryError:
            row["error"] = "out of memory"
        if any(processes.all_gather("error" in row)):
            row["error"] = f"{name}: out of memory"
        elif device.type == "cuda":
            row[f"{name}_peak_gib"] = max(processes.all_gather(torch.cuda.max_memory_allocated() / 2**30))
        return found

    began = time.perf_counter()
    target = part("load", lambda: random_target(config, device, processes.peers.mesh if shared else None))
    row["load_s"] = time.perf_counter() - began
    if target is not None:
        bench = Bench(args, target, processes)
        sequences = bench.rows * everyone
        if seconds := part("features", lambda: bench.timed(bench.features)):
            row |= {"features_step_ms": 1e3 * seconds, "tokens_per_second": sequences * bench.length / seconds}
        part("drafter", bench.start_training)
        if seconds := part("training", lambda: bench.timed(bench.train)):
            row |= {"training_step_ms": 1e3 * seconds, "sequences_per_second": sequences / seconds}
        row |= {"sequences_per_step": sequences, "length": bench.length}
    return row


def table(rows: list[dict[str, Any]]) -> list[str]:
    """In Markdown."""
    lines = [
        "| processes to a target | features, tokens/s | training, sequences/s | memory of a GPU | |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        rates = (f"{row[key]:.1f}" if key in row else "-" for key in ("tokens_per_second", "sequences_per_second"))
        peak = max((value for key, value in row.items() if key.endswith("_peak_gib")), default=None)
        memory = f"{peak:.1f} GiB" if peak else "-"
        lines.append(f"| {row['processes_to_a_target']} | {' | '.join(rates)} | {memory} | {row.get('error', '')} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3-30b-a3b", help="of the target; those of the other benchmarks too")
    parser.add_argument("--layers", type=int, help="of the target, where all are too many")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a sequence")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--gpus", type=int, default=2, help="processes")
    parser.add_argument("--tiny", action="store_true", help="a few thousand weights, to see that it runs")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()  # every weight is missing, and made
    transformers.utils.logging.disable_progress_bar()
    config = shape_of(args)
    if "WORLD_SIZE" not in os.environ:
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={args.gpus}"]
        os.execv(sys.executable, [sys.executable, *torchrun, *sys.argv])
    with Processes.started(args.device, share=int(os.environ["WORLD_SIZE"])) as processes:
        result: dict[str, Any] = {
            **setting("bench/sharded_target.py"), "processes": processes.world, "shape": args.shape,
            "layers": config.num_hidden_layers, "rows": [],
        }  # fmt: skip
        for shared in (True, False):
            faulthandler.dump_traceback_later(LIMIT_S, exit=True)
            torch.compiler.reset()
            result["rows"].append(measure(args, config, processes, shared))
            faulthandler.cancel_dump_traceback_later()
            gc.collect()
            if processes.main and args.output:
                write_json(args.output, finite(result))
            if resolve_device(processes.device).type == "cuda":
                torch.cuda.empty_cache()
        if processes.main:
            print("\n".join(table(result["rows"])))


if __name__ == "__main__":
    main()
