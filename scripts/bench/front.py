"""Measures the CPU time of dflash-serve per request, per chunk and per step, without a GPU.

    python scripts/bench/front.py --target TARGET --prompts gsm8k=gsm8k_test.jsonl --output front.json

An engine that computes nothing takes the place of the real one. It repeats the prompts as answers, at a fixed time per
step, so only the tokenizer of the target is read. The front ends, the socket to the engine, and the engine's loop are
real. Two loads, of short and of long answers, separate the cost of a request from that of a chunk.
"""

import argparse
import itertools
import multiprocessing
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from dflash_toolkit.command_line import run_command
from dflash_toolkit.data.prompts import read_prompt_sets
from dflash_toolkit.files import write_json
from dflash_toolkit.sampling import SamplingParams

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository, for `scripts`

from scripts.bench.serve import chat_bodies, cpu_seconds, load

CONTEXT = 2048
TOKENS = (11, 401)  # lengths of an answer


class PacedEngine:
    """An engine with steps of a fixed time and a fixed number of tokens. It repeats the prompt."""

    def __init__(self, step_s: float, per_step: int, max_num_seqs: int, vocabulary: int) -> None:
        from dflash_toolkit.grammar import Grammars
        from dflash_toolkit.runtime.options import EngineOptions
        from dflash_toolkit.runtime.request import Capacity

        self._step_s, self._per_step = step_s, per_step
        self.capacity = Capacity(CONTEXT, vocabulary)
        self.running: list[Any] = []
        self.versions = 0, 0
        self.scheduler = self
        self.grammars = Grammars(None, vocabulary, ())
        self.options = EngineOptions()
        self.runner = SimpleNamespace(
            device=SimpleNamespace(type="cpu"),
            dtype="none",
            max_num_seqs=max_num_seqs,
            max_block=per_step,
            graphs=SimpleNamespace(started=False),
        )
        self._due = 0.0
        self.steps = 0

    def matcher(self, params: SamplingParams) -> None: ...

    def prepare(self, *, everything: bool) -> bool:
        """Returns that no steps are left to capture."""
        return False

    @property
    def idle(self) -> bool:
        return not self.running

    def request(self, prompt: list[int], params: SamplingParams, on_progress: Callable[..., None], **_: Any) -> Any:
        from dflash_toolkit.runtime.request import Request

        limit = self.capacity.check(prompt, params)
        return Request(prompt, params, frozenset(), limit, on_progress)

    def add(self, request: Any) -> None:
        self.running.append(request)

    def cancel(self, request: Any) -> None:
        request.cancelled = True

    def step(self) -> None:
        from dflash_toolkit.runtime.request import Committed

        if not self.running:
            return
        self.steps += 1
        now = time.perf_counter()
        self._due = max(self._due + self._step_s, now)
        time.sleep(self._due - now)
        for request in self.running:
            if request.cancelled:
                continue
            done, prompt = len(request.tokens), request.prompt_ids
            if done:
                tokens = [prompt[i % len(prompt)] for i in range(done, done + self._per_step)]
                request.on_progress(request, request.add_step(self._per_step, Committed(tokens)))
            else:
                request.add_first(Committed(prompt[:1]))
                request.on_progress(request, None)
        self.running = [request for request in self.running if not (request.finished or request.cancelled)]


def engine_main(args: argparse.Namespace, vocabulary: int, path: Path, control: socket.socket, pipe: Any) -> None:
    """Runs the engine's process, which reports the CPU time of its loop without `PacedEngine.step` on request."""
    from dflash_toolkit.runtime.loop import EngineLoop, info_of

    engine = PacedEngine(args.step_ms / 1e3, args.tokens_per_step, args.max_num_seqs, vocabulary)
    loop = EngineLoop(engine, path, control)  # type: ignore[arg-type]
    clock, real = time.pthread_getcpuclockid(threading.get_ident()), engine.step
    stepped_s = 0.0

    def step() -> None:
        nonlocal stepped_s
        began = time.thread_time()
        real()
        stepped_s += time.thread_time() - began

    def report() -> None:
        while True:
            pipe.recv()
            pipe.send((time.clock_gettime(clock) - stepped_s, engine.steps))

    engine.step = step  # type: ignore[method-assign]
    pipe.send(info_of(engine))  # type: ignore[arg-type]
    threading.Thread(target=report, daemon=True).start()
    loop.run()


def measure(args: argparse.Namespace, conversations: list[list[dict[str, str]]]) -> dict[str, Any]:
    from dflash_toolkit.models.target_files import load_tokenizer
    from dflash_toolkit.serve.config import ServeConfig
    from dflash_toolkit.serve.front import front_main
    from dflash_toolkit.serve.server import bind, share_address, url_of

    context = multiprocessing.get_context("spawn")
    config = ServeConfig(
        target=args.target, served_model_name=("model",), access_log=False, api_server_count=args.fronts
    )
    with tempfile.TemporaryDirectory() as folder, bind("127.0.0.1", 0, True) as bound:
        path = Path(folder) / "engine"
        ours, control = socket.socketpair()
        pipe, end = context.Pipe()
        vocabulary = len(load_tokenizer(args.target))
        engine = context.Process(target=engine_main, args=(args, vocabulary, path, control, end), daemon=True)
        engine.start()
        end.close()
        info = pipe.recv()
        fronts, pipes = [], []
        for number in range(args.fronts):
            mine, its = context.Pipe()
            options = (config, (), share_address(bound), path, number, its)
            fronts.append(context.Process(target=front_main, args=options, daemon=True))
            fronts[-1].start()
            its.close()
            pipes.append(mine)
        for mine in pipes:
            assert mine.recv() == "loaded"
            mine.send(info)
        for mine in pipes:
            assert mine.recv() == "ready"

        def used() -> tuple[float, float, int]:
            pipe.send(None)
            loop_s, steps = pipe.recv()
            return sum(cpu_seconds(process.pid) for process in fronts), loop_s, steps

        rows = []
        for tokens in TOKENS:
            bodies = chat_bodies("model", conversations[: args.requests], tokens, streamed=True)
            load(url_of(bound), bodies[: 2 * args.clients], args.clients, args.processes)  # warms up
            before = used()
            row = load(url_of(bound), bodies, args.clients, args.processes)
            front_s, loop_s, steps = (after - b for after, b in zip(used(), before, strict=True))
            chunks = 1 + -(-(tokens - 1) // args.tokens_per_step)
            rows.append(
                {
                    "tokens": tokens,
                    "chunks": chunks,
                    "front_us_per_request": 1e6 * front_s / len(bodies),
                    "loop_us_per_request": 1e6 * loop_s / len(bodies),
                    "loop_us_per_step": 1e6 * loop_s / steps,
                    **row,
                }
            )
            print({k: round(v, 2) for k, v in rows[-1].items()}, flush=True)
        short, long = rows
        result = {}
        for part in ("front", "loop"):
            name = f"{part}_us_per_request"
            slope = (long[name] - short[name]) / (long["chunks"] - short["chunks"])
            result |= {f"{part}_us_per_chunk": slope, name: short[name] - short["chunks"] * slope}
        print({k: round(v, 1) for k, v in result.items()})
        ours.close()
        for mine in pipes:
            mine.close()
        for process in (*fronts, engine):
            process.join(10)
        return result | {"rows": rows}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--prompts", required=True, help="a prompt set, e.g. gsm8k=gsm8k_test.jsonl")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--requests", type=int, default=320)
    parser.add_argument("--fronts", type=int, default=1, help="front-end processes")
    parser.add_argument("--step-ms", type=float, default=5.0)
    parser.add_argument("--tokens-per-step", type=int, default=5)
    parser.add_argument("--max-num-seqs", type=int, default=128)
    parser.add_argument("--processes", type=int, default=1, help="processes that run the clients")
    parser.add_argument("--output", type=Path, required=True)
    from scripts.measure import setting  # needs torch, which processes of clients do not import

    args = parser.parse_args(argv)
    rows = [row for rows in read_prompt_sets([args.prompts]).values() for row in rows]
    conversations = list(itertools.islice(itertools.cycle([list(row.messages) for row in rows]), args.requests))
    write_json(args.output, setting("bench/front.py", argv) | measure(args, conversations))


if __name__ == "__main__":
    raise SystemExit(run_command(main))
