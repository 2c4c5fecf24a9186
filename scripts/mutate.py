"""Plants faults in the core modules, one at a time, and counts those that the modules' tests catch (`make mutate`).

`faults.py` says what a fault is. Every worker has a copy of the project, imports torch and the other packages once, and
traces which lines of the module each test runs. For every fault it forks; the fork imports the changed module and runs
the tests that reach the fault's statement, fastest first, up to the first failure. A test that takes five times its
usual processor time (at least ten seconds) loops, and the fault counts as caught. The sample depends on --seed and on
the module.

Results are in --journal, one JSON line per fault. Run the same command again to resume. It repeats survivors if the
tests have changed, and everything if the module has changed.
"""

import argparse
import contextlib
import functools
import gc
import hashlib
import importlib
import json
import math
import multiprocessing
import os
import pickle
import resource
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

from dflash_toolkit.config import UserError
from dflash_toolkit.progress import Progress

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the repository, for `scripts`

from scripts.faults import Fault, sample

ROOT = Path(__file__).parents[1]
REFERENCE_MODULES = ("attention", "experts", "layer", "loss", "matmul", "norm", "rope", "sampling", "selection")
REFERENCE_TESTS = [
    "kernels/test_kernels_reference.py",
    "kernels/test_kernels_draws.py",
    "kernels/test_kernels_row_loss.py",
    "kernels/test_kernels_mask.py",
    "kernels/test_kernels_delta.py",
    "runtime/test_runtime_engine.py",
    "runtime/test_runtime_recurrent.py",
    "runtime/test_runtime_draft_kinds.py",
]
TABLE = {  # modules and their tests, fastest first; none of them starts programs
    "dflash_toolkit/decode.py": [
        "test_decode.py", "test_grammar.py", "models/test_architectures.py", "runtime/test_runtime_prompt_logprobs.py",
    ],
    "dflash_toolkit/generation.py": ["test_generation.py", "test_decode.py"],
    "dflash_toolkit/sampling.py": ["test_sampling.py", "test_decode.py", "test_grammar.py"],
    **{f"dflash_toolkit/kernels/reference/{module}.py": REFERENCE_TESTS for module in REFERENCE_MODULES},
    "dflash_toolkit/runtime/pages.py": ["runtime/test_runtime_scheduler.py"],
    "dflash_toolkit/runtime/wait_queue.py": ["runtime/test_runtime_wait_queue.py", "runtime/test_runtime_scheduler.py"],
    "dflash_toolkit/runtime/exact.py": ["runtime/test_runtime_budget.py", "runtime/test_runtime_scheduler.py"],
    "dflash_toolkit/runtime/prompts.py": [
        "runtime/test_runtime_recovery.py", "runtime/test_runtime_scheduler.py", "runtime/test_runtime_wait_queue.py",
    ],
    "dflash_toolkit/runtime/recovery.py": [
        "runtime/test_runtime_recovery.py", "runtime/test_runtime_scheduler.py", "runtime/test_runtime_faults.py",
    ],
    "dflash_toolkit/runtime/recurrent.py": [
        "runtime/test_runtime_recovery.py", "runtime/test_runtime_scheduler.py", "runtime/test_runtime_recurrent.py",
    ],
    "dflash_toolkit/runtime/request_table.py": [
        "runtime/test_runtime_recovery.py", "runtime/test_runtime_scheduler.py", "runtime/test_runtime_wait_queue.py",
        "runtime/test_runtime_engine.py",
    ],
    "dflash_toolkit/runtime/scheduler.py": [
        "runtime/test_runtime_recovery.py", "runtime/test_runtime_scheduler.py", "runtime/test_runtime_wait_queue.py",
        "runtime/test_runtime_engine.py", "runtime/test_runtime_grammar.py",
    ],
    "dflash_toolkit/models/dflash/checkpoint.py": [
        "models/test_checkpoint.py", "models/test_drafter_config.py", "models/test_speculators.py",
    ],
    "dflash_toolkit/models/dflash/architecture.py": [
        "models/test_drafter_shape.py", "models/test_dflash2.py", "models/test_draft_architecture.py",
        "models/test_checkpoint.py",
    ],
    "dflash_toolkit/models/dspine/codes.py": ["models/test_dspine.py"],
    "dflash_toolkit/models/dspine/injection.py": ["models/test_dspine.py"],
    "dflash_toolkit/models/dspine/proposer.py": [
        "runtime/test_runtime_dspine.py", "runtime/test_runtime_draft_kinds.py",
    ],
    "dflash_toolkit/models/dspine/refinement.py": ["models/test_dspine.py"],
    "train/objective/blocks.py": ["train/objective/test_train_blocks.py"],
    "train/objective/loss.py": [
        "train/objective/test_train_losses.py", "train/objective/test_train_selector.py",
        "train/objective/test_train_distribution.py",
    ],
    "train/objective/selector.py": ["train/objective/test_train_selector.py"],
}  # fmt: skip
LEFT_OUT = (".*", "__pycache__", "*.egg-info", "out", "demo", "build", "dist", "shared", "results")


# ---- workers ---------------------------------------------------------------------------------------------------


@dataclass
class Result:
    """The outcome of a fault."""

    module: str
    line: int
    column: int  # distinguishes equal faults of a line
    before: str
    after: str
    outcome: str  # caught, loops or survived
    by: str  # the first test that failed
    source_hash: str
    tests_hash: str

    @property
    def key(self) -> tuple[str, int, int, str, str, str]:
        return self.module, self.line, self.column, self.before, self.after, self.source_hash


@dataclass(frozen=True)
class Job:
    """The faults of one module that one worker tries."""

    worker: int
    module: str
    tests: tuple[str, ...]
    faults: tuple[Fault, ...]


@dataclass(frozen=True)
class Test:
    """A test's use of a module without a fault."""

    name: str  # pytest's name
    seconds: float  # processor time
    lines: frozenset[int]  # executed lines of the module, also by its fixtures

    @property
    def file(self) -> str:
        return self.name.partition("::")[0].removeprefix("tests/")


class _FirstFailure:
    """A plugin of pytest."""

    by = ""

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self.by = self.by or report.nodeid

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.by = self.by or f"{report.nodeid} (not collected)"


class _Chosen(_FirstFailure):
    """A plugin of pytest: of all collected tests those of `tests`, and which of them fails first; none may loop."""

    def __init__(self, tests: list[Test], least_s: float) -> None:
        self._order = {test.name: place for place, test in enumerate(tests)}
        self._tests, self._least_s = tests, least_s
        self._allow(2 * least_s)  # to import what is tested

    def _allow(self, seconds: float) -> None:
        most = math.ceil(time.process_time() + seconds)  # not by the clock: others compute, too
        resource.setrlimit(resource.RLIMIT_CPU, (most, resource.RLIM_INFINITY))
        signal.alarm(math.ceil(30 * seconds))  # a fault that waits for ever takes no processor

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: Any) -> None:
        place = self._order.get(item.nodeid)
        self._allow(max(self._least_s, 5 * self._tests[place].seconds if place is not None else 300))

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        chosen = [item for item in items if item.nodeid in self._order]
        if chosen:  # else the fault has changed their names
            items[:] = sorted(chosen, key=lambda item: self._order[item.nodeid])


@functools.cache
def _resolved(path: str) -> str:
    """The path without symbolic links: dflash_toolkit/train is one."""
    return os.path.realpath(path)


class _Traced(_FirstFailure):
    """A plugin of pytest that runs all tests and notes which lines of a module each of them comes to."""

    def __init__(self, path: Path) -> None:
        self._path = str(path.resolve())
        self.always = self._lines = set[int]()  # when it is imported
        self._fixtures = dict[str, set[int]]()
        self.tests: list[Test] = []
        threading.settrace(self._call)
        sys.settrace(self._call)

    def _call(self, frame: Any, event: str, argument: object) -> Any:
        return self._line if _resolved(frame.f_code.co_filename) == self._path else None

    def _line(self, frame: Any, event: str, argument: object) -> Any:
        self._lines.add(frame.f_lineno)
        return self._line

    @pytest.hookimpl(hookwrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any, request: Any) -> Iterator[None]:
        outside, self._lines = self._lines, self._fixtures.setdefault(fixturedef.argname, set())
        yield
        outside |= self._lines
        self._lines = outside

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: Any) -> Iterator[None]:
        lines = self._lines = set()
        began = time.process_time()
        yield
        for name in item.fixturenames:
            lines |= self._fixtures.get(name, set())
        self.tests.append(Test(item.nodeid, time.process_time() - began, frozenset(lines)))
        self._lines = set()


@dataclass(frozen=True)
class Unchanged:
    """The tests of a module without a fault."""

    always: frozenset[int]  # lines that run when it is imported
    tests: tuple[Test, ...]
    modules: tuple[str, ...]  # modules that they import

    def reaching(self, lines: range) -> list[Test]:
        """The tests that come to any of these lines, the quickest of a file first; all, where importing does."""
        files = list(dict.fromkeys(test.file for test in self.tests))
        found = [test for test in self.tests if self.always.intersection(lines) or test.lines.intersection(lines)]
        return sorted(found, key=lambda test: (files.index(test.file), test.seconds))


def _forked(work: Callable[[], object]) -> tuple[Any, int]:
    """Runs `work` in a fork. Returns its result, or None if it ends without one, and its wait status."""
    reader, writer = os.pipe()
    Path("tmp").mkdir()
    gc.freeze()  # pytest collects several times at its end: not what is imported here
    child = os.fork()
    if not child:
        os.close(reader)
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        null = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(null, stream)
        result = pickle.dumps(work())
        with os.fdopen(writer, "wb") as pipe:
            pipe.write(result)
            pipe.flush()
            os._exit(0)

    def end(*_: object) -> None:
        for kill in (os.killpg, os.kill):  # it may not lead a group yet
            with contextlib.suppress(ProcessLookupError):
                kill(child, signal.SIGKILL)
        os._exit(1)

    signal.signal(signal.SIGTERM, end)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        answer = pipe.read()
    _, status = os.waitpid(child, 0)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child, signal.SIGKILL)  # processes that its tests have started
    shutil.rmtree("tmp", ignore_errors=True)
    return pickle.loads(answer) if answer else None, status


def _pytest(files: list[str], plugin: _FirstFailure, seed: int) -> bool:
    """Whether the tests pass."""
    options = ["-x", "-q", "-p", "no:cacheprovider", f"--hypothesis-seed={seed}", "--basetemp=tmp/pytest"]
    try:
        return pytest.main([*options, *(f"tests/{name}" for name in files)], plugins=[plugin]) == 0
    except BaseException as error:
        plugin.by = repr(error)
        return False


def _without_fault(job: Job, seed: int) -> Unchanged:
    path = Path.cwd() / job.module

    def work() -> Unchanged | str:
        plugin = _Traced(path)
        passed = _pytest(list(job.tests), plugin, seed)
        sys.settrace(None)
        if not passed:
            return plugin.by
        if not plugin.always:
            return "another copy is tested"
        return Unchanged(frozenset(plugin.always), tuple(plugin.tests), tuple(sorted(sys.modules)))

    found, status = _forked(work)
    if isinstance(found, Unchanged):
        return found
    raise UserError(f"{job.module}: its tests fail without any fault ({found or f'status {status}'})")


def _with_fault(tests: list[Test], seed: int, least_s: float) -> tuple[str, str]:
    """Outcome and first failure."""
    if not tests:
        return "survived", "no test comes to it"

    def work() -> tuple[str, str]:
        plugin = _Chosen(tests, least_s)
        passed = _pytest(list(dict.fromkeys(test.file for test in tests)), plugin, seed)
        return ("survived", "") if passed else ("caught", plugin.by)

    found, status = _forked(work)
    return found or ("loops" if os.WIFSIGNALED(status) else "caught", f"status {status}")


def _work(root: Path, place: Path, jobs: list[Job], seed: int, least_s: float, queue: Any) -> None:
    """Tries faults in a copy of the project and reports each."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first process ends this one
    shutil.copytree(root, place, ignore=shutil.ignore_patterns(*LEFT_OUT), symlinks=True)
    os.chdir(place)
    sys.path[:0] = [str(place), str(place / "tests")]
    sys.dont_write_bytecode = True
    os.environ |= {
        "TMPDIR": str(place / "tmp"), "HYPOTHESIS_STORAGE_DIRECTORY": str(place / "tmp/hypothesis"),
        "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "",
    }  # fmt: skip
    own = {path.name.removesuffix(".py") for path in [*place.iterdir(), *(place / "tests").rglob("*.py")]}
    _forget_own(own)
    for job in jobs:
        try:
            known = _without_fault(job, seed)
        except UserError as error:
            queue.put(error)
            return
        for name in known.modules:  # otherwise every fork would import them again
            top = name.partition(".")[0]
            if top not in own and name not in sys.modules and not top.startswith(("_", "test")):
                with contextlib.suppress(Exception):
                    importlib.import_module(name)
        _forget_own(own)
        path = place / job.module
        unchanged = path.read_text()
        for fault in job.faults:
            path.write_text(fault.source)
            outcome, by = _with_fault(known.reaching(fault.lines), seed, least_s)
            queue.put((job.module, fault, outcome, by))
        path.write_text(unchanged)
    queue.put(None)


def _forget_own(own: set[str]) -> None:
    for name in list(sys.modules):
        if name.partition(".")[0] in own and name != "__main__":
            del sys.modules[name]


# ---- the whole -------------------------------------------------------------------------------------------------


def run(
    root: Path, table: dict[str, list[str]], journal: Path, limit: int, seed: int, processes: int, least_s: float = 10
) -> list[Result]:
    """Results of the sampled faults of all modules. Raises UserError where tests fail without any fault."""
    known = _read(journal)
    hashes, found, jobs = dict[str, tuple[str, str]](), list[Result](), list[Job]()
    for module, tests in table.items():
        source = (root / module).read_text()
        texts = "".join((root / "tests" / name).read_text() for name in tests)
        hashes[module] = _hash(source), _hash(texts)
        missing = []
        for fault in sample(module, source, limit, seed):
            old = known.get((module, fault.line, fault.column, fault.before, fault.after, hashes[module][0]))
            if old and (old.outcome != "survived" or old.tests_hash == hashes[module][1]):
                found.append(old)
            else:
                missing.append(fault)
        for part in range(processes):
            if share := missing[part::processes]:
                jobs.append(Job(part, module, tuple(tests), tuple(share)))
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    folder = tempfile.TemporaryDirectory(prefix="mutate-")
    workers = [
        context.Process(target=_work, args=(root, Path(folder.name) / str(part), mine, seed, least_s, queue))
        for part in range(processes)
        if (mine := [job for job in jobs if job.worker == part])
    ]
    for worker in workers:
        worker.start()
    journal.parent.mkdir(parents=True, exist_ok=True)
    working = len(workers)
    try:
        with Progress("faults", sum(len(job.faults) for job in jobs), unit="fault") as bar:
            while working:
                report = queue.get()
                if isinstance(report, UserError):
                    raise report
                if report is None:
                    working -= 1
                    continue
                module, fault, outcome, by = report
                result = Result(
                    module, fault.line, fault.column, fault.before, fault.after, outcome, by, *hashes[module]
                )
                with journal.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(asdict(result)) + "\n")
                found.append(result)
                bar.advance(note=f"{sum(r.outcome == 'survived' for r in found)} survived, {module}")
    finally:
        for worker in workers:
            worker.terminate()
            worker.join()
        folder.cleanup()
    return found


def _read(journal: Path) -> dict[tuple[str, int, str, str, str], Result]:
    if not journal.exists():
        return {}
    whole, _, torn = journal.read_text(encoding="utf-8").rpartition("\n")
    if torn:
        journal.write_text(whole + "\n" if whole else "", encoding="utf-8")
    results = [Result(**json.loads(line)) for line in whole.splitlines()]
    return {result.key: result for result in results}


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def report(results: list[Result], modules: list[str]) -> str:
    """A table of modules, and what survived under it."""
    lines = ["| module | faults | caught | share |", "|---|---|---|---|"]
    for module in [*modules, "all"]:
        of = [result for result in results if module in ("all", result.module)]
        caught = sum(result.outcome != "survived" for result in of)
        lines.append(f"| {module} | {len(of)} | {caught} | {caught / max(1, len(of)):.0%} |")
    survivors = sorted((r for r in results if r.outcome == "survived"), key=lambda r: (r.module, r.line))
    lines += [f"\n{r.module}:{r.line}\n  - {r.before}\n  + {r.after}" for r in survivors]
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=int, default=40, help="faults per module (default: %(default)s; 0: all)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sample (default: %(default)s)")
    parser.add_argument("--processes", type=int, default=2, help="concurrent workers (default: %(default)s)")
    parser.add_argument("--only", nargs="+", default=list(TABLE), metavar="MODULE", help="only these modules")
    parser.add_argument(
        "--journal", type=Path, default=ROOT / "out/mutate.jsonl", help="file with the results (default: %(default)s)"
    )
    given = parser.parse_args(arguments)
    began = time.monotonic()
    try:
        if unknown := [module for module in given.only if module not in TABLE]:
            raise UserError(f"--only {unknown[0]}: not one of {', '.join(TABLE)}")
        if given.processes < 1 or given.limit < 0:
            raise UserError("--processes must be >= 1, and --limit >= 0")
        table = {module: TABLE[module] for module in given.only}
        results = run(ROOT, table, given.journal, given.limit, given.seed, given.processes)
    except UserError as error:
        print(f"mutate: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("mutate: interrupted; run again to resume", file=sys.stderr)
        return 130
    print(report(results, given.only))
    print(f"\n{time.monotonic() - began:.0f} s; survivors may be equivalent: read each of them", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
