"""Time our engine and vLLM on the shapes that people serve, one after another on one GPU.

    python scripts/bench/shapes.py --output results --vllm-env /tmp/vllm033_env.sh --total-s 1500

Every run is `step.py` here or `peers/vllm_step.py`, a process with a time limit of its own, whose JSON in the folder is
written after every row. The same command goes on where the last one ended: what was measured is not measured again,
what failed is tried again. Runs come in the order of importance; one that does not fit into what is left of `--total-s`
is left out. The table at the end is made of the files alone (`--table` does nothing else). Without `--vllm-env` vllm is
taken from this Python; `--no-vllm` leaves it out.
"""

import argparse
import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_toolkit.config import UserError, run_command
from dflash_toolkit.evaluation.markdown import render_table
from dflash_toolkit.evaluation.tables import Table
from dflash_toolkit.runtime.shapes import named_shape

SHAPES = ("qwen3.8-27b-fp8", "qwen3-8b-fp8", "qwen3.6-35b-a3b-fp8", "qwen3-8b")
OURS, PEER = Path(__file__).with_name("step.py"), Path(__file__).parents[1] / "peers" / "vllm_step.py"
LEAST_S = 45.0  # that a run takes to measure anything


@dataclass(frozen=True, slots=True)
class Task:
    """One engine on one shape, plainly or with drafts."""

    shape: str
    vllm: bool
    drafts: bool

    @property
    def name(self) -> str:
        return f"{self.shape}_{'vllm' if self.vllm else 'ours'}_{'drafts' if self.drafts else 'plain'}"


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--output", type=Path, required=True, help="folder of the results; made if it is not there")
    add("--shape", nargs="+", default=list(SHAPES))
    add("--batch", type=int, nargs="+", default=[1, 8, 32])
    add("--block", type=int, default=8, help="rows of a block, one more than it drafts")
    add("--accept", type=float, default=0.8, help="conditional probability of every position")
    add("--prompt", type=int, default=512)
    add("--short", type=int, default=32)
    add("--long", type=int, default=160)
    add("--repeats", type=int, default=2)
    add("--read-tb-s", type=float, default=3.0, help="the GPU's measured read bandwidth, for rooflines")
    add("--limit-s", type=float, default=150.0, help="of a run of ours")
    add("--vllm-limit-s", type=float, default=420.0, help="of a run of vllm, which starts in one to three minutes")
    add("--total-s", type=float, default=float("inf"), help="of everything")
    add("--vllm-env", type=Path, help="a shell file with vllm's environment")
    add("--no-vllm", action="store_true")
    add("--table", action="store_true", help="only the table")
    return parser.parse_args(argv)


def tasks(args: argparse.Namespace) -> list[Task]:
    """In the order of importance: shape by shape, ours before vLLM, with drafts before plainly."""
    engines = (False,) if args.no_vllm else (False, True)
    return [Task(shape, vllm, drafts) for shape in args.shape for vllm in engines for drafts in (True, False)]


def command(args: argparse.Namespace, task: Task, batches: Sequence[int], output: Path) -> list[str]:
    shared = [
        "--shape", task.shape, "--batch", *map(str, batches), "--accept", str(args.accept), "--prompt",
        str(args.prompt), "--short", str(args.short), "--long", str(args.long), "--repeats", str(args.repeats),
        "--output", str(output),
    ]  # fmt: skip
    if not task.vllm:
        block = args.block if task.drafts else 1
        more = ["--block", str(block), "--read-tb-s", str(args.read_tb_s), "--breakdown"]
        return [sys.executable, str(OURS), *shared, *more, "--max-model-len", "2048"]
    words = [str(PEER), *shared, "--k", str(args.block - 1 if task.drafts else 0), "--gpu-memory-utilization", "0.85"]
    if args.vllm_env is None:
        return [sys.executable, *words]
    # theirs comes first: its packages may be other releases than ours
    path = f"PYTHONPATH=$PYTHONPATH:{shlex.quote(str(OURS.parents[2]))}"
    script = f". {shlex.quote(str(args.vllm_env))}; export {path}; exec {shlex.join([sys.executable, *words])}"
    return ["bash", "-c", script]


def rows(folder: Path, task: Task) -> dict[int, dict[str, Any]]:
    """What was measured, by batch, over all of a task's files."""
    found: dict[int, dict[str, Any]] = {}
    for file in sorted(folder.glob(f"{task.name}.*.json")):
        values = json.loads(file.read_text())
        each = [row for engine in values["engines"].values() for row in engine["rows"]] if task.vllm else values["rows"]
        found |= {row["batch"]: row for row in each}
    return found


def run_task(args: argparse.Namespace, task: Task, limit_s: float) -> str:
    """Run what is missing of a task; one word of how it ended."""
    missing = [batch for batch in args.batch if batch not in rows(args.output, task)]
    number = len(list(args.output.glob(f"{task.name}.*.json"))) + 1
    output = args.output / f"{task.name}.{number}.json"
    with (args.output / f"{task.name}.log").open("a") as log:
        started = subprocess.Popen(
            command(args, task, missing, output), stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = started.wait(limit_s)
            return "done" if code == 0 else f"exit code {code}"
        except subprocess.TimeoutExpired:
            return "out of time"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(started.pid, signal.SIGKILL)  # the engine's own processes, too, whoever of them is left
            started.wait()


def bench(args: argparse.Namespace) -> None:
    for shape in args.shape:
        named_shape(shape)
    if args.vllm_env is not None and not args.vllm_env.is_file():
        raise UserError(f"--vllm-env {args.vllm_env}: no such file")
    args.output.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    for task in () if args.table else tasks(args):
        if rows(args.output, task).keys() >= set(args.batch):
            continue
        left = args.total_s - (time.monotonic() - began)
        limit_s = min(args.vllm_limit_s if task.vllm else args.limit_s, left)
        if limit_s < LEAST_S:
            print(f"{task.name}: left out, {max(left, 0):.0f} s are left", flush=True)
            continue
        at = time.monotonic()
        print(f"{task.name}: {run_task(args, task, limit_s)} after {time.monotonic() - at:.0f} s", flush=True)
    print(f"\n{table(args)}")


def table(args: argparse.Namespace) -> str:
    """Milliseconds a step of both engines, and ours in tokens a second over theirs at equal acceptance."""
    lines = []
    for shape in args.shape:
        for drafts in (False, True):
            ours, theirs = (rows(args.output, Task(shape, vllm, drafts)) for vllm in (False, True))
            for batch in args.batch:
                a, b = (each.get(batch, {}).get("ms_per_step") for each in (ours, theirs))
                mbu = ours.get(batch, {}).get("mbu")
                times = [f"{ms:.2f}" if ms else "" for ms in (a, b)]
                ratio = f"{b / a:.2f}" if a and b else ""
                kind = f"block {args.block}" if drafts else "plain"
                lines.append((shape, kind, str(batch), *times, ratio, f"{mbu:.0%}" if mbu else ""))
    header = ("Shape", "Decoding", "Batch", "ms a step", "vLLM", "Ours in tokens/s over vLLM", "Of the roofline")
    return render_table(Table("", header, tuple(lines)))


def main(argv: Sequence[str] | None = None) -> int:
    """The program. Exit codes: 0 done, 2 a mistake (one line)."""
    args = parse(argv)
    return run_command(lambda: bench(args))


if __name__ == "__main__":
    raise SystemExit(main())
