"""The files of several processes that write the responses of one output, and how they are joined."""

import contextlib
import glob
import json
import re
from collections.abc import Iterator
from pathlib import Path

from dflash_toolkit.files import unwritable

KEY = re.compile(rb'\{"index": (\d+), "sample": (\d+), "part": (\d+),')  # how `lines_of` begins every line
Key = tuple[int, int, int]  # index of the prompt, sample, part


def share_file(output: Path, rank: int) -> Path:
    """Returns the file that a process appends to: the first one's is the output itself."""
    return output.with_name(f"{output.name}.share{rank}") if rank else output


def share_files(output: Path) -> list[Path]:
    """Returns the output and the shares of other processes, whatever number of processes wrote them."""
    return [output, *sorted(output.parent.glob(f"{glob.escape(output.name)}.share*"))]


def join_shares(output: Path) -> None:
    """Joins all shares in the output, sorted by prompt, sample and part; so it does not depend on the process of a row.

    Raises:
        UserError: the disk is full; the shares stay.
    """
    files = share_files(output)
    places = [(key, file, at) for file, path in enumerate(files) for key, at in _lines(path)]
    first = {key: (file, at) for key, file, at in reversed(places)}  # a killed join may have left a share
    order = sorted(first)
    if len(files) == 1 and [key for key, *_ in places] == order:
        return
    partial = output.with_name(f".{output.name}.partial")
    try:
        with contextlib.ExitStack() as opened:
            handles = [opened.enter_context(open(path, "rb")) for path in files]
            joined = opened.enter_context(open(partial, "wb"))
            for key in order:
                file, at = first[key]
                handles[file].seek(at)
                joined.write(handles[file].readline())
        partial.replace(output)
        for path in files[1:]:
            path.unlink()
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise unwritable(output, error) from error


def _lines(path: Path) -> Iterator[tuple[Key, int]]:
    """Yields the key and the position of every line."""
    at = 0
    with open(path, "rb") as handle:
        for line in handle:
            found = KEY.match(line)
            if found:
                yield (int(found[1]), int(found[2]), int(found[3])), at
            else:  # of another program
                row = json.loads(line)
                yield (int(row["index"]), int(row.get("sample", 0)), int(row.get("part", 0))), at
            at += len(line)
