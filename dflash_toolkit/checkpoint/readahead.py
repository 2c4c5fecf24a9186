"""Reads checkpoints from the disk into the system's file cache while Python still imports.

Importing torch and transformers takes seconds in which the disk is idle; then everything waits for weights.
`read_ahead` reads their files meanwhile and discards the data: the file cache keeps it for the loader.
`scripts/bench/start.py` measures the effect. Nothing here imports torch.
"""

import ctypes
import mmap
import os
import re
import threading
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from ..config import UserError
from .reader import cached_folder, weight_files

PART = 256 << 20  # bytes of a file that a thread reads at a time
READ = 16 << 20  # bytes of one read: after each, the importing thread has to release the GIL for a moment
THREADS = 4
CORES = 2 * THREADS  # with fewer, reading slows down the imports as much as it saves
MEMORY = Path("/proc/meminfo")
CONTAINER = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))  # version 2 and 1


class ReadAhead:
    """Threads that read files in order, each a part at a time. A process that ends does not wait for them.

    Attributes:
        bytes: read so far.
    """

    def __init__(self, files: Sequence[tuple[Path, int]]) -> None:
        """`files` are paths and their sizes in bytes."""
        self.bytes = 0
        self._left = deque((path, start) for path, size in files for start in range(0, size, PART))
        self._lock = threading.Lock()
        count = min(THREADS, len(self._left))
        self._threads = [threading.Thread(target=self._read, name="read-ahead", daemon=True) for _ in range(count)]
        for thread in self._threads:
            thread.start()

    def join(self) -> None:
        """Waits until everything is read."""
        for thread in self._threads:
            thread.join()

    def _read(self) -> None:
        buffer = bytearray(READ)
        while True:
            with self._lock:
                if not self._left:
                    return
                path, start = self._left.popleft()
            try:
                with open(path, "rb", buffering=0) as file:  # unbuffered: a read is one system call without the GIL
                    if cached(file.fileno(), start, PART):
                        continue
                    file.seek(start)
                    for _ in range(PART // READ):
                        count = file.readinto(buffer) or 0
                        with self._lock:
                            self.bytes += count
            except OSError:
                return  # the loader gets the same error and names the file


def cached(file: int, start: int, size: int) -> bool:
    """Returns whether the file cache holds a part of a file, judged by every 64th of its pages (mincore(2)).

    Copying cached data would only slow down the imports. A read that must not block (RWF_NOWAIT) is no test: the
    kernel then fetches the data, and the next call finds it.

    Args:
        start: in bytes, a multiple of a page.
        size: in bytes, cut at the file's end.
    """
    size = min(size, os.fstat(file).st_size - start)
    if size <= 0:
        return False
    pages = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
    # private and writable, though nothing is written: ctypes gives the address only of such a mapping
    with mmap.mmap(file, size, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE, offset=start) as view:
        first = ctypes.c_ubyte.from_buffer(view)
        failed = _mincore(ctypes.addressof(first), size, pages)
        del first  # a mapping with references cannot be closed
    return not failed and all(page & 1 for page in pages[::64])


def _mincore(address: int, size: int, pages: "ctypes.Array[ctypes.c_ubyte]") -> int:
    """Calls the system's mincore, which writes for every page whether it is in memory; returns 0 on success."""
    try:
        ask = ctypes.CDLL(None).mincore
    except (OSError, AttributeError, TypeError):  # no such function on this system
        return -1
    ask.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p
    return int(ask(address, size, pages))


def read_ahead(*checkpoints: str | None) -> ReadAhead:
    """Starts reading the weights of checkpoints into the system's file cache and returns at once; raises nothing.

    Reads nothing if the files are larger than half of the available memory (the cache would drop the first of them
    before the loader needs them), if that amount is unknown (a system other than Linux), or on few cores, which the
    imports need. It uses reads because posix_fadvise fetches no more than the disk's window per call.

    Args:
        checkpoints: directories or Hugging Face ids in the order in which they are loaded. None, and names that are not
            on this machine, are skipped.
    """
    files = [file for name in checkpoints if name is not None for file in _files(name)]
    spare = (os.cpu_count() or 1) >= CORES and sum(size for _, size in files) <= _available() // 2
    return ReadAhead(files if spare else [])


def _files(name: str) -> list[tuple[Path, int]]:
    """Returns paths and sizes of the files that the loader will read."""
    folder = cached_folder(name)
    try:
        return [(path, path.stat().st_size) for path in weight_files(folder)] if folder else []
    except (OSError, UserError):
        return []  # the loader reports the fault


def _available() -> int:
    """Returns the bytes of memory that programs and the file cache may still use; 0 if unknown."""
    try:
        found = re.search(r"^MemAvailable:\s*(\d+) kB", MEMORY.read_text(), flags=re.MULTILINE)
        limits = [path.read_text().strip() for path in CONTAINER if path.exists()]
    except OSError:
        return 0  # not Linux, or not readable: then nothing is read ahead
    return min([int(found[1]) << 10 if found else 0, *(int(limit) for limit in limits if limit.isdigit())])
