"""Measures tokens per second of vLLM with one of our drafters; the counterpart of `bench/tree_load.py`.

    python scripts/peers/vllm_requests.py --target MODEL --drafter OUT/drafter-dflash --k 15 7 3 --output peer.json \
        --prompts gsm8k=gsm8k_test.jsonl 'mbpp=mbpp.jsonl[800:]' --limit 64 --requests 1 4 8 16 32 64

Prompts, loads and clock are those of `tree_load.py`. Every k (tokens drafted per step) has its own engine in its
own process. All engines start together and wait for each other and, with `--after`, for a file; then they are
measured in turn. Every load is decoded once without counting. The file is written after every row. Needs an
environment with vllm (0.33) and this project.
"""

import argparse
import contextlib
import copy
import multiprocessing
import queue
import sys
import time
from collections.abc import Sequence
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Barrier, Event
from pathlib import Path
from threading import BrokenBarrierError
from typing import Any, NamedTuple

from dflash_toolkit.checkpoint.reader import locate
from dflash_toolkit.command_line import run_command
from dflash_toolkit.config import UserError
from dflash_toolkit.data.prompts import encode_chat, read_prompt_sets
from dflash_toolkit.evaluation.report.markdown import render_table
from dflash_toolkit.evaluation.report.table import Table, number
from dflash_toolkit.files import write_json
from dflash_toolkit.models.dflash.checkpoint import read_config
from dflash_toolkit.models.target_files import load_config, load_generation_config, load_tokenizer
from dflash_toolkit.runtime.graphs import no_collection
from dflash_toolkit.stop_tokens import stop_tokens
from dflash_toolkit.train.responses.vllm_backend import import_vllm

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository, for `scripts`

from scripts.measure import StepEngine, add_loads, decode_load, fastest, loads_of, setting, without_folders
from scripts.traffic import Answer

COUNTERS = ("vllm:spec_decode_num_drafts", "vllm:spec_decode_num_accepted_tokens")


class Work(NamedTuple):
    """The work of one engine."""

    k: int
    options: dict[str, Any]  # arguments of vllm.LLM
    sampling: dict[str, Any]  # arguments of vllm.SamplingParams
    loads: list[tuple[str, int, list[list[int]]]]  # set, requests at a time, prompts
    repeats: int
    after: Path | None


class Vllm(StepEngine):
    """vLLM's engine, step by step. Times of arrival are those of its engine process."""

    def __init__(self, llm: Any, params: Any) -> None:
        self._engine, self._params = llm.llm_engine, params
        self._answers: dict[str, Answer] = {}
        self._count = 0

    def submit(self, prompt: list[int], max_tokens: int | None = None) -> Answer:
        self._count += 1
        name, params = str(self._count), self._params
        if max_tokens is not None:
            params = copy.copy(params)
            params.max_tokens = max_tokens
        answer = self._answers[name] = Answer(time.monotonic(), handle=name)
        self._engine.add_request(name, {"prompt_token_ids": prompt}, params)
        return answer

    def step(self) -> bool:
        for output in self._engine.step():
            if (answer := self._answers.get(output.request_id)) is None:
                continue  # cancelled
            answer.add(output.metrics.last_token_ts, output.outputs[0].token_ids)
            answer.cached = output.num_cached_tokens or 0
            if output.finished:
                answer.finished = True
                del self._answers[output.request_id]
        return bool(self._engine.has_unfinished_requests())

    def cancel(self, answer: Answer) -> None:
        if self._answers.pop(answer.handle, None) is not None:
            self._engine.abort_request([answer.handle])


def work_on(work: Work, found: "Queue[tuple[int, Any]]", started: Barrier, turn: Event) -> None:
    """Start an engine, and once all are there and it is its turn, measure every load."""
    vllm = import_vllm()
    try:
        llm = vllm.LLM(**work.options)
    except (ValueError, RuntimeError, OSError) as error:
        started.abort()
        found.put((work.k, f"vllm cannot start: {' '.join(str(error).split())}"))
        return
    found.put((work.k, {"vllm": vllm.__version__}))
    try:
        with contextlib.suppress(BrokenBarrierError):  # another one could not start
            started.wait()
        while work.after is not None and not work.after.exists():
            time.sleep(0.5)
        kind = vllm.sampling_params.RequestOutputKind.DELTA
        decoder = Vllm(llm, vllm.SamplingParams(**work.sampling, output_kind=kind))

        def counters() -> list[int]:
            values = {metric.name: metric.value for metric in llm.get_metrics() if metric.name in COUNTERS}
            return [values.get(name, 0) for name in COUNTERS]

        turn.wait()
        for name, at_a_time, prompts in work.loads:
            decode_load(decoder, prompts, at_a_time)  # compiles what is missing
            before = counters()
            with no_collection():  # as there
                row = fastest([decode_load(decoder, prompts, at_a_time)[0] for _ in range(work.repeats)])
            drafts, accepted = (b - a for a, b in zip(before, counters(), strict=True))
            tau = {"tau": round(1 + accepted / drafts, 4)} if drafts else {}
            found.put((work.k, {"k": work.k, "set": name, "requests": at_a_time, **row, **tau}))
    except Exception as error:
        found.put((work.k, f"{type(error).__name__}: {' '.join(str(error).split())}"))
        raise
    else:
        found.put((work.k, None))
    finally:
        llm.llm_engine.engine_core.shutdown()  # a process that this one would wait for


def run(args: argparse.Namespace) -> None:
    if not args.output.absolute().parent.is_dir():
        raise UserError(f"--output {args.output}: no such directory")
    import_vllm()
    drafter, config = locate("drafter", args.drafter), load_config(args.target)
    most = read_config(drafter).block_size - 1
    if wrong := [k for k in args.k if not 0 <= k <= most]:
        raise UserError(f"--k {wrong[0]}: the drafter drafts up to {most} tokens, and 0 decodes plainly")
    tokenizer = load_tokenizer(args.target)
    sets = {
        name: [encode_chat(tokenizer, row.messages) for row in rows]
        for name, rows in read_prompt_sets(args.prompts, args.limit).items()
    }
    options = {
        "model": args.target, "dtype": "bfloat16", "max_num_seqs": max(args.requests),
        "max_model_len": args.max_model_len, "kv_cache_memory_bytes": int(args.kv_gib * 2**30),
        "enable_prefix_caching": False, "disable_log_stats": False, "skip_tokenizer_init": True,
        "generation_config": "vllm",
    }  # fmt: skip
    sampling = {
        "temperature": 0.0, "max_tokens": args.max_tokens, "detokenize": False,
        "stop_token_ids": list(stop_tokens(config, load_generation_config(args.target), tokenizer)),
    }  # fmt: skip
    result = setting("peers/vllm_requests.py", [without_folders(word) for word in args.argv]) | {"rows": []}
    context = multiprocessing.get_context("spawn")
    found, started = context.Queue(), context.Barrier(len(args.k))
    turns = {k: context.Event() for k in args.k}
    loads, processes = loads_of(sets, args), {}
    for k in args.k:
        more = {"method": "dflash", "model": str(drafter), "num_speculative_tokens": k}
        own = options | ({"speculative_config": more} if k else {})
        work = Work(k, own, sampling, loads, args.repeats, args.after)
        processes[k] = context.Process(target=work_on, args=(work, found, started, turns[k]))
        processes[k].start()
    failures = []
    while processes:
        turns[next(iter(processes))].set()  # the first that is left, whatever became of those before it
        ended = [k for k, process in processes.items() if not process.is_alive()]
        try:
            k, row = found.get(timeout=5)
        except queue.Empty:
            if not ended:
                continue
            started.abort()  # a killed process never reaches the barrier
            k, row = ended[0], f"its process ended with {processes[ended[0]].exitcode}"
        if row is None or isinstance(row, str):
            processes.pop(k, None)
            failures += [f"k {k}: {row}"] if row else []
        elif "vllm" in row:
            result["versions"] |= row
        else:
            result["rows"].append(row)
            write_json(args.output, result)
            print(row, file=sys.stderr, flush=True)
    columns = ("set", "requests", "k", "tokens_per_second", "tau")
    rows = sorted(result["rows"], key=lambda row: (row["set"], row["requests"]))
    shown = tuple((r["set"], str(r["requests"]), str(r["k"]), *(number(r.get(c)) for c in columns[3:])) for r in rows)
    print(render_table(Table("", columns, shown)))
    if failures:
        raise UserError("; ".join(failures))


def main(argv: Sequence[str] | None = None) -> int:
    """The program. Exit codes: 0 done, 2 a mistake (one line)."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_loads(parser)
    parser.add_argument(
        "--k", type=int, nargs="+", default=[15, 7, 3], help="tokens drafted per step; 0 decodes without drafts"
    )
    parser.add_argument("--kv-gib", type=float, default=4.0, help="KV cache of each engine in GiB")
    parser.add_argument("--after", type=Path, metavar="FILE", help="wait for this file before measuring")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args(argv)
    args.argv, args.k = list(sys.argv[1:] if argv is None else argv), list(dict.fromkeys(args.k))
    return run_command(lambda: run(args))


if __name__ == "__main__":
    raise SystemExit(main())
