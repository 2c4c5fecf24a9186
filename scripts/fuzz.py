"""Sends hostile requests to a running server and checks every answer, `/health`, memory and the log.

    python scripts/fuzz.py --url http://127.0.0.1:8000 --pid PID --cases 2000
    python scripts/fuzz.py --url http://127.0.0.1:8000 --seed 3 --only 1742

The cases come from the server's /openapi.json (`fuzz_cases.py`). Each expected answer must arrive whole, with a status
and a body that the description has. With --pid, the program also watches the server's processes: how much processor
time passes before `/health` is answered, and how much memory they take. Exit code 1: a rule is broken.
"""

import argparse
import asyncio
import collections
import contextlib
import glob
import json
import os
import re
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httptools
from jsonschema import Draft202012Validator

from dflash_toolkit.command_line import run_command
from dflash_toolkit.config import UserError
from dflash_toolkit.files import write_json
from dflash_toolkit.progress import Progress

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the repository, for `scripts`

from scripts.fuzz_cases import Case, Cases, request

ANSWER_S = 120.0  # longest wait for an expected answer
PATIENCE_S = 1.0  # wait for an answer to broken HTTP, which the server may take for an unfinished request
MAX_STALL = 25  # processor time that a thread may take before /health is answered, in units of `loop_seconds`
MAX_PEAK, MAX_GROWTH = 512, 256  # MiB that the server may use in addition, for a while and at the end
MIB = 1 << 20
LAST = re.compile(rb"data: \[DONE\]|^event: (response\.(completed|incomplete)|message_stop)\b", re.MULTILINE)
BAD_LOG = re.compile(r"Traceback \(most recent call last\)|\bCRITICAL\b|exception in ASGI|never (retrieved|awaited)")
EVERYWHERE = {"400", "404", "405", "408", "413", "431"}  # statuses of the HTTP layer and of unknown routes


# ---- one connection ------------------------------------------------------------------------------------------------


@dataclass
class Reply:
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    complete: bool = False


class Replies:
    """Parses the answers on a connection; skips `100 Continue`."""

    def __init__(self, head: bool) -> None:
        self.found: list[Reply] = []
        self.refused = False  # the server closed the connection before it had read all, which can lose an answer
        self._head, self._parser = head, httptools.HttpResponseParser(self)

    def feed(self, data: bytes) -> None:
        self._parser.feed_data(data)

    @property
    def whole(self) -> list[Reply]:
        return [reply for reply in self.found if reply.complete]

    def on_message_begin(self) -> None:
        self.found.append(Reply())

    def on_header(self, name: bytes, value: bytes) -> None:
        self.found[-1].headers[name.decode().lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self.found[-1].status = self._parser.get_status_code()
        self.found[-1].complete = self._head

    def on_body(self, body: bytes) -> None:
        self.found[-1].body += body

    def on_message_complete(self) -> None:
        self.found[-1].complete = True
        if self.found[-1].status < 200:
            self.found.pop()


@contextlib.asynccontextmanager
async def connection(url: str) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()  # some cases leave without reading


async def exchange(url: str, case: Case) -> Replies:
    """Sends a case and returns the answers, up to the expected number or the end of the connection."""

    async def send(writer: asyncio.StreamWriter) -> None:
        try:
            for part in case.parts:
                writer.write(part)
                await writer.drain()
                await asyncio.sleep(case.pause_s)
        except ConnectionError:
            replies.refused = True

    replies = Replies(case.method == "head")
    async with connection(url) as (reader, writer):
        sending = asyncio.create_task(send(writer))
        try:
            if case.leaves:
                await sending
                return replies
            with contextlib.suppress(httptools.HttpParserError):
                async with asyncio.timeout(ANSWER_S if case.replies else PATIENCE_S):
                    while len(replies.whole) < (case.replies or 1) and (data := await reader.read(65536)):
                        replies.feed(data)
        except ConnectionError:
            replies.refused = True
        finally:
            sending.cancel()
    return replies


# ---- rules ---------------------------------------------------------------------------------------------------------


class Rules:
    """Judges answers by the server's description."""

    def __init__(self, document: dict[str, Any]) -> None:
        self._document = document

    def broken(self, case: Case, replies: Replies) -> str | None:
        """Returns which rule the answers to a case break, if any."""
        if case.leaves:
            return None
        if len(whole := replies.whole) < (case.replies or 1):
            if case.replies is None and replies.refused:
                return None
            last = replies.found[-1] if replies.found else None
            return f"{len(whole)} whole answers; the last one: {last and (last.status, last.body[-300:])}"
        return next(filter(None, (self._judge(case, reply) for reply in whole)), None)

    def _judge(self, case: Case, reply: Reply) -> str | None:
        shown = f"{reply.status} {reply.body[:300]!r}"
        if reply.status >= 500 and not (reply.status == 503 and "retry-after" in reply.headers):
            return shown
        if case.replies is None and reply.status in (400, 408, 431) and not reply.body.startswith(b"{"):
            return None  # a reply of the HTTP layer
        described = self._document["paths"].get(case.path, {}).get(case.method, {"responses": {}})["responses"]
        if described and str(reply.status) not in described and case.replies is not None:
            return f"undescribed status {shown}"
        if case.method == "head" or reply.status == 204:
            return None
        if reply.status == 405 and "allow" not in reply.headers:
            return f"no Allow header: {shown}"
        if reply.headers.get("content-type", "").startswith("text/event-stream"):
            return self._judge_stream(reply)
        if reply.status >= 400 or (described and "json" in reply.headers.get("content-type", "")):
            return self._judge_json(described.get(str(reply.status)), reply)
        return None

    def _judge_json(self, described: Any, reply: Reply) -> str | None:
        """Errors of routes that do not exist have the form of either API."""
        if described is not None and "$ref" in described:
            described = self._document["components"]["responses"][str(reply.status)]
        either = {"anyOf": [{"$ref": f"#/components/schemas/{name}"} for name in ("Error", "MessagesError")]}
        schema = described.get("content", {}).get("application/json", {}).get("schema", {}) if described else either
        try:
            value = json.loads(reply.body)
        except ValueError:
            return f"not JSON: {reply.status} {reply.body[:300]!r}"
        errors = Draft202012Validator({**schema, "components": self._document["components"]}).iter_errors(value)
        return next((f"{reply.status} {each.json_path}: {each.message[:200]}" for each in errors), None)

    def _judge_stream(self, reply: Reply) -> str | None:
        if b'"server_error"' in reply.body:
            return f"an error in a stream: {reply.body[-500:]!r}"
        return None if LAST.search(reply.body[-4000:]) else f"a stream without an end: {reply.body[-300:]!r}"


# ---- the server's processes ----------------------------------------------------------------------------------------


def loop_seconds() -> float:
    """Returns the processor time of a fixed loop: a unit that does not depend on the machine's speed or load."""

    def once() -> float:
        began = time.process_time()
        sum(i * i for i in range(1_000_000))
        return time.process_time() - began

    return min(once() for _ in range(5))


def tree_of(pid: int) -> list[int]:
    """Returns a process and its descendants."""
    with contextlib.suppress(OSError):
        tasks = Path(f"/proc/{pid}/task").iterdir()
        children = [int(child) for task in tasks for child in (task / "children").read_text().split()]
        return [pid, *(each for child in children for each in tree_of(child))]
    return []


def memory_of(pids: Iterable[int]) -> int:
    """Returns the resident bytes of processes, each shared page in part."""
    found = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            found += sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return found


def thread_seconds(pids: Iterable[int]) -> dict[str, float]:
    """Returns the processor time of every thread of processes."""
    found = {}
    for path in (path for pid in pids for path in glob.iglob(f"/proc/{pid}/task/*/stat")):
        with contextlib.suppress(OSError):
            fields = Path(path).read_text().rpartition(")")[2].split()
            found[path] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return found


@dataclass
class Watch:
    """Asks for /health all the time, and measures the server's processes.

    Attributes:
        stall: most processor time of a thread before an answer, in units of `loop_seconds`.
        slowest_s: longest wait for an answer; it depends on the machine, and is only for people to read.
        before, peak, after: bytes of memory.
    """

    url: str
    pid: int | None
    stall: float = 0.0
    slowest_s: float = 0.0
    asked: int = 0
    before: int = 0
    peak: int = 0
    after: int = 0
    failures: list[str] = field(default_factory=list)
    during: list[str] = field(default_factory=list)  # cases that run
    disturbed: Callable[[], bool] = lambda: False  # whether the server may be away

    async def run(self) -> None:
        unit, case = loop_seconds(), Case("health", (request("GET", "/health"),), path="/health")
        self.before, replies = self.memory(), list[Reply]()
        while True:
            away, began, used = self.disturbed(), time.monotonic(), self._used()
            with contextlib.suppress(OSError, TimeoutError):
                replies = (await exchange(self.url, case)).whole
            if not (away or self.disturbed()):
                stall = max((now - used.get(key, 0.0) for key, now in self._used().items()), default=0.0) / unit
                self.asked += 1
                self.slowest_s = max(self.slowest_s, time.monotonic() - began)
                if stall > MAX_STALL:
                    self.failures.append(f"/health took {stall:.0f} loops of processor time during {self.during[-8:]}")
                if not replies or replies[0].status != 200:
                    self.failures.append(f"/health: {replies[0].status if replies else 'no answer'}")
                self.stall, self.peak = max(self.stall, stall), max(self.peak, self.memory())
            replies = []
            await asyncio.sleep(0.05)

    def memory(self) -> int:
        return memory_of(tree_of(self.pid)) if self.pid else 0

    def _used(self) -> dict[str, float]:
        return thread_seconds(tree_of(self.pid)) if self.pid else {}


# ---- a run ---------------------------------------------------------------------------------------------------------


@dataclass
class Fuzzer:
    """Sends cases and collects what is wrong.

    Args:
        url: of the server.
        document: its description.
    """

    url: str
    document: dict[str, Any]
    seed: int = 0
    number: int = 0  # number of the next case
    failures: list[str] = field(default_factory=list)
    counts: collections.Counter[str] = field(default_factory=collections.Counter)
    running: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.cases, self._rules = Cases(self.document, self.seed), Rules(self.document)

    async def one(self, number: int | None = None) -> str | None:
        """Sends a case, the next one by default; returns its failure."""
        if number is None:
            number, self.number = self.number, self.number + 1
        case = self.cases.case(number)
        self.running.append(name := f"case {number}: {case.name}")
        try:
            replies = await exchange(self.url, case)
            self.counts.update(str(reply.status) for reply in replies.whole)
            broken = self._rules.broken(case, replies)
        except TimeoutError:
            broken = f"no answer in {ANSWER_S:g} s" if case.replies else None
        except OSError as error:
            broken = f"{type(error).__name__}: {error}"
        finally:
            self.running.remove(name)
        self.counts["cases"] += 1
        return broken and f"seed {self.seed}, {name}: {broken}"

    async def run(self, cases: int, clients: int, watch: Watch) -> None:
        with Progress("cases", cases) as bar:

            async def client() -> None:
                while self.number < cases:
                    if broken := await self.one():
                        self.failures.append(broken)
                    bar.advance()

            watch.during = self.running
            watching = asyncio.create_task(watch.run())
            await asyncio.gather(*(client() for _ in range(clients)))
            watching.cancel()
        watch.after = await settled_memory(watch)
        self.failures += watch.failures
        for name, more, most in (
            ("for a while", watch.peak - watch.before, MAX_PEAK),
            ("at the end", watch.after - watch.before, MAX_GROWTH),
        ):
            if more > most * MIB:
                self.failures.append(f"the server takes {more // MIB} MiB more {name}; {most} are expected")


async def settled_memory(watch: Watch) -> int:
    """Returns the memory once it has not changed for a second."""
    found, last = watch.memory(), -1
    for _ in range(20):
        if abs(found - last) < MIB:
            break
        await asyncio.sleep(1.0)
        found, last = watch.memory(), found
    return found


async def description(url: str) -> dict[str, Any]:
    replies = (await exchange(url, Case("description", (request("GET", "/openapi.json"),)))).whole
    if not replies or replies[0].status != 200:
        raise UserError(f"{url}/openapi.json: no description; is the server running, without API keys?")
    found: dict[str, Any] = json.loads(replies[0].body)
    return found


def bad_lines(log: str) -> list[str]:
    """Returns parts of a server's log that show a fault."""
    return [log[found.start() : found.start() + 3000] for found in BAD_LOG.finditer(log)]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", required=True, help="address of the server")
    parser.add_argument("--pid", type=int, help="process of the server on this machine, to watch")
    parser.add_argument("--seed", type=int, default=0, help="seed of the cases (default: 0)")
    parser.add_argument("--cases", type=int, default=1000, help="number of cases (default: 1000)")
    parser.add_argument("--only", type=int, help="send one case by its number")
    parser.add_argument("--clients", type=int, default=4, help="concurrent clients (default: 4)")
    parser.add_argument("--output", type=Path, help="write the result here as JSON")
    args = parser.parse_args(argv)

    async def run() -> dict[str, Any]:
        fuzzer, watch = Fuzzer(args.url, await description(args.url), args.seed), Watch(args.url, args.pid)
        if args.only is not None:
            return {"failures": list(filter(None, [await fuzzer.one(args.only)])), "counts": dict(fuzzer.counts)}
        await fuzzer.run(args.cases, args.clients, watch)
        return {"seed": args.seed, "fields": len(fuzzer.cases), "counts": dict(fuzzer.counts), **figures(watch),
                "failures": fuzzer.failures}  # fmt: skip

    result = asyncio.run(run())
    if args.output:
        write_json(args.output, result)
    print(json.dumps(result, indent=1))
    return 1 if result["failures"] else 0


def figures(watch: Watch) -> dict[str, Any]:
    memory = {name: round(getattr(watch, name) / MIB) for name in ("before", "peak", "after")}
    health = {"asked": watch.asked, "slowest_s": round(watch.slowest_s, 3), "stall_loops": round(watch.stall, 1)}
    return {"memory_mib": memory, "health": health}


if __name__ == "__main__":
    raise SystemExit(run_command(main))
