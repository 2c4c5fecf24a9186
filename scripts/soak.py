"""Sends thousands of mixed requests to a server that is killed and restarted; finds leaks and changed answers.

    python scripts/soak.py --target DIR --drafter DIR --requests 10000 --fuzz --output soak.json

First each deterministic request (greedy or seeded) runs alone, without drafts. It runs twice, because a prefix hit
cuts the prompt elsewhere, which may break a near-tie differently on a GPU. Then clients send all of them
concurrently: whole and streamed, with slow readers, disconnects, incomplete requests, garbage and invalid requests.
After a quarter of the requests the engine's process is killed; after half of them the server is stopped and
restarted. With --fuzz, hostile requests (`fuzz.py`) are sent during the whole time. Exit code 1: an answer differs from
the one given alone, a status is unexpected, the log has a traceback, or pages, memory, files, threads or processes
leak.
"""

import argparse
import asyncio
import collections
import contextlib
import json
import math
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from dflash_toolkit.command_line import run_command
from dflash_toolkit.config import UserError
from dflash_toolkit.files import write_json
from dflash_toolkit.progress import Progress

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the repository, for `scripts`

from scripts import fuzz
from scripts.measure import setting

TALE = "What is the sum of two small odd numbers , and why does a river bend before it meets the sea ?"
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["Ada", "Bob"]}, "old": {"type": "boolean"}},
    "required": ["name", "old"],
    "additionalProperties": False,
}
REFUSED: tuple[tuple[str, Any], ...] = (
    (CHAT, {"temperature": -1}),
    (CHAT, {"max_tokens": 10**9}),
    (CHAT, {"temperature": "hot"}),
    (CHAT, {"messages": []}),
    (CHAT, {"model": "another"}),
    (CHAT, {"logit_bias": {"999999999": 1}}),
    (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nothing"}}}}),
    (TEXT, {"prompt": [[-1]]}),
    (TEXT, {"prompt": "a", "logprobs": -7}),
    ("/v1/nothing", {}),
)
GARBAGE = (b"\x16\x03\x01\x02\x00\x01", b"GET / HTTP/9.9\r\n\r\n", b"POST /v1/chat/completions HTTP/1.1\r\nContent-Le")
MEMORY_MIB = 128  # memory that a process may use in addition during the last 40 % of the requests
GONE = (httpx.TransportError, httpx.StreamError)


@dataclass
class Server:
    """dflash-serve as a process, at the same port every time."""

    argv: list[str]
    port: int
    process: Any = None
    log: Any = None
    codes: list[int] = field(default_factory=list)  # exit codes

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        argv = [sys.executable, "-m", "dflash_toolkit.serve.cli", *self.argv, "--port", str(self.port), "--restart"]
        self.process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=self.log)
        if not self.process.stdout.readline():
            raise UserError(f"the server did not start; see {self.log.name}")

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.codes.append(self.process.wait(timeout=120))

    def below(self) -> list[int]:
        """Its processes, the engine's among them."""
        return [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if _parent(pid) == self.process.pid]

    def engine(self) -> int:
        return max(self.below(), key=lambda pid: _status(pid, "VmRSS"))

    def figures(self) -> dict[str, int]:
        """Returns the memory and files that the server holds."""
        pids = [self.process.pid, self.engine()]
        return {
            "front_rss_mib": _status(pids[0], "VmRSS") // 1024,
            "engine_rss_mib": _status(pids[1], "VmRSS") // 1024,
            "threads": sum(_status(pid, "Threads") for pid in pids),
            "files": sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in pids),
            "processes": len(self.below()) + 1,
        }


def _status(pid: int, name: str) -> int:
    with contextlib.suppress(OSError, StopIteration):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith(f"{name}:")).split()[1])
    return 0


def _parent(pid: int) -> int:
    return _status(pid, "PPid")


# ---- requests --------------------------------------------------------------------------------------------------------


def decided(dice: random.Random, count: int, max_tokens: int = 48) -> list[tuple[str, dict[str, Any]]]:
    """Requests with deterministic answers."""

    def words(least: int, most: int) -> str:
        return " ".join(dice.choice(TALE.split()) for _ in range(dice.randint(least, most)))

    shared = words(30, 40)  # prefixes are found in the cache
    forms: list[dict[str, Any]] = [
        {},
        {"temperature": 1.0, "seed": 7},
        {"temperature": 0.8, "top_p": 0.9, "top_k": 20, "seed": 1 << 40},
        {"stop": ["e", "th"]},
        {"logprobs": True, "top_logprobs": 2},
        {"frequency_penalty": 0.7, "presence_penalty": 0.3},
        {"repetition_penalty": 1.3},
        {"min_tokens": 5},
        {"ignore_eos": True},
        {"logit_bias": {"20": 5.0, "21": -100}},
        {"structured_outputs": {"choice": ["yes", "no", "perhaps so"]}},
        {"structured_outputs": {"regex": "[a-d]{3,9}!"}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "who", "schema": SCHEMA, "strict": True}}},
        {"speculative": {"num_speculative_tokens": 0}},
    ]
    found = []
    for i in range(count):
        form = {"temperature": 0, "max_tokens": dice.randint(1, max_tokens)} | forms[i % len(forms)]
        if "structured_outputs" in form or "response_format" in form:
            form["max_tokens"] = 64
        form["max_tokens"] = max(form["max_tokens"], form.get("min_tokens", 0))
        text = (shared + " " if dice.random() < 0.5 else "") + words(1, 60)
        if dice.random() < 0.3 and "logprobs" not in form:
            found.append((TEXT, {"prompt": text} | form))
        else:
            turns = [{"role": "user", "content": text}]
            if dice.random() < 0.3:
                turns += [{"role": "assistant", "content": words(1, 9)}, {"role": "user", "content": words(1, 9)}]
            found.append((CHAT, {"messages": turns} | form))
    return found


def text_of(path: str, choice: dict[str, Any]) -> str:
    if path == TEXT:
        return str(choice["text"])
    said = choice.get("message") or choice.get("delta") or {}
    return (said.get("reasoning_content") or "") + "|" + (said.get("content") or "")


@dataclass
class Soak:
    """The clients' side."""

    url: str
    dice: random.Random
    asked: list[tuple[str, dict[str, Any]]]
    model: str = "model"
    expected: list[list[str]] = field(default_factory=list)
    counts: collections.Counter[str] = field(default_factory=collections.Counter)
    failures: list[str] = field(default_factory=list)
    disturbed_until: float = 0.0  # until then the server may be away
    fuzzer: fuzz.Fuzzer | None = None

    def disturb(self, seconds: float) -> None:
        self.disturbed_until = max(self.disturbed_until, time.monotonic() + seconds)

    async def alone(self, client: httpx.AsyncClient) -> None:
        self.expected = [[] for _ in self.asked]
        for (path, body), answers in 2 * list(zip(self.asked, self.expected, strict=True)):
            plain = {"speculative": {"num_speculative_tokens": 0}}
            reply = await client.post(path, json={"model": self.model, **body, **plain})
            if reply.status_code != 200:
                raise UserError(f"{json.dumps(body)[:300]}: {reply.text[:300]}")
            answers.append(text_of(path, reply.json()["choices"][0]))

    async def one(self, client: httpx.AsyncClient, kind: str | None = None) -> bool:
        """Sends one request, of a random kind by default; returns False if it was lost to a disturbance."""
        kinds = ("whole", "streamed", "slow", "leaves", "several", "refused", "garbage", "responses")
        kind = kind or self.dice.choices(kinds, (30, 30, 5, 12, 5, 10, 4, 4))[0]
        began = time.monotonic()
        try:
            outcome = await getattr(self, f"_{kind}")(client)
        except (*GONE, OSError, ConnectionError) as error:
            outcome = f"lost: {type(error).__name__}"
        self.counts[kind] += 1
        if outcome is not None:
            if began < self.disturbed_until:
                self.counts["lost to the disturbance"] += 1
                return False
            self.failures.append(f"{kind}: {outcome}")
        return True

    def _pick(self) -> tuple[int, str, dict[str, Any]]:
        number = self.dice.randrange(len(self.asked))
        path, body = self.asked[number]
        return number, path, {"model": self.model, **body}

    def _compare(self, number: int, text: str) -> str | None:
        self.counts["compared"] += 1
        if text in self.expected[number]:
            return None
        self.counts["different"] += 1
        return f"request {number}, alone {self.expected[number]}, now {text!r}"

    async def _whole(self, client: httpx.AsyncClient) -> str | None:
        number, path, body = self._pick()
        reply = await client.post(path, json=body)
        if reply.status_code != 200:
            return f"{reply.status_code} {reply.text[:200]}"
        return self._compare(number, text_of(path, reply.json()["choices"][0]))

    async def _streamed(self, client: httpx.AsyncClient, pause: float = 0.0, least: int = 1 << 30) -> str | None:
        number, path, body = self._pick()
        parts: list[tuple[str, ...]] = []
        async with client.stream("POST", path, json={**body, "stream": True}) as reply:
            if reply.status_code != 200:
                return f"{reply.status_code} {(await reply.aread())[:200]!r}"
            async for line in reply.aiter_lines():
                if line == "data: [DONE]":
                    joined = "|".join("".join(part) for part in zip(*parts, strict=True)) if parts else ""
                    return self._compare(number, joined)
                if line.startswith("data: "):
                    chunk = json.loads(line[6:])
                    if "error" in chunk:
                        return str(chunk["error"])
                    parts += [tuple(text_of(path, choice).split("|", 1)) for choice in chunk["choices"]]
                if len(parts) >= least:
                    return None
                await asyncio.sleep(pause)
        return "the stream ended early"

    async def _slow(self, client: httpx.AsyncClient) -> str | None:
        return await self._streamed(client, pause=0.02)

    async def _leaves(self, client: httpx.AsyncClient) -> str | None:
        return await self._streamed(client, least=self.dice.randrange(6))

    async def _several(self, client: httpx.AsyncClient) -> str | None:
        _, path, body = self._pick()
        count = self.dice.randint(2, 5)
        reply = await client.post(path, json={**body, "n": count, "temperature": 1.0, "seed": None})
        if reply.status_code != 200 or len(reply.json()["choices"]) != count:
            return f"{reply.status_code} {reply.text[:200]}"
        return None

    async def _responses(self, client: httpx.AsyncClient) -> str | None:
        body = {"model": self.model, "input": "Who ?", "temperature": 0, "max_output_tokens": 9}
        reply = await client.post("/v1/responses", json=body)
        return None if reply.status_code == 200 else f"{reply.status_code} {reply.text[:200]}"

    async def _refused(self, client: httpx.AsyncClient) -> str | None:
        path, change = self.dice.choice(REFUSED)
        least = {"messages": [{"role": "user", "content": "a"}]} if path == CHAT else {}
        body = {"model": self.model, **least, **change}
        reply = await client.post(path, json=body)
        return None if 400 <= reply.status_code < 500 else f"{change}: {reply.status_code} {reply.text[:200]}"

    async def _hostile(self, client: httpx.AsyncClient) -> str | None:
        return await self.fuzzer.one() if self.fuzzer else None

    async def _garbage(self, client: httpx.AsyncClient) -> str | None:
        reader, writer = await asyncio.open_connection(client.base_url.host, client.base_url.port)
        writer.write(self.dice.choice(GARBAGE))
        with contextlib.suppress(OSError):
            await writer.drain()
            await asyncio.wait_for(reader.read(200), 0.2)
        writer.close()
        return None


def metric(text: str, name: str) -> float:
    return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith((f"{name} ", f"{name}{{")))


async def settled(client: httpx.AsyncClient) -> dict[str, float]:
    """Returns the resources that the server reports once it is idle."""
    of_vllm = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    names = ("dflash_requests_open", *(f"vllm:{name}" for name in of_vllm))
    for _ in range(100):
        text = (await client.get("/metrics")).text
        held = {name: metric(text, name) for name in names}
        if not any(held.values()):
            break
        await asyncio.sleep(0.1)
    return held


async def soak(args: argparse.Namespace, server: Server, result: dict[str, Any]) -> list[str]:
    dice = random.Random(args.seed)
    state = Soak(server.url, dice, decided(dice, args.distinct, args.max_tokens))
    connections = httpx.Limits(max_connections=None, max_keepalive_connections=args.clients)
    left, figures = args.requests, {}
    async with httpx.AsyncClient(base_url=server.url, timeout=300, limits=connections) as client:
        await state.alone(client)
        watch = fuzz.Watch(server.url, server.process.pid, disturbed=lambda: time.monotonic() < state.disturbed_until)
        if args.fuzz:
            state.fuzzer = fuzz.Fuzzer(server.url, await fuzz.description(server.url), args.seed)
        began = time.monotonic()

        with Progress("requests", args.requests) as bar:

            async def hostile() -> None:
                while left > 0:
                    await state.one(client, "hostile")
                    if time.monotonic() < state.disturbed_until:
                        await asyncio.sleep(1.0)

            async def worker() -> None:
                nonlocal left
                while left > 0:
                    if time.monotonic() - began > args.at_most:
                        result["requests"], left = result["requests"] - left, 0
                        break
                    left -= 1
                    if await state.one(client):
                        bar.advance()
                    else:
                        left += 1  # all requests of the result have met a server
                    if time.monotonic() < state.disturbed_until:
                        await asyncio.sleep(1.0)  # clients wait while the server is down

            async def disturbances() -> None:
                while left > 0.75 * args.requests:
                    await asyncio.sleep(0.05)
                state.disturb(3600)
                os.kill(server.engine(), signal.SIGKILL)
                while (await client.get("/ready")).status_code == 200:  # noticed
                    await asyncio.sleep(0.05)
                while (await client.get("/ready")).status_code != 200:
                    await asyncio.sleep(0.1)
                state.disturbed_until = time.monotonic()
                result["engine_killed"] = "came back"
                while left > 0.5 * args.requests:
                    await asyncio.sleep(0.05)
                state.disturb(3600)
                at = time.monotonic()
                await asyncio.to_thread(server.stop)
                result["drained_s"] = time.monotonic() - at
                await asyncio.to_thread(server.start)
                watch.pid = server.process.pid
                state.disturbed_until = time.monotonic()
                while left > 0.4 * args.requests:
                    await asyncio.sleep(0.05)
                figures["before"] = server.figures()

            watching = asyncio.create_task(watch.run())
            fuzzing = [asyncio.create_task(hostile()) for _ in range(args.fuzz)]
            await asyncio.gather(disturbances(), *(worker() for _ in range(args.clients)))
            await asyncio.gather(*fuzzing)
            watching.cancel()
        result["seconds"] = time.monotonic() - began
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:  # the other one's connections are closed
        result["held"] = await settled(client)
    watch.after = await fuzz.settled_memory(watch)
    figures["after"] = server.figures()
    await asyncio.to_thread(server.stop)
    result |= {"counts": dict(state.counts), "figures": figures, "exit_codes": server.codes}
    result |= {"seed": args.seed, **fuzz.figures(watch), "statuses": dict(state.fuzzer.counts if state.fuzzer else {})}
    failures = state.failures + watch.failures + fuzz.bad_lines(Path(server.log.name).read_text(errors="replace"))
    failures += [f"{name} is {value} at the end" for name, value in result["held"].items() if value]
    failures += [f"exit codes {server.codes}"] if any(server.codes) else []
    limits = {"threads": 8, "files": args.clients + 16, "processes": 0}  # files: connections that stay open
    for name, most in (limits | dict.fromkeys(("front_rss_mib", "engine_rss_mib"), MEMORY_MIB)).items():
        if figures["after"][name] > figures["before"][name] + most:
            failures.append(f"{name}: {figures['before'][name]}, later {figures['after'][name]}")
    return failures


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--drafter", required=True)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--at-most", type=float, default=math.inf, metavar="S", help="seconds; then no more is sent")
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--distinct", type=int, default=84, help="distinct requests, each first sent alone")
    parser.add_argument("--max-tokens", type=int, default=48, help="length limit of answers")
    parser.add_argument("--max-num-seqs", type=int, default=8, help="batch size (default: 8, which is batch-invariant)")
    parser.add_argument("--max-model-len", type=int, default=512)
    parser.add_argument("--kv-cache-tokens", type=int, help="of the server (default: what the memory allows)")
    parser.add_argument("--device", default="auto")
    parser.add_argument(
        "--fuzz",
        type=int,
        nargs="?",
        const=4,
        default=0,
        help="concurrent hostile clients (default: 0, without a number: 4)",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args(argv)
    words = ["--target", args.target, "--drafter", args.drafter, "--served-model-name", "model", "--no-access-log"]
    words += ["--max-num-seqs", str(args.max_num_seqs), "--max-model-len", str(args.max_model_len)]
    words += ["--device", args.device]
    if args.kv_cache_tokens is not None:
        words += ["--kv-cache-tokens", str(args.kv_cache_tokens)]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    result: dict[str, Any] = {**setting("soak.py"), "requests": args.requests, "clients": args.clients}
    with args.output.with_suffix(".log").open("wb") as log:
        server = Server(words, port, log=log)
        server.start()
        try:
            failures = asyncio.run(soak(args, server, result))
        finally:
            if server.process.poll() is None:
                server.process.kill()
    result |= {"failures": len(failures), "first_failures": failures[:20]}
    write_json(args.output, result)
    for failure in failures[:20]:
        print(failure, file=sys.stderr)
    print(
        json.dumps(
            {key: result[key] for key in ("counts", "held", "figures", "health", "seconds", "exit_codes", "failures")}
        )
    )
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(run_command(main))
