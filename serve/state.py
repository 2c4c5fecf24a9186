"""What the application, the server that runs it and the other processes beside them know of each other."""

import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path


class Count:
    """A number that several processes have a share of: each writes its own, and all see the sum.

    Args:
        shares: memory that all see, 8 bytes a process.
        own: which of them is this process's.
    """

    def __init__(self, shares: memoryview | None = None, own: int = 0) -> None:
        self._shares = memoryview(bytearray(8)).cast("q") if shares is None else shares
        self._own = own

    def add(self, more: int) -> None:
        self._shares[self._own] += more

    @property
    def total(self) -> int:
        return sum(self._shares)


@dataclass(slots=True)
class ServerState:
    """Of one front process.

    Attributes:
        answers: that run or wait, of all fronts.
        connections: that are open, of all fronts.
        own: the Unix socket where it tells the other fronts what it has counted, if there are others.
        others: theirs.
    """

    draining: bool = False  # told to stop: open answers finish, new ones are refused
    answers: Count = field(default_factory=Count)
    connections: Count = field(default_factory=Count)
    own: Path | None = None
    others: Sequence[Path] = ()

    @classmethod
    def of_several(cls, folder: Path, fronts: int, number: int) -> "ServerState":
        """Of front `number`, which shares a folder with the others."""
        kinds, size = 2, 8 * fronts
        file = os.open(folder / "counts", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.truncate(file, kinds * size)
            shares = memoryview(mmap.mmap(file, kinds * size)).cast("q")
        finally:
            os.close(file)
        answers, connections = (Count(shares[i * fronts : (i + 1) * fronts], number) for i in range(kinds))
        paths = [folder / f"front{i}" for i in range(fronts)]
        return cls(False, answers, connections, paths[number], [path for path in paths if path != paths[number]])
