"""The process that compiles kernels ahead, see `precompile.py`. It ends with its input, at any moment.

usage: python -m dflash_toolkit.runtime.precompile_process PROCESSES DONE
"""

import os
import queue
import signal
import sys
import threading
from pathlib import Path

SIZE = 8  # bytes before a job, with its length


def framed(job: bytes) -> bytes:
    """Returns the input of this process."""
    return len(job).to_bytes(SIZE, "big") + job


def _follow_input(jobs: "queue.SimpleQueue[bytes]") -> None:
    """Reads the job, and kills this process and those that it has started when the input closes."""
    given = sys.stdin.fileno()  # not `sys.stdin`: its lock would be held when Python ends
    size, job = int.from_bytes(os.read(given, SIZE), "big"), b""
    while len(job) < size and (part := os.read(given, size - len(job))):
        job += part
    jobs.put(job)
    os.read(given, 1)
    os.killpg(0, signal.SIGKILL)


def main(processes: int, done: Path) -> None:
    jobs = queue.SimpleQueue[bytes]()
    threading.Thread(target=_follow_input, args=(jobs,), daemon=True).start()
    from .precompile import compile_all  # imports torch for seconds

    compile_all(jobs.get(), processes, done)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
