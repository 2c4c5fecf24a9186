"""Prompts of a run: read from all sources, without near duplicates, sampled if there are more than needed.

Chosen prompts go to a file of JSON lines, one conversation each; memory holds only the data of the duplicate search.
"""

import heapq
import json
import math
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from dflash_toolkit.config import UserError
from dflash_toolkit.data.conversations import Conversation
from dflash_toolkit.data.sources import Batches, Malformed, Source
from dflash_toolkit.files import unwritable
from dflash_toolkit.options import PromptOptions
from dflash_toolkit.progress import Progress

from .dedup import Duplicates

SPARE = 1.25  # sampled rows per prompt that is needed, since some are near duplicates


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """Which prompts to choose."""

    names: tuple[str, ...]  # sources
    options: PromptOptions
    seed: int = 0
    sampled: bool = False  # sample `max_prompts` of all prompts, by the seed; else the first ones
    shuffle: int = 0  # size of the shuffle buffer for rows of a dataset
    recorded: bool = False  # keep the recorded responses too


@dataclass(frozen=True, slots=True)
class Chosen:
    """A line of a file of chosen prompts."""

    index: int
    source: int  # index of its name
    conversation: Conversation


def choose(wanted: Wanted, path: Path, duplicates: Duplicates) -> Counter[str]:
    """Reads the sources into a file of distinct prompts.

    Args:
        duplicates: prompts in it are skipped.

    Returns:
        counts of `prompts`, `duplicates`, `malformed` and, with `sampled`, `found`.

    Raises:
        UserError: a source cannot be read, holds a malformed row, or none is left; the disk is full.
    """
    counts: Counter[str] = Counter()
    draw = wanted.sampled and wanted.options.max_prompts > 0
    partial, scratch = path.with_suffix(".partial"), path.with_suffix(".scratch")
    try:
        with (
            open(partial, "w", encoding="utf-8") as handle,
            open(scratch, "w+b") as drawn,
            Progress("prompts", None if draw else wanted.options.max_prompts or None) as progress,
        ):
            found = _read(wanted, counts)
            if draw:
                lines = _drawn(wanted, _shown(found, progress), drawn, duplicates, counts)
            else:
                lines = _shown(_first(wanted, found, duplicates, counts), progress)
            for line in lines:
                handle.write(json.dumps({"index": counts["prompts"]} | line) + "\n")
                counts["prompts"] += 1
        if not counts["prompts"]:
            seen = counts["duplicates"] + counts["malformed"]
            raise UserError(f"{', '.join(wanted.names)}: none of {seen} rows is a prompt")
        partial.replace(path)
    except OSError as error:
        raise unwritable(path, error) from error
    finally:
        partial.unlink(missing_ok=True)
        scratch.unlink(missing_ok=True)
    return counts


def left_out(counts: Counter[str]) -> str:
    """Returns in words how many rows `choose` skipped."""
    return f"{counts['duplicates']} near duplicates, {counts['malformed']} malformed rows"


def chosen(path: Path) -> Iterator[Chosen]:
    """Yields the prompts in a file of `choose`. Raises UserError for a damaged file."""
    try:
        with open(path, encoding="utf-8") as handle:
            for line in handle:
                row = json.loads(line)
                yield Chosen(row["index"], row.get("source", 0), Conversation.of_json(row))
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UserError(f"{path}: damaged ({error!r}); remove it to choose the prompts again") from error


def _read(wanted: Wanted, counts: Counter[str]) -> Iterator[dict[str, Any]]:
    """Yields every conversation of the sources as a JSON value."""
    batches = Batches.of(wanted.names)
    for place, name in enumerate(wanted.names):
        source = Source(name, wanted.options.form)
        for found in source.read(wanted.options.split, wanted.shuffle, wanted.seed, batches):
            if isinstance(found, Malformed):
                if source.is_file and wanted.options.strict:
                    raise UserError(f"{found.where}: {found.reason}; prompts.strict=false skips such rows")
                counts["malformed"] += 1
                continue
            yield found.to_json(recorded=wanted.recorded) | {"source": place}


def _shown(lines: Iterator[dict[str, Any]], progress: Progress) -> Iterator[dict[str, Any]]:
    for line in lines:
        yield line
        progress.advance()


def _fresh(line: dict[str, Any], duplicates: Duplicates, counts: Counter[str]) -> bool:
    conversation = Conversation.of_json(line)
    if duplicates.seen(conversation.asked, under=conversation.instructions):
        counts["duplicates"] += 1
        return False
    return True


def _first(
    wanted: Wanted, found: Iterator[dict[str, Any]], duplicates: Duplicates, counts: Counter[str]
) -> Iterator[dict[str, Any]]:
    for line in found:
        if _fresh(line, duplicates, counts):
            yield line
            if counts["prompts"] == wanted.options.max_prompts > 0:  # counted by the consumer of the line
                return


def _drawn(
    wanted: Wanted, found: Iterator[dict[str, Any]], scratch: BinaryIO, duplicates: Duplicates, counts: Counter[str]
) -> Iterator[dict[str, Any]]:
    """Yields a sample of all conversations, in the order of the sources.

    Every row gets a random number, and those with the smallest are sampled: one pass over the sources, with a number
    and a disk offset for each row that may still be sampled.
    """
    draw = random.Random(wanted.seed)
    room = math.ceil(SPARE * wanted.options.max_prompts)
    least: list[tuple[float, int]] = []  # largest number first: negated, offset in `scratch`
    for line in found:
        counts["found"] += 1
        entry = (-draw.random(), scratch.tell())
        if len(least) < room:
            heapq.heappush(least, entry)
        elif entry > least[0]:
            heapq.heapreplace(least, entry)
        else:
            continue
        scratch.write(json.dumps(line).encode() + b"\n")
    all_fit = counts["found"] <= wanted.options.max_prompts
    # if all are used, keep the first of near duplicates, as `_first` does
    order = [at for _, at in (sorted(least, key=lambda entry: entry[1]) if all_fit else sorted(least, reverse=True))]

    def line_at(place: int) -> dict[str, Any]:
        scratch.seek(place)
        return json.loads(scratch.readline())

    taken: list[int] = []
    for at in order:
        if len(taken) == wanted.options.max_prompts:
            break
        if _fresh(line_at(at), duplicates, counts):
            taken.append(at)
    for at in sorted(taken):
        yield line_at(at)
