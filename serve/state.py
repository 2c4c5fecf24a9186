"""State that the application shares with its server and with the other front-end processes."""

import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path


class Count:
    """Sums a counter over processes: each writes its own share, and all can read the sum.

    Args:
        shares: shared memory, 8 bytes a process.
        own: index of this process's share.
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
    """State of one front-end process.

    Attributes:
        answers: running and waiting answers of all front-end processes.
        connections: open connections of all front-end processes.
        own: Unix socket on which this process serves its metrics to the others; None: it is the only one.
        others: those of the others.
    """

    draining: bool = False  # stopping: open answers finish, new ones are refused
    answers: Count = field(default_factory=Count)
    connections: Count = field(default_factory=Count)
    own: Path | None = None
    others: Sequence[Path] = ()

    @classmethod
    def of_several(cls, folder: Path, fronts: int, number: int) -> "ServerState":
        """Creates the state of process `number`, which shares a folder with the others."""
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
