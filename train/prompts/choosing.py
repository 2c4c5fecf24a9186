"""Prompts of a run: read from all sources, without duplicates, sampled if there are more than needed.

Distinct rows go to a scratch file, chosen ones to a file of JSON lines, one conversation each; memory holds only the
data of the duplicate search.
"""

import itertools
import json
import sys
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

import numpy as np

from dflash_toolkit.config import UserError
from dflash_toolkit.data.conversations import Conversation
from dflash_toolkit.data.skipped import Skipped
from dflash_toolkit.data.sources import Batches, Malformed, Source
from dflash_toolkit.files import unwritable
from dflash_toolkit.options import PromptOptions
from dflash_toolkit.progress import Progress

from .dedup import Duplicates, SharedText

LOUD = 1 / 3  # share of near duplicates that calls for a warning


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """The sources of prompts, and the number of prompts."""

    names: tuple[str, ...]  # sources
    options: PromptOptions
    seed: int = 0
    sampled: bool = False  # sample `max_prompts` of all prompts, by the seed; else the first ones
    shuffle: int = 0  # size of the shuffle buffer for rows of a dataset
    recorded: bool = False  # keep the recorded responses too
    apart: tuple[Conversation, ...] = ()  # held-out conversations: no prompt may be like them


@dataclass(frozen=True, slots=True)
class Chosen:
    """A line of a file of chosen prompts."""

    index: int
    source: int  # index of its name
    conversation: Conversation


@dataclass(slots=True)
class Choice:
    """How many prompts were chosen, and what became of the other rows."""

    wanted: Wanted
    skipped: Skipped
    prompts: int = 0
    found: int = 0  # rows that are prompts
    distinct: int = 0
    near: int = 0  # near duplicates of other prompts
    like_held_out: int = 0

    @property
    def judged(self) -> int:
        return self.prompts + self.near + self.like_held_out

    @property
    def counts(self) -> Counter[str]:
        """The counts of a run's record, without zeros."""
        all_of = {
            "found": self.found, "duplicates": self.found - self.distinct, "near_duplicates": self.near,
            "like_held_out": self.like_held_out, "malformed": self.skipped.counts.total(),
        }  # fmt: skip
        return Counter({name: count for name, count in all_of.items() if count})

    def lines(self) -> list[str]:
        """Returns what a user should know."""
        if not self.prompts:
            rows = self.found + self.skipped.counts.total()
            named = ", ".join(self.wanted.names)
            raise UserError(f"{named}: none of {rows} rows is a prompt to use; left out: {self._skipped_counts()}")
        lines = []
        if self.judged < self.distinct:
            of = f"{self.distinct} distinct" if self.distinct < self.found else str(self.distinct)
            lines.append(f"{self.prompts} of {of} prompts are used (prompts.max_prompts)")
        skipped = self._skipped_counts()
        lines.append(f"{self.prompts} prompts" + (f"; left out: {skipped}" if skipped else ""))
        if self.near + self.like_held_out > LOUD * self.judged:
            lines.append(
                f"warning: {self.near + self.like_held_out} of {self.judged} distinct prompts are left out because "
                f"they are near duplicates; prompts.similarity=1 keeps all prompts that differ"
            )
        return lines

    def _skipped_counts(self) -> str:
        counted = {
            "duplicates": self.found - self.distinct,
            "near duplicates (prompts.similarity)": self.near,
            "near duplicates of held-out prompts (prompts.similarity)": self.like_held_out,
        }
        parts = [f"{count} {name}" for name, count in counted.items() if count]
        return ", ".join([*parts, *([str(self.skipped)] if self.skipped.counts else [])])


def choose(wanted: Wanted, path: Path) -> Choice:
    """Reads the sources into a file of distinct prompts.

    Raises:
        UserError: a source cannot be read, holds a malformed row (if `strict`), or none is left; the disk is full.
    """
    choice = Choice(wanted, Skipped(wanted.options.strict))
    partial, scratch = path.with_suffix(".partial"), path.with_suffix(".scratch")
    try:
        with open(partial, "wb") as handle, open(scratch, "w+b") as rows:
            for place in sorted(_fresh(choice, rows)):
                rows.seek(place)
                handle.write(b'{"index": %d, ' % choice.prompts + rows.readline()[1:])
                choice.prompts += 1
        choice.lines()
        partial.replace(path)
    except OSError as error:
        raise unwritable(path, error) from error
    finally:
        partial.unlink(missing_ok=True)
        scratch.unlink(missing_ok=True)
    return choice


def chosen(path: Path) -> Iterator[Chosen]:
    """Yields the prompts in a file of `choose`. Raises UserError for a damaged file."""
    try:
        with open(path, encoding="utf-8") as handle:
            for line in handle:
                row = json.loads(line)
                yield Chosen(row["index"], row.get("source", 0), Conversation.of_json(row))
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UserError(f"{path}: damaged ({error!r}); remove it to choose the prompts again") from error


def _distinct(choice: Choice, rows: BinaryIO) -> Iterator[int]:
    """Writes every distinct conversation of the sources to `rows` and yields its offset."""
    wanted, duplicates = choice.wanted, Duplicates(choice.wanted.options.similarity)
    batches = Batches.of(wanted.names)
    with Progress("prompts", None) as progress:
        for number, name in enumerate(wanted.names):
            source = Source(name, wanted.options.form)
            for found in source.read(wanted.options.split, wanted.shuffle, wanted.seed, batches):
                progress.advance()
                if isinstance(found, Malformed):
                    choice.skipped.add(found.reason, found.where)
                    continue
                line = found.to_json(recorded=wanted.recorded) | {"source": number}
                if _surrogate(line):
                    choice.skipped.add("not valid text (half of a surrogate pair)", found.id)
                    continue
                choice.found += 1
                if duplicates.repeats(found.asked, under=found.instructions):
                    continue
                choice.distinct += 1
                place = rows.seek(0, 2)
                rows.write(json.dumps(line).encode() + b"\n")
                yield place


def _surrogate(line: object) -> bool:
    """Whether a text of a row holds half of a surrogate pair, which no tokenizer reads."""
    try:
        json.dumps(line, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return True
    return False


def _fresh(choice: Choice, rows: BinaryIO) -> list[int]:
    """Returns the offsets of the prompts to use: as many as are wanted, without near duplicates."""
    wanted, most = choice.wanted, choice.wanted.options.max_prompts
    candidates = _distinct(choice, rows)
    if wanted.sampled and most:
        places = array("q", candidates)
        if len(places) > most:
            candidates = (places[i] for i in np.random.default_rng(wanted.seed).permutation(len(places)))
        else:
            candidates = iter(places)
    if wanted.options.similarity >= 1 and not wanted.apart:
        return list(itertools.islice(candidates, most or None))
    taken: list[int] = []
    shared = SharedText()
    held_out, own = (Duplicates(wanted.options.similarity, shared) for _ in range(2))
    while picked := list(itertools.islice(candidates, most - len(taken) if most else None)):
        first_round = not choice.judged and not taken
        for each in itertools.chain(wanted.apart if first_round else (), _read_at(rows, picked)):
            shared.add(each.asked)
        if first_round:
            for each in wanted.apart:
                for text in each.asked, first_asked(each):
                    held_out.seen(text, under=each.instructions)
        with Progress("near duplicates", len(picked)) as progress:
            for place, each in zip(picked, _read_at(rows, picked), strict=True):
                if wanted.apart and like(held_out, each):
                    choice.like_held_out += 1
                elif own.near(each.asked, under=each.instructions):
                    choice.near += 1
                else:
                    taken.append(place)
                progress.advance()
    return taken


def first_asked(conversation: Conversation) -> str:
    """Returns the text of the first turn's user messages."""
    return replace(conversation, turns=conversation.turns[:1]).asked


def like(held_out: Duplicates, conversation: Conversation) -> bool:
    """Whether a conversation, or its first question, is like a held-out one."""
    texts = dict.fromkeys((conversation.asked, first_asked(conversation)))
    return any(held_out.holds(text, under=conversation.instructions) for text in texts)


def _read_at(rows: BinaryIO, places: Sequence[int]) -> Iterator[Conversation]:
    for place in places:
        rows.seek(place)
        yield Conversation.of_json(json.loads(rows.readline()))


def say(choice: Choice) -> None:
    """Prints what a user should know of a choice on stderr."""
    for line in choice.lines():
        print(line, file=sys.stderr)
