"""Measures training steps with random weights of a named shape: sequences per second, MFU, peak memory.

    python scripts/bench/train_step.py --shape qwen3-8b --anchors 512 2048 --output train.json
    python scripts/bench/train_step.py --shape qwen2.5-0.5b --anchors 384 --kind dflash dflash2 convolution selector
    python scripts/bench/train_step.py --shape qwen3-8b --gpus 2       # starts itself again under torchrun
    python scripts/bench/train_step.py --shape qwen3-8b --gpus 2 --anchors 512 --compare --output sharded.json

Steps are the trainer's own and include the target's forward pass: packed rows, anchors, drafter, frozen head,
backward, optimiser. FLOPs are those of `train/run/cost.py`, drafter and head only; MFU uses the time without the
target's forward.

`--compare` times ways to share the work one after another (an optimiser, `+`, how it is sharded) and prints a
table. A way that fails, hangs or leaks memory restarts the processes; the other results are kept.
"""

import argparse
import faulthandler
import gc
import itertools
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from dflash_toolkit.files import finite, write_json
from dflash_toolkit.models.device import resolve_device
from dflash_toolkit.models.dflash.network import Drafter
from dflash_toolkit.models.dflash.shape import drafter_shape
from dflash_toolkit.models.target import Target
from dflash_toolkit.roofline import roofline_of
from dflash_toolkit.train.config import TrainConfig
from dflash_toolkit.train.data_options import DataOptions
from dflash_toolkit.train.distributed.parallel import Processes
from dflash_toolkit.train.distributed.zero import Zero, make_learner
from dflash_toolkit.train.features.source import FeatureSource
from dflash_toolkit.train.objective.blocks import Blocks, sample_blocks
from dflash_toolkit.train.objective.loss import compute_loss, use_flex
from dflash_toolkit.train.optim.schedule import rng_for
from dflash_toolkit.train.responses.rows import Row
from dflash_toolkit.train.run.cost import drafter_step_flops, visible_pairs
from dflash_toolkit.train.run.memory import TrainingMemory
from dflash_toolkit.train.run.target_weights import Weights
from dflash_toolkit.train.training_options import DrafterOptions, LossOptions, OptimOptions, RunOptions

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository, for `scripts`

from scripts.measure import setting
from scripts.shapes import named_shape

KINDS: dict[str, dict[str, Any]] = {
    "dflash": {}, "dflash2": {"kind": "dflash2"}, "convolution": {"kind": "dflash2", "selector_rank": 0},
    "selector": {"kind": "dflash2", "conv_kernel_size": 0}, "dspine": {"kind": "dspine"},
}  # fmt: skip
BLOCKS = 2048  # blocks of a micro step unless --batch is given
SHARDED = {
    "": {}, "fsdp": {"fsdp": True}, "fsdp-keep": {"fsdp": True, "fsdp_reshard_after_forward": False},
    **{f"zero{stage}": {"zero": stage} for stage in (1, 2, 3)},
}  # fmt: skip
WAYS = ("adamw", "adamw+fsdp", "muon", "muon+fsdp", "adamw+fsdp-keep", "adamw+zero2", "muon+zero2", "adamw+zero1",
        "muon+zero1", "adamw+zero3", "muon+zero3")  # fmt: skip  # stage 3 cannot be undone in a process
LIMIT_S = 180  # maximum seconds of one way of training; longer runs hang
MAX_LEFTOVER = 0.5 * 2**30  # bytes of the previous way; with more, the memory of the next one is not measured
JOURNAL, UNTIL = "BENCH_TRAIN_JOURNAL", "BENCH_TRAIN_UNTIL"  # environment of the processes that are started again


def random_target(shape: str, device: torch.device) -> Target:
    """A target of the named shape that never was on a disk."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with device:
        return Target(AutoModelForCausalLM.from_config(named_shape(shape), dtype=dtype), name=shape)


class Bench:
    """The trainer's step over endless random rows."""

    def __init__(
        self, args: argparse.Namespace, target: Target, processes: Processes, anchors: int, kind: str = "dflash"
    ) -> None:
        self.args, self.target, self.processes = args, target, processes
        self.anchors = min(anchors, args.length - 1)
        self.batch = args.batch or max(1, BLOCKS // anchors)
        self.shape = drafter_shape(
            named_shape(args.shape), layers=args.layers, taps=args.taps, block_size=args.block,
            layer_types=("sliding_attention",) if args.window else (), sliding_window=args.window, **KINDS[kind],
        )  # fmt: skip
        self.config = TrainConfig(
            target=args.shape,
            prompts=DataOptions(max_length=args.length),
            drafter=DrafterOptions(layers=args.layers, taps=args.taps, block_size=args.block, **KINDS[kind]),
            loss=LossOptions(anchors=self.anchors).of_kind(self.shape.architecture),
            optim=OptimOptions(
                optimizer=args.optimizer,
                accumulate=args.accumulate,
                batch_size=self.batch,
                recompute=args.recompute,
                splits=args.splits,
            ),
            run=RunOptions(compile=args.compile, **SHARDED[args.shard]),
        )
        with torch.device("meta"):
            drafter = Drafter(self.shape)
        self.drafter = drafter.to_empty(device=target.device).train()
        self.drafter.init_weights(torch.Generator(target.device).manual_seed(0))
        self.shape.architecture.fit_head(self.drafter, target.head_weight)
        self.learner = make_learner(drafter, self.config, processes, None, Path(tempfile.mkdtemp()), packed=True)
        self.flex = use_flex("auto", target.device)
        tokens = self.batch * args.length
        final = self.config.loss.distribution
        self.source = FeatureSource(target, self.shape.target_layer_ids, args.length, packed=tokens, final=final)
        self.micro = 0
        self.seconds = {"target": 0.0, "drafter": 0.0, "optimizer": 0.0}
        self.seen: list[Blocks] = []

    def _rows(self) -> list[Row]:
        g = rng_for(0, 3, self.micro * self.processes.world + self.processes.rank)
        ids = torch.randint(0, self.shape.mask_token_id, (self.batch, self.args.length), generator=g)
        return [Row(i, 0, row) for i, row in enumerate(ids.tolist())]  # all of it is answer

    def _clock(self, part: str | None, since: float) -> float:
        """Charge what the device did since then; `None` lets it run ahead, as in training."""
        if part is None:
            return since
        synchronize(self.target.device)
        now = time.perf_counter()
        self.seconds[part] += now - since
        return now

    def step(self, parts: bool = False) -> None:
        totals, since = None, time.perf_counter()
        for k in range(self.args.accumulate):
            features = self.source(self._rows())
            since = self._clock("target" if parts else None, since)
            blocks = sample_blocks(
                features, self.batch * self.anchors, self.args.block, self.shape.mask_token_id,
                rng_for(0, 2, self.micro), fixed=True,
            )  # fmt: skip
            parts_of = blocks.split(self.args.splits)
            for i, part in enumerate(parts_of, 1):
                result = compute_loss(
                    self.drafter, self.target, features, part, self.config, self.flex, self.learner.run
                )
                self.learner.backward(result.weighted_sum, k == self.args.accumulate - 1 and i == len(parts_of))
                totals = result.totals() if totals is None else totals + result.totals()
            since = self._clock("drafter" if parts else None, since)
            self.micro += 1
            self.seen.append(blocks)
        assert totals is not None
        self.learner.step(self.processes.sum(totals)[1])
        self._clock("optimizer" if parts else None, since)

    def flops(self) -> float:
        """Returns the drafter's FLOP per micro step, averaged over the steps so far."""
        each = [
            drafter_step_flops(
                self.shape, self.batch * self.args.length, int(blocks.valid.sum()) * blocks.size,
                int(visible_pairs(blocks, self.shape)), int(blocks.supervised.sum()), self.shape.vocab_size,
            )
            for blocks in self.seen
        ]  # fmt: skip
        return sum(each) / len(each)

    def computed(self) -> float:
        """Returns the bytes of a GPU that the trainer expects."""
        weights, tokens = Weights.of_target(named_shape(self.args.shape)), self.batch * self.args.length
        gpu, world = self.target.device.type == "cuda", self.processes.world
        memory = TrainingMemory(weights, self.drafter, tokens, self.batch * self.anchors, world, gpu)
        return memory.need(self.config).total

    def measure(self) -> dict[str, Any]:
        """One line of the result."""
        device, steps, world = self.target.device, self.args.steps, self.processes.world
        for _ in range(self.args.warmup):
            self.step()
        self.seen.clear()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        synchronize(device)
        self.processes.all_gather(None)
        began = time.perf_counter()
        for _ in range(steps):
            self.step()
        synchronize(device)
        seconds = max(self.processes.all_gather(time.perf_counter() - began)) / steps
        timed = -(-steps // 2)
        for _ in range(timed):
            self.step(parts=True)
        parts = {name: value / timed for name, value in self.seconds.items()}
        peak = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else None
        share = parts["target"] / sum(parts.values())
        flops = self.flops() * self.args.accumulate
        return {
            "anchors": self.anchors,
            "sequences_per_step": self.batch * self.args.accumulate * world,
            "step_ms": 1e3 * seconds,
            "samples_per_second": self.batch * self.args.accumulate * world / seconds,
            "drafter_tflop_per_sample": flops / self.batch / self.args.accumulate / 1e12,
            "mfu": flops / (seconds * (1 - share)) / (self.args.peak_tflops * 1e12),
            "mfu_without_optimizer": flops / parts["drafter"] / (self.args.peak_tflops * 1e12),
            "target_share": share,
            "parts_ms": {name: 1e3 * value for name, value in parts.items()},
            "peak_gib": peak and max(self.processes.all_gather(peak)),  # per GPU
            "computed_gib": self.computed() / 2**30,
        }


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3-8b")
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--anchors", type=int, nargs="+", default=[512, 2048], help="anchors per sequence")
    parser.add_argument("--batch", type=int, default=0, help=f"sequences a micro step (default: {BLOCKS} blocks)")
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--splits", type=int, default=1, help="passes over the blocks of a micro step")
    parser.add_argument("--memory-gib", type=float, help="let PyTorch allocate no more (default: all)")
    parser.add_argument("--block", type=int, default=16)
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--taps", type=int, default=5)
    parser.add_argument("--window", type=int, help="sliding window of every layer in tokens (default: none)")
    parser.add_argument(
        "--kind", nargs="+", default=["dflash"], choices=list(KINDS), help="kinds of drafters, measured in turn"
    )
    parser.add_argument("--optimizer", default="auto", choices=["auto", "adamw", "muon"])
    parser.add_argument("--compile", default="auto", choices=["auto", "on", "off"])
    parser.add_argument("--shard", default="", choices=list(SHARDED))
    parser.add_argument("--recompute", action="store_true")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--gpus", type=int, default=1, help="number of processes, started by torchrun if more than one")
    parser.add_argument(
        "--compare", nargs="*", metavar="WAY", help="ways to compare, e.g. muon muon+fsdp adamw+zero2 (default: eleven)"
    )
    parser.add_argument("--minutes", type=float, default=5.0, help="start no other WAY after this time")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--peak-tflops", type=float, help="dense bf16 peak (default: that of this GPU)")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    for way in args.compare or ():
        if way not in (known := [f"{o}+{s}".rstrip("+") for o in ("adamw", "muon") for s in SHARDED]):
            parser.error(f"{way} is no WAY to share the work; there are {', '.join(known)}")
    return args


def free(device: torch.device) -> float:
    """Frees unused memory; returns the bytes still in use."""
    gc.collect()
    if device.type != "cuda":
        return 0
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated(device)


def noted(journal: Path) -> dict[str, dict[str, Any]]:
    """The results so far by their way."""
    lines = map(json.loads, journal.read_text().splitlines() if journal.exists() else ())
    return {line["way"]: line for line in lines}


def note(journal: Path, row: dict[str, Any]) -> None:
    with open(journal, "a") as file:
        file.write(json.dumps(finite(row)) + "\n")


def measure_ways(args: argparse.Namespace, target: Target, processes: Processes, result: dict[str, Any]) -> None:
    """Runs the rest of `--compare` until one fails, in processes that `compare` started."""
    journal, device = Path(os.environ[JOURNAL]), target.device
    before = free(device)
    for at, way in enumerate(left(args, journal)):
        late = time.time() > float(os.environ[UNTIL])
        if any(processes.all_gather(late or (at > 0 and free(device) > before + MAX_LEFTOVER))):
            return
        args.optimizer, _, args.shard = way.partition("+")
        torch.compiler.reset()
        faulthandler.dump_traceback_later(LIMIT_S, exit=True)
        try:
            bench = Bench(args, target, processes, args.anchors[0])
            row = {"way": way, **bench.measure()}
            if isinstance(bench.learner, Zero):
                bench.learner.close()
            del bench
        except Exception as error:
            row = {
                "way": way,
                "error": f"{type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else ''}",
            }
            if processes.main:
                note(journal, row)
            raise
        faulthandler.cancel_dump_traceback_later()
        if processes.main:
            note(journal, row)
            print(json.dumps(row), flush=True)
            if args.output:
                write_json(args.output, finite(result | {"rows": [*noted(journal).values()]}))


def left(args: argparse.Namespace, journal: Path) -> list[str]:
    done = noted(journal)
    return [way for way in args.compare or WAYS if way not in done]


def compare(args: argparse.Namespace) -> None:
    """Start the processes until every way is measured, has failed, or the time is over; then print the table."""
    named_shape(args.shape)  # raises for a slip, before anything starts
    journal, until = Path(tempfile.mkdtemp()) / "journal.jsonl", time.time() + 60 * args.minutes
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={args.gpus}"]
    environment = os.environ | {JOURNAL: str(journal), UNTIL: str(until)}
    while (ways := left(args, journal)) and time.time() < until:
        ended = subprocess.run([sys.executable, *torchrun, *sys.argv], env=environment).returncode
        if ended and left(args, journal) == ways:
            note(journal, {"way": ways[0], "error": "ended without a word; see above"})
    rows = [*noted(journal).values()]
    if args.output and args.output.exists():
        write_json(args.output, json.loads(args.output.read_text()) | {"rows": rows})
    print("\n".join(table(rows)))
    for way in left(args, journal):
        print(f"| {way} | not measured: {args.minutes:g} minutes were over |")


def table(rows: Iterable[dict[str, Any]]) -> list[str]:
    """In Markdown."""
    lines = [
        "| | sequences/s | step | target | drafter | optimiser | memory of a GPU |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        if "error" in row:
            lines.append(f"| {row['way']} | {row['error']} |")
            continue
        parts = " | ".join(f"{row['parts_ms'][name]:.0f} ms" for name in ("target", "drafter", "optimizer"))
        memory = f"{row['peak_gib']:.1f} GiB" if row["peak_gib"] else "-"
        lines.append(
            f"| {row['way']} | {row['samples_per_second']:.2f} | {row['step_ms']:.0f} ms | {parts} | {memory} |"
        )
    return lines


def main() -> None:
    args = arguments()
    if args.compare is not None and JOURNAL not in os.environ:
        return compare(args)
    if args.gpus > 1 and "WORLD_SIZE" not in os.environ:
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={args.gpus}"]
        os.execv(sys.executable, [sys.executable, *torchrun, *sys.argv])
    with Processes.started(args.device, group=bool(args.shard) or args.compare is not None) as processes:
        device = resolve_device(processes.device)
        if args.peak_tflops is None:
            args.peak_tflops = roofline_of(device).bf16_tflops if device.type == "cuda" else math.nan
        if args.memory_gib:
            total = torch.cuda.get_device_properties(device).total_memory
            torch.cuda.set_per_process_memory_fraction(args.memory_gib * 2**30 / total)  # of the current device
        target = random_target(args.shape, device)
        result: dict[str, Any] = {
            **setting("bench/train_step.py"),
            "processes": processes.world,
            "shape": args.shape,
            "peak_tflops": args.peak_tflops,
            "rows": [],
        }
        if args.compare is not None:
            return measure_ways(args, target, processes, result)
        for anchors, kind in itertools.product(args.anchors, args.kind):
            torch.compiler.reset()
            row = {"kind": kind, **Bench(args, target, processes, anchors, kind).measure()}
            result["rows"].append(row)
            if processes.main:
                print(json.dumps(row), flush=True)
                if args.output:
                    write_json(args.output, finite(result))
            free(device)


if __name__ == "__main__":
    main()
