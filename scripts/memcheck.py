"""Runs the kernels' tests under compute-sanitizer's memcheck and reports accesses outside an allocation.

    python scripts/memcheck.py --jobs 10 --output memcheck.json -- -n 4

Memcheck watches only this project's kernels; the references would take hours. Every tensor has its own allocation,
so an access past its end is found. The exception is `graphs`, the tests that capture CUDA graphs. `engine` runs the
engine's largest passes. The output of each run is in memcheck-NAME.log next to the result. Exit code 1: an error
was found.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from dflash_toolkit.files import write_json

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the repository, for `scripts`

from scripts.measure import setting

ROOT = Path(__file__).resolve().parents[2]
TESTS = ("layer", "attention", "rope", "step", "sample", "row_loss", "linear", "fp8", "graphs", "engine")
KERNEL = re.compile(r"^def (\w+_kernel)\(", re.MULTILINE)
ERRORS = re.compile(r"ERROR SUMMARY: (\d+) error")
LAST = re.compile(r"^(?!=+ ERROR SUMMARY).* in [\d.]+s", re.MULTILINE)  # pytest's last line
OUTCOME = re.compile(r"(\d+) (passed|failed|skipped|errors?)\b")


def main() -> int:
    """Returns 0 when the tests pass and memcheck is silent, 2 when it cannot run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tests", nargs="+", choices=TESTS, default=TESTS, help="which tests (default: all)")
    parser.add_argument("--jobs", type=int, default=1, help="files of tests at a time (default: 1)")
    parser.add_argument("--output", type=Path, help="write the result here as JSON")
    parser.add_argument("rest", nargs="*", help="more arguments for pytest, after --")
    args = parser.parse_args()
    if not shutil.which("compute-sanitizer"):
        print("memcheck: no compute-sanitizer on the path; it comes with the CUDA toolkit", file=sys.stderr)
        return 2
    sources = (ROOT / "dflash_toolkit/kernels").rglob("*.py")
    kernels = sorted({name for path in sources for name in KERNEL.findall(path.read_text())})
    result = {**setting("memcheck.py"), "kernels": kernels, "tests": {}}
    logs = args.output.parent if args.output else Path(tempfile.mkdtemp())
    complete = True
    with ThreadPoolExecutor(args.jobs) as pool:
        running = {
            pool.submit(check, name, kernels, args.rest, logs / f"memcheck-{name}.log"): name for name in args.tests
        }
        for done in as_completed(running):
            name, found = running[done], done.result()
            if found is None:
                print(f"memcheck: no summary for {name}; see {logs / f'memcheck-{name}.log'}", file=sys.stderr)
                complete = False
                continue
            result["tests"][name] = found
            print(name, found, flush=True)
            if args.output:
                write_json(args.output, result)
    if not complete:
        return 2
    bad = {"failed", "error", "errors"}
    return int(any(found["errors"] or bad & set(found["tests"]) for found in result["tests"].values()))


def check(name: str, kernels: list[str], rest: list[str], log: Path) -> dict[str, Any] | None:
    """Errors, outcomes of tests and seconds of one of TESTS; None if compute-sanitizer says nothing."""
    watched = [word for kernel in kernels for word in ("--kernel-name", f"kns={kernel}")]
    checker = ["compute-sanitizer", "--tool", "memcheck", "--target-processes", "all", *watched]
    files, which = [f"tests/kernels/test_kernels_{name}.py"], "not captured"
    if name == "graphs":
        files, which = sorted(map(str, ROOT.glob("tests/kernels/test_kernels_*.py"))), "captured"
    elif name == "engine":
        files, which = ["tests/runtime/test_runtime_gpu.py"], "largest_passes"
    pytest = [sys.executable, "-m", "pytest", "-v", "-m", "gpu or not gpu", "-k", which, *rest, *files]
    own = {} if name == "graphs" else {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    start = time.perf_counter()
    with log.open("w") as file:
        subprocess.run(
            [*checker, *pytest],
            cwd=ROOT, env=os.environ | own, stdout=file, stderr=subprocess.STDOUT,
        )  # fmt: skip
    said = log.read_text(errors="replace")
    errors = [int(n) for n in ERRORS.findall(said)]
    outcomes = [line for line in LAST.findall(said) if OUTCOME.search(line)]
    if not errors or not outcomes:
        return None
    tests = {word: int(n) for n, word in OUTCOME.findall(outcomes[-1])}
    return {"errors": sum(errors), "tests": tests, "seconds": round(time.perf_counter() - start, 1)}


if __name__ == "__main__":
    sys.exit(main())
