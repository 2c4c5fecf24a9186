"""The prompts of a run, split into training prompts and held-out ones."""

import sys
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dflash_toolkit.config import UserError
from dflash_toolkit.data.conversations import Conversation
from dflash_toolkit.data.prompts import encode_chat
from dflash_toolkit.data.skipped import Skipped
from dflash_toolkit.data.sources import Malformed, Source
from dflash_toolkit.files import unwritable
from dflash_toolkit.fingerprint import files_digest, json_digest

from ..config import TrainConfig
from ..responses.conversation import REFUSED, TOO_LONG, UNKNOWN
from ..responses.generate import reasons
from ..run.held_out import HeldOutPrompt
from .choosing import Chosen, Wanted, choose, chosen, first_asked, say
from .dedup import Duplicates

PROMPTS = "prompts.jsonl"


@dataclass(slots=True)
class PromptData:
    """Data of a run apart from its rows."""

    digest: str  # covers everything that was read
    held_out: list[HeldOutPrompt] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)  # prompts in use, and skipped ones by reason
    samplers: list[dict[str, Any]] = field(default_factory=list)  # from responses files

    def to_json(self) -> dict[str, Any]:
        return {"held_out": list(map(asdict, self.held_out)), "counts": self.counts, "samplers": self.samplers}

    @classmethod
    def of_json(cls, digest: str, values: dict[str, Any]) -> "PromptData":
        held_out = [HeldOutPrompt(**each) for each in values["held_out"]]
        return cls(digest, held_out, values["counts"], values["samplers"])


@dataclass(frozen=True, slots=True)
class Reading:
    """Settings for reading and rendering data."""

    config: TrainConfig  # with `prompts.max_length` at most the target's context
    tokenizer: Any
    limit: str  # the limit that makes a prompt too long, in words
    vocab_size: int = sys.maxsize

    @property
    def room(self) -> int:
        """Maximum tokens of a prompt: an anchor needs two more."""
        return self.config.prompts.max_length - 2

    def say(self, message: str) -> None:
        print(message, file=sys.stderr)


def data_digest(config: TrainConfig) -> str:
    """Returns the digest of a run's inputs: contents of files, names of datasets. Raises UserError."""
    split = config.prompts.split
    names = config.data or (() if config.response_files else (config.prompts.dataset,))
    parts = [[Source(name, config.prompts.form).digest(split) for name in group] for group in (names, config.held_out)]
    parts.append([files_digest([path]) for path in config.response_files])
    return json_digest(parts)


def choose_prompts(reading: Reading, work: Path) -> PromptData:
    """Writes the training prompts of `data` to `work`/prompts.jsonl and returns the held-out ones.

    Raises:
        UserError: a source cannot be read or holds a malformed row, or nothing is left to train on.
    """
    config = reading.config
    options, path = config.prompts, work / PROMPTS
    names = config.data or (options.dataset,)
    held_out, asked = held_out_of_files(reading, config.responses.thinking)
    before = work / "all.jsonl"
    recorded = not config.responses.regenerate
    wanted = Wanted(
        names=names, options=options, seed=config.run.seed, sampled=True, recorded=recorded, apart=tuple(asked)
    )  # fmt: skip
    try:
        choice = choose(wanted, before)
        say(choice)
        used = choice.prompts
        apart: set[int] = set()
        if not config.held_out:
            sources = array("i", (each.source for each in chosen(before)))
            held_out, apart = _drawn(reading, before, sources, names, min(options.held_out, used // 2))
            choice.like_held_out += len(same := _same_first(before, apart))
            apart |= same
        partial = path.with_suffix(".partial")
        with open(before, encoding="utf-8") as lines, open(partial, "w", encoding="utf-8") as handle:
            for place, line in enumerate(lines):
                if place not in apart:
                    handle.write(line)
        partial.replace(path)
    except OSError as error:
        raise unwritable(path, error) from error
    finally:
        before.unlink(missing_ok=True)
    return PromptData("", held_out, {"prompts": used - len(apart), "held_out": len(held_out)} | choice.counts)


def _same_first(path: Path, apart: set[int]) -> set[int]:
    """Returns the line numbers of conversations that begin with the question of a held-out one, without those."""
    first = Duplicates(1)  # near ones of whole conversations are gone already
    for place, each in enumerate(chosen(path)):
        if place in apart:
            first.seen(first_asked(each.conversation), under=each.conversation.instructions)
    return {
        place
        for place, each in enumerate(chosen(path))
        if place not in apart and first.holds(first_asked(each.conversation), under=each.conversation.instructions)
    }


def held_out_of_files(reading: Reading, thinking: bool | None) -> tuple[list[HeldOutPrompt], list[Conversation]]:
    """Returns the first questions of the held-out files, and their conversations."""
    config, held_out, dropped = reading.config, [], Counter[str]()
    asked: list[Conversation] = []
    skipped = Skipped(config.prompts.strict)
    for name in config.held_out:
        source = Source(name, config.prompts.form)
        for found in source.read(config.prompts.split, 0, config.run.seed):
            if isinstance(found, Malformed):
                skipped.add(found.reason, found.where)
                continue
            asked.append(found)
            ids, reason = _rendered(reading, found, thinking)
            if reason:
                dropped[reason] += 1
            else:
                held_out.append(HeldOutPrompt(ids, source.short))
    why = ", ".join(filter(None, (str(skipped), reasons(dropped, reading.limit))))
    if why:
        reading.say(f"dropped held-out prompts: {why}")
    if config.held_out and not held_out:
        raise UserError(f"{', '.join(config.held_out)}: no held-out prompt is left: {why}")
    return held_out, asked


def _rendered(reading: Reading, conversation: Conversation, thinking: bool | None) -> tuple[list[int], str]:
    """Returns the first question as a prompt, or the reason why there is none."""
    try:
        ids = encode_chat(reading.tokenizer, conversation.turns[0], thinking, conversation.tools)
    except UserError:
        return [], REFUSED
    if max(ids, default=0) >= reading.vocab_size:
        return [], UNKNOWN
    return (ids, "") if len(ids) <= reading.room else ([], TOO_LONG)


def _drawn(
    reading: Reading, path: Path, sources: Sequence[int], names: Sequence[str], count: int
) -> tuple[list[HeldOutPrompt], set[int]]:
    """Returns held-out prompts from a file of chosen ones, each source with its share, and their line numbers."""
    order, dropped = spread(sources, reading.config.run.seed), Counter[str]()
    held_out: list[HeldOutPrompt] = []
    apart: set[int] = set()
    begin = 0
    while len(held_out) < count and begin < len(order):
        window = order[begin : begin + 2 * count]
        begin += len(window)
        wanted, found = set(window), dict[int, Chosen]()
        for place, each in enumerate(chosen(path)):
            if place in wanted:
                found[place] = each
        for place in window:
            if len(held_out) == count:
                break
            ids, reason = _rendered(reading, found[place].conversation, reading.config.responses.thinking)
            if reason:
                dropped[reason] += 1
                continue
            apart.add(place)
            held_out.append(HeldOutPrompt(ids, Source(names[found[place].source]).short))
    if dropped:
        reading.say(f"passed over for held-out prompts: {reasons(dropped, reading.limit)}")
    return held_out, apart


def spread(sources: Sequence[int] | npt.NDArray[np.int64], seed: int) -> list[int]:
    """Returns a random order in which every prefix has each source's share.

    Args:
        sources: of each item.
    """
    draw = np.random.default_rng(seed)
    of = np.asarray(sources, np.int64)
    rank = np.zeros(len(of))
    for source in np.unique(of):
        places = draw.permutation(np.flatnonzero(of == source))
        rank[places] = (np.arange(len(places)) + draw.random()) / len(places)
    return np.argsort(rank, kind="stable").tolist()
