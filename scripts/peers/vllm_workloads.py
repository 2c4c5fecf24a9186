"""Measures vLLM on the workloads of `bench/workloads.py`, and writes the same form of result.

    python scripts/peers/vllm_workloads.py --shape qwen3-8b --workload chat retrieval agent summary \
        --requests 1 8 32 64 --output vllm.json

Arguments, prompts and figures are those of `bench/workloads.py`. Its `--compare` prints the ratios. Run both on
the same kind of GPU. Ways: `plain`; `kN`, N drafted tokens per step; `adaptive`, 15 drafted tokens with adaptive
verification, for a real pair, as it needs real probabilities. Every way has its own engine in its own process. Times
of tokens are those of vLLM's engine process. Needs an environment with vllm (0.33) and this project.
"""

import argparse
import multiprocessing
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from dflash_toolkit.checkpoint.reader import locate
from dflash_toolkit.command_line import run_command
from dflash_toolkit.config import UserError
from dflash_toolkit.files import write_json
from dflash_toolkit.models.dflash.checkpoint import read_config
from dflash_toolkit.models.target_files import load_config
from dflash_toolkit.runtime.graphs import no_collection
from dflash_toolkit.train.responses.vllm_backend import import_vllm

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository, for `scripts`

from scripts.bench.workloads import add_arguments, check, heading, source_of
from scripts.peers.vllm_requests import Vllm
from scripts.peers.vllm_step import options_of as options_of_shape
from scripts.shapes import named_shape
from scripts.traffic import Cell, cells_of, measure_cells, show

WAYS = ("plain", "k15", "k7", "k3")
ADAPTIVE = "adaptive"
DRAFTED = 15  # tokens per step with adaptive verification


class Work(NamedTuple):
    """The work of one engine."""

    way: str
    options: dict[str, Any]  # arguments of vllm.LLM
    args: argparse.Namespace
    vocabulary: int
    result: dict[str, Any]  # the result so far


def drafted_of(way: str, args: argparse.Namespace) -> int:
    """Returns the tokens drafted per step. Raises UserError for an unknown way, or more than the drafter drafts."""
    fixed = re.fullmatch(r"k([1-9]\d*)", way)
    if (way not in ("plain", ADAPTIVE) and not fixed) or (way == ADAPTIVE and args.shape):
        more = "" if args.shape else f", {ADAPTIVE}"
        raise UserError(f"--ways {way!r} is not known; known: plain, k15 and other lengths{more}")
    drafted = int(fixed[1]) if fixed else DRAFTED if way == ADAPTIVE else 0
    if args.target:
        most = read_config(locate("drafter", args.drafter)).block_size - 1
        if way == ADAPTIVE:
            return min(drafted, most)
        if drafted > most:
            raise UserError(f"--ways {way!r}: the drafter drafts at most {most} tokens per step")
    return drafted


def options_of(way: str, cells: Sequence[Cell], args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Returns the keyword arguments of vllm.LLM. Raises UserError, see `drafted_of`."""
    drafted = drafted_of(way, args)
    most, context = max(cell.most for cell in cells), max(cell.workload.context for cell in cells)
    if args.shape:
        sizes = {"batch": [most], "max_model_len": context, "no_compile": False}
        options = options_of_shape(argparse.Namespace(**vars(args) | sizes), folder, drafted)
        return options | {"enable_prefix_caching": True}
    options = {
        "model": args.target, "dtype": "bfloat16", "max_num_seqs": most, "max_model_len": context,
        "max_num_batched_tokens": 16384, "gpu_memory_utilization": args.gpu_memory_utilization,
        "enable_prefix_caching": True, "disable_log_stats": False, "skip_tokenizer_init": True,
        "generation_config": "vllm",
    }  # fmt: skip
    if drafted:
        drafts = {"method": "dflash", "model": str(locate("drafter", args.drafter)), "num_speculative_tokens": drafted}
        options["speculative_config"] = drafts | ({"enable_adaptive_verification": True} if way == ADAPTIVE else {})
    return options


def measure(work: Work) -> dict[str, Any]:
    """Measures all cells with one engine, writes the result after each of them and returns it.

    Raises UserError: vllm refuses the models or the machine.
    """
    vllm, args, result = import_vllm(), work.args, work.result
    source, cells = source_of(args, work.vocabulary), cells_of(args.workload, args.requests)
    began = time.perf_counter()
    try:
        llm = vllm.LLM(**work.options)
    except (ValueError, RuntimeError, OSError) as error:
        raise UserError(f"vllm cannot start: {' '.join(str(error).split())}") from error
    result["versions"]["vllm"] = vllm.__version__
    result["engines"][work.way] = {"start_s": time.perf_counter() - began}
    params = vllm.SamplingParams(
        temperature=0.0, ignore_eos=True, detokenize=False,
        output_kind=vllm.sampling_params.RequestOutputKind.DELTA,
    )  # fmt: skip
    try:
        with no_collection():  # as with our engine
            for row in measure_cells(Vllm(llm, params), cells, source, args.repeats, work.way):
                result["rows"].append(row)
                show(row)
                write_json(args.output, result)
    finally:
        llm.llm_engine.engine_core.shutdown()  # a process that this one would wait for
    return result


def run(args: argparse.Namespace) -> None:
    check(args)
    cells = cells_of(args.workload, args.requests)
    config = named_shape(args.shape) if args.shape else load_config(args.target)
    ways = args.ways or [*WAYS, *([ADAPTIVE] if args.target else [])]
    for way in ways:
        drafted_of(way, args)
    import_vllm()
    result, refused = heading("peers/vllm_workloads.py", "vllm", args), list[str]()
    for way in ways:
        with tempfile.TemporaryDirectory() as folder:
            work = Work(way, options_of(way, cells, args, Path(folder)), args, config.vocab_size, result)
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
                try:
                    result = pool.submit(measure, work).result()
                except UserError as error:
                    refused.append(f"{way}: {error}")
    if refused:
        raise UserError("; ".join(refused))


def main(argv: Sequence[str] | None = None) -> int:
    """The program. Exit codes: 0 done, 2 a mistake (one line)."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser, [*WAYS, ADAPTIVE])
    args = parser.parse_args(argv)
    args.argv = list(sys.argv[1:] if argv is None else argv)
    return run_command(lambda: run(args))


if __name__ == "__main__":
    raise SystemExit(main())
