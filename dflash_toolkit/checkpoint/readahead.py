"""Checkpoints on their way from the disk while Python still imports.

Importing torch and transformers takes seconds in which the disk has little to do; then everything waits for weights.
`read_ahead` brings their files into the system's file cache meanwhile, where the loader that follows finds them. A file
is sent to /dev/null, which copies nothing: 4 GB take 0.1 s of the CPU from the disk and 0.2 s where they are cached,
against 0.9 and 2 s by reads and 0.8 and 1.1 s by posix_fadvise, which starts on 8 MiB at most a call.
"""

import os
import re
import threading
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from ..config import UserError
from .reader import cached_folder, weight_files

PART = 256 << 20  # bytes of one call: after each the importing thread has to hand over the GIL for a moment
THREADS = 4
MEMORY = Path("/proc/meminfo")
CONTAINER = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))  # version 2 and 1


class ReadAhead:
    """Threads that read files from first to last, each a part at a time. A process that ends does not wait for them.

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
        """Wait until everything is read."""
        for thread in self._threads:
            thread.join()

    def _read(self) -> None:
        try:
            with open(os.devnull, "wb") as nowhere:
                while True:
                    with self._lock:
                        if not self._left:
                            return
                        path, start = self._left.popleft()
                    with open(path, "rb") as file:
                        size = 0
                        while sent := os.sendfile(nowhere.fileno(), file.fileno(), start + size, PART - size):
                            size += sent
                    with self._lock:
                        self.bytes += size
        except OSError:
            return  # the loader meets the same and says which file it is


def read_ahead(*checkpoints: str | None) -> ReadAhead:
    """Start reading the weights of checkpoints into the system's file cache and return at once; nothing is raised.

    Nothing is read where the files are larger than half of the memory that is available, as the cache would lose the
    first of them to the last, or where nobody says how much that is (a system other than Linux).

    Args:
        checkpoints: directories or Hugging Face ids in the order in which they are loaded. None, and what is not on
            this machine, is passed over.
    """
    files = [file for name in checkpoints if name is not None for file in _files(name)]
    return ReadAhead(files if sum(size for _, size in files) <= _available() // 2 else [])


def _files(name: str) -> list[tuple[Path, int]]:
    """Paths and sizes of the files that the loader will read."""
    folder = cached_folder(name)
    try:
        return [(path, path.stat().st_size) for path in weight_files(folder)] if folder else []
    except (OSError, UserError):
        return []  # broken: the loader says what is wrong


def _available() -> int:
    """Bytes of memory that programs and the file cache may still take; 0 where it is not known."""
    try:
        found = re.search(r"^MemAvailable:\s*(\d+) kB", MEMORY.read_text(), flags=re.MULTILINE)
        limits = [path.read_text().strip() for path in CONTAINER if path.exists()]
    except OSError:
        return 0  # not Linux, or not to be read: reading ahead is a favour that nobody needs
    return min([int(found[1]) << 10 if found else 0, *(int(limit) for limit in limits if limit.isdigit())])
