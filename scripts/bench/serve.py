"""Measures what an OpenAI server adds to its engine: tokens per second, time to first token, gaps between chunks.

    python scripts/bench/serve.py --target model --drafter drafter --prompts gsm8k=gsm8k_test.jsonl --output ours.json
    python scripts/bench/serve.py --url http://127.0.0.1:8001 --prompts gsm8k=gsm8k_test.jsonl --output peer.json

The first command measures the engine alone, in this process with as many concurrent requests, and then
dflash-serve. Every client sends one chat after another, greedy, with exactly `--tokens` tokens per answer. Clients
run in their own processes and parse HTTP by hand, because a client library would be slower than the server.
"""

import argparse
import asyncio
import contextlib
import gc
import itertools
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from dflash_toolkit.command_line import run_command
from dflash_toolkit.config import UserError
from dflash_toolkit.data.prompts import read_prompt_sets
from dflash_toolkit.files import write_json

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository, for `scripts`

WARM_UP_TOKENS = 64  # length of an answer; some steps are only captured when a batch first needs them


def quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


# ---- clients -------------------------------------------------------------------------------------------------------


def chat_bodies(
    model: str, conversations: Sequence[list[dict[str, str]]], tokens: int, streamed: bool
) -> list[dict[str, Any]]:
    """Returns greedy requests with answers of exactly `tokens` tokens."""
    options = {"model": model, "max_tokens": tokens, "ignore_eos": True, "temperature": 0, "stream": streamed}
    options |= {"stream_options": {"include_usage": True}} if streamed else {}
    return [{**options, "messages": messages} for messages in conversations]


async def ask(address: tuple[str, int], body: dict[str, Any]) -> dict[str, Any]:
    """One request: its seconds to the first text, those between chunks, and its tokens."""
    raw = json.dumps(body).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(raw)}"
    )
    reader, writer = await asyncio.open_connection(*address)
    try:
        began = time.perf_counter()
        writer.write(head.encode() + b"\r\nConnection: close\r\n\r\n" + raw)
        status = await reader.readline()
        if b" 200 " not in status:
            raise UserError(f"the server said {status.decode().strip()}: {(await reader.read(2000)).decode()}")
        arrivals, tokens = [], 0
        whole = b""
        async for line in reader:
            if body["stream"]:
                if line.startswith(b"data: {"):
                    if b'"content":"' in line and b'"content":""' not in line:
                        arrivals.append(time.perf_counter())
                    elif b'"usage":{' in line:
                        tokens = json.loads(line[6:])["usage"]["completion_tokens"]
            else:
                whole += line
        ended = time.perf_counter()
    finally:
        writer.close()
    if not body["stream"]:
        found = whole[whole.index(b"{") : whole.rindex(b"}") + 1]
        return {"tokens": json.loads(found)["usage"]["completion_tokens"], "seconds": ended - began, "gaps": []}
    gaps = [later - earlier for earlier, later in itertools.pairwise(arrivals)]
    return {"tokens": tokens, "seconds": ended - began, "first": arrivals[0] - began, "gaps": gaps}


def clients(address: tuple[str, int], bodies: list[dict[str, Any]], count: int, start: Any, results: Any) -> None:
    """Runs `count` clients in a process, which start together with those of the other processes."""

    async def run() -> list[dict[str, Any]]:
        left = iter(bodies)
        found: list[dict[str, Any]] = []

        async def client() -> None:
            for body in left:
                found.append(await ask(address, body))

        await asyncio.gather(*(client() for _ in range(count)))
        return found

    start.wait()
    try:
        results.put(asyncio.run(run()))
    except BaseException as error:
        results.put(repr(error))


def load(url: str, bodies: list[dict[str, Any]], count: int, processes: int) -> dict[str, Any]:
    """Figures of `count` clients at a time."""
    parts = urllib.parse.urlparse(url)
    address = (parts.hostname or "", parts.port or 80)
    processes = min(processes, count)
    context = multiprocessing.get_context("spawn")
    start, results = context.Barrier(processes + 1), context.Queue()
    shares = [(bodies[i::processes], count // processes + (i < count % processes)) for i in range(processes)]
    workers = [context.Process(target=clients, args=(address, *share, start, results)) for share in shares]
    for worker in workers:
        worker.start()
    start.wait()  # until all have imported what they need
    began = time.perf_counter()
    found = []
    for _ in workers:
        part = results.get()
        if isinstance(part, str):
            raise UserError(part)
        found += part
    seconds = time.perf_counter() - began
    for worker in workers:
        worker.join()
    gaps = [gap for answer in found for gap in answer["gaps"]]
    row = {
        "requests": len(found),
        "tokens_per_second": sum(answer["tokens"] for answer in found) / seconds,
        "latency_ms": 1e3 * statistics.median(answer["seconds"] for answer in found),
    }
    if gaps:
        first = [answer["first"] for answer in found]
        row |= {
            "first_ms": 1e3 * statistics.median(first),
            "first_p99_ms": 1e3 * quantile(first, 0.99),
            "gap_ms": 1e3 * statistics.median(gaps),
            "gap_p99_ms": 1e3 * quantile(gaps, 0.99),
        }
    return row


def cpu_seconds(pid: int) -> float:
    """Returns the CPU seconds that the threads of a process have used."""
    seconds = 0.0
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):  # the thread has ended
            seconds += int((task / "schedstat").read_text().split()[0]) / 1e9
    return seconds


def processes_of(pid: int) -> list[int]:
    """Returns a server's processes: the first front end and those that it has started."""
    return [pid, *map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())]


# ---- the engine alone ----------------------------------------------------------------------------------------------


def decode(engine: Any, prompts: Iterator[list[int]], tokens: int, count: int) -> dict[str, Any]:
    """Decodes prompts, `count` at a time."""
    from dflash_toolkit.sampling import SamplingParams

    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    first: list[float] = []
    steps: list[float] = []
    running: list[Any] = []
    done = 0
    began = before = time.perf_counter()
    while True:
        while len(running) < count and (prompt := next(prompts, None)) is not None:
            running.append(engine.submit(prompt, params))
        if not running:
            break
        engine.step()
        now = time.perf_counter()
        steps.append(now - before)
        before = now
        for request in [request for request in running if request.finished]:
            running.remove(request)
            done += len(request.tokens)
            first.append(request.generation.prefill_s)
    return {
        "clients": count,
        "tokens_per_second": done / (time.perf_counter() - began),
        "first_ms": 1e3 * statistics.median(first),
        "first_p99_ms": 1e3 * quantile(first, 0.99),
        "step_ms": 1e3 * statistics.median(steps),
    }


def alone(args: argparse.Namespace, conversations: list[list[dict[str, str]]]) -> Iterator[dict[str, Any]]:
    """The same requests without HTTP and text."""
    from dflash_toolkit.data.prompts import encode_chat
    from dflash_toolkit.runtime import EngineOptions, load_engine

    options = EngineOptions(max_num_seqs=args.max_num_seqs, max_model_len=args.max_model_len)
    engine, tokenizer = load_engine(args.target, args.drafter, args.device, options=options)
    while engine.prepare(everything=True):
        pass
    encoded = [list(encode_chat(tokenizer, messages)) for messages in conversations]

    for count in args.clients:
        decode(engine, iter(encoded[:count]), WARM_UP_TOKENS, count)
        yield decode(engine, iter(encoded[: requests_of(args, count)]), args.tokens, count)
    del engine
    gc.collect()
    with contextlib.suppress(ImportError):
        import torch

        if torch.cuda.is_available():
            torch.cuda.empty_cache()


@contextlib.contextmanager
def server(args: argparse.Namespace) -> Iterator[tuple[str, str, int | None]]:
    """Yields the address of a `dflash-serve` of its own, the name of its model, and its process id."""
    argv = [sys.executable, "-m", "dflash_toolkit.serve.cli", "--target", args.target, "--port", "0"]
    argv += ["--drafter", args.drafter] if args.drafter else []
    argv += ["--device", args.device, "--max-num-seqs", str(args.max_num_seqs), "--no-access-log"]
    argv += ["--max-model-len", str(args.max_model_len), "--served-model-name", "model", *args.server]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, env=os.environ) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise UserError("the server did not start; see above")
            yield line.split()[1].removesuffix("/v1"), "model", process.pid
        finally:
            process.terminate()


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target")
    parser.add_argument("--drafter")
    parser.add_argument("--url", help="URL of a running server; --model is then its model name")
    parser.add_argument("--model", default="model")
    parser.add_argument("--prompts", required=True, help="a prompt set, e.g. gsm8k=gsm8k_test.jsonl")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--requests", type=int, default=8, help="requests per client")
    parser.add_argument("--least", type=int, default=32, help="requests of a load")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--max-num-seqs", type=int, default=64)
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--processes", type=int, default=4, help="processes that run the clients")
    parser.add_argument("--streamed-only", action="store_true", help="omit the answers that are not streamed")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--server", nargs="*", default=[], metavar="WORD", help="more options for dflash-serve")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args(argv)
    if (args.target is None) == (args.url is None):
        parser.error("give either --target or --url")
    return args


def requests_of(args: argparse.Namespace, clients: int) -> int:
    """Returns the number of requests of a load."""
    return max(args.requests * clients, args.least)


def main(argv: Sequence[str] | None = None) -> None:
    from scripts.measure import setting  # needs torch, which processes of clients do not import

    args = parse(argv)
    rows = [row for rows in read_prompt_sets([args.prompts]).values() for row in rows]
    conversations = [list(row.messages) for row in rows]
    most = max(requests_of(args, count) for count in args.clients)
    conversations = (conversations * -(-most // len(conversations)))[:most]
    result: dict[str, Any] = {**setting("bench/serve.py"), "engine": [], "server": []}
    if args.target is not None:
        for row in alone(args, conversations):
            result["engine"].append(row)
            print("engine ", {k: round(v, 2) for k, v in row.items()}, flush=True)
            write_json(args.output, result)
    by_clients = {row["clients"]: row["tokens_per_second"] for row in result["engine"]}
    running = server(args) if args.url is None else contextlib.nullcontext((args.url, args.model, None))
    with running as (url, model, pid):
        for streamed in (True, False)[: 1 if args.streamed_only else 2]:
            for count in args.clients:
                bodies = chat_bodies(model, conversations[: requests_of(args, count)], args.tokens, streamed)
                load(url, chat_bodies(model, conversations[:count], WARM_UP_TOKENS, streamed), count, args.processes)
                server_processes = processes_of(pid) if pid else []
                before = [cpu_seconds(process) for process in server_processes]
                row = {"clients": count, "streamed": streamed, **load(url, bodies, count, args.processes)}
                seconds = len(bodies) * args.tokens / row["tokens_per_second"]
                row["cores"] = [
                    round((cpu_seconds(process) - used) / seconds, 2)
                    for process, used in zip(server_processes, before, strict=True)
                ]
                if count in by_clients:
                    row["of_engine"] = row["tokens_per_second"] / by_clients[count]
                result["server"].append(row)
                print("server ", {k: round(v, 2) if isinstance(v, float) else v for k, v in row.items()}, flush=True)
                write_json(args.output, result)


if __name__ == "__main__":
    raise SystemExit(run_command(main))
