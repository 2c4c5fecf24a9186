"""The number of threads that compute on a CPU, and how idle ones wait.

PyTorch's wheels compute with OpenMP (libgomp, on a Mac libomp). Between two GEMMs its threads spin, by default for so
long that two processes on one pair of cores spend most of their time waiting for each other. A thread that sleeps is
woken in microseconds; spinning for some microseconds first saves that where the next GEMM follows at once. OpenMP reads
the environment once, when PyTorch is imported.
"""

import contextlib
import os
from pathlib import Path

QUOTA = Path("/sys/fs/cgroup/cpu.max")  # limit of a container
WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
SPINS = 1000  # for libgomp; libomp sleeps at once
_added: set[str] = set()  # to the environment


def wait_passively() -> None:
    """Lets idle threads sleep, in this process and those it starts, unless the environment sets how they wait.

    It has no effect after the import of torch: programs call it in their package's `__init__`.
    """
    if not any(name in os.environ for name in WAITING):
        added = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": str(SPINS)}
        os.environ |= added
        _added.update(added)


def usable_cores() -> int:
    """Returns the number of cores that this process may use, also in a container with a limit."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError):  # no limit is "max"
        quota, period = map(int, QUOTA.read_text().split())
        return max(1, min(cores, quota // period))
    return cores


def given_environment() -> dict[str, str]:
    """Returns the environment as it was before `wait_passively`, for other projects' programs."""
    return {name: value for name, value in os.environ.items() if name not in _added}


def use_threads(count: int | None) -> None:
    """Computes with `count` threads from now on; None changes nothing."""
    if count is not None:
        import torch  # seconds, and a command line does without

        torch.set_num_threads(count)
