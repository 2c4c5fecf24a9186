"""What a run trains on and is measured on: prompts of all sources, held-out ones apart, and rows as a `Corpus`."""

import hashlib
import json
import sys
from array import array
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from dflash_toolkit.config import UserError
from dflash_toolkit.data.conversations import Conversation
from dflash_toolkit.data.prompts import encode_chat
from dflash_toolkit.data.sources import Malformed, Source, file_hash
from dflash_toolkit.progress import Progress

from ..config import TrainConfig
from ..prompts.choosing import Chosen, Wanted, choose, chosen, left_out
from ..prompts.dedup import Duplicates
from ..responses.conversation import REFUSED, TOO_LONG, TOO_SHORT, recorded_rows
from ..responses.corpus import CorpusWriter
from ..responses.file import AnswerReader, Match, Written
from ..responses.generate import reasons
from ..responses.rows import Row
from .held_out import HeldOutPrompt

CORPUS = "corpus"  # inside the work directory
PROMPTS = "prompts.jsonl"


@dataclass(slots=True)
class PromptData:
    """What is known of a run's data beside its rows."""

    digest: str  # of everything read
    held_out: list[HeldOutPrompt] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)  # prompts that are used, and what was left out for what
    samplers: list[dict[str, Any]] = field(default_factory=list)  # that wrote answers files

    def to_json(self) -> dict[str, Any]:
        return {"held_out": list(map(asdict, self.held_out)), "counts": self.counts, "samplers": self.samplers}

    @classmethod
    def of_json(cls, digest: str, values: dict[str, Any]) -> "PromptData":
        held_out = [HeldOutPrompt(**each) for each in values["held_out"]]
        return cls(digest, held_out, values["counts"], values["samplers"])


@dataclass(frozen=True, slots=True)
class Reading:
    """How data is read and rendered."""

    config: TrainConfig  # its `prompts.max_length` is at most the target's context
    tokenizer: Any
    limit: str  # which limit makes a prompt too long, in words

    @property
    def room(self) -> int:
        """Tokens that a prompt may have: two more make an anchor."""
        return self.config.prompts.max_length - 2

    def say(self, message: str) -> None:
        print(message, file=sys.stderr)


def data_digest(config: TrainConfig) -> str:
    """Of everything that a run reads: the contents of files, the names of datasets. Raises UserError."""
    split = config.prompts.split
    names = config.data or (() if config.answer_files else (config.prompts.dataset,))
    parts = [[Source(name, config.prompts.form).digest(split) for name in group] for group in (names, config.held_out)]
    parts.append([file_hash([path]) for path in config.answer_files])
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


# ---- prompts -----------------------------------------------------------------------------------------------------


def choose_prompts(reading: Reading, work: Path) -> PromptData:
    """The prompts of `data` to be trained on, in `work`/prompts.jsonl, and those that are kept out.

    Raises:
        UserError: a source cannot be read or holds a malformed row, or nothing is left to train on.
    """
    config = reading.config
    options, path = config.prompts, work / PROMPTS
    duplicates = Duplicates(options.similarity)
    names = config.data or (options.dataset,)
    held_out = _of_files(reading, config.answers.thinking, duplicates)
    before = work / "all.jsonl"
    wanted = Wanted(
        names=names, similarity=options.similarity, strict=options.strict, most=options.max_prompts, draw=True,
        seed=config.run.seed, split=options.split, form=options.form, recorded=not config.answers.regenerate,
    )  # fmt: skip
    try:
        counts = choose(wanted, before, duplicates)
        used = counts["prompts"]
        if (found := counts["found"]) > used and options.max_prompts:
            reading.say(f"{used} of {found} prompts are used (prompts.max_prompts)")
        apart: set[int] = set()
        if not config.held_out:
            sources = array("i", (each.source for each in chosen(before)))
            held_out, apart = _drawn(reading, before, sources, names, min(options.held_out, used // 2))
        partial = path.with_suffix(".partial")
        with open(before, encoding="utf-8") as lines, open(partial, "w", encoding="utf-8") as handle:
            for place, line in enumerate(lines):
                if place not in apart:
                    handle.write(line)
        partial.replace(path)
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror}); free some space and run again") from error
    finally:
        before.unlink(missing_ok=True)
    if counts["duplicates"] or counts["malformed"]:
        reading.say(f"{used} prompts; left out: {left_out(counts)}")
    said = {"prompts": used - len(apart), "held_out": len(held_out)}
    said |= {name: counts[name] for name in ("found", "duplicates", "malformed") if counts[name]}
    return PromptData("", held_out, said)


def _of_files(reading: Reading, thinking: bool | None, duplicates: Duplicates) -> list[HeldOutPrompt]:
    """The first questions of the files of held-out prompts; what they ask is remembered in `duplicates`."""
    config, held_out, dropped = reading.config, [], Counter[str]()
    for name in config.held_out:
        source = Source(name, config.prompts.form)
        for found in source.read(config.prompts.split, 0, config.run.seed):
            if isinstance(found, Malformed):
                if source.is_file and config.prompts.strict:
                    raise UserError(f"{found.where}: {found.reason}; prompts.strict=false leaves such rows out")
                dropped["malformed"] += 1
                continue
            duplicates.seen(found.asked, under=found.instructions)
            ids, reason = _rendered(reading, found, thinking)
            if reason:
                dropped[reason] += 1
            else:
                held_out.append(HeldOutPrompt(ids, source.short))
    if dropped:
        reading.say(f"dropped held-out prompts: {reasons(dropped, reading.limit)}")
    if config.held_out and not held_out:
        raise UserError(f"{', '.join(config.held_out)}: no held-out prompt is left: {reasons(dropped, reading.limit)}")
    return held_out


def _rendered(reading: Reading, conversation: Conversation, thinking: bool | None) -> tuple[list[int], str]:
    """The first question as a prompt; or why there is none."""
    try:
        ids = encode_chat(reading.tokenizer, conversation.turns[0], thinking, conversation.tools)
    except UserError:
        return [], REFUSED
    return (ids, "") if len(ids) <= reading.room else ([], TOO_LONG)


def _drawn(
    reading: Reading, path: Path, sources: Sequence[int], names: Sequence[str], count: int
) -> tuple[list[HeldOutPrompt], set[int]]:
    """So many prompts of a file of chosen ones, of every source its share, and their lines."""
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
            ids, reason = _rendered(reading, found[place].conversation, reading.config.answers.thinking)
            if reason:
                dropped[reason] += 1
                continue
            apart.add(place)
            held_out.append(HeldOutPrompt(ids, Source(names[found[place].source]).short))
    if dropped:
        reading.say(f"passed over for held-out prompts: {reasons(dropped, reading.limit)}")
    return held_out, apart


def spread(sources: Sequence[int] | npt.NDArray[np.int64], seed: int) -> list[int]:
    """A random order of items that takes from every source its share wherever one stops.

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


# ---- rows --------------------------------------------------------------------------------------------------------


def write_answered(data: PromptData, paths: Sequence[Path], match: Match, folder: Path, fingerprint: Any) -> None:
    """The corpus of the answers that a run's own processes wrote, in the order of the prompts. Raises UserError."""
    keys = array("q")
    with CorpusWriter(folder) as writer:
        for written in AnswerReader(match).read(paths):
            writer.add(written.row)
            keys.extend(written.number(key) for key in ("index", "sample", "part"))
        order = np.lexsort(np.frombuffer(keys, np.int64).reshape(-1, 3).T[::-1])
        writer.commit({"of": fingerprint} | data.to_json(), keep=order)


def write_recorded(
    reading: Reading, data: PromptData, prompts: Path, stop_ids: Collection[int], folder: Path, fingerprint: Any
) -> None:
    """The corpus of the answers the data holds, as the chat template renders them (`recorded_rows`).

    Raises:
        UserError: an answer is no text, or none fits the template.
    """
    dropped: Counter[str] = Counter()
    stops = {*stop_ids, reading.tokenizer.eos_token_id}
    with CorpusWriter(folder) as writer, Progress("answers", data.counts["prompts"]) as progress:
        for each in chosen(prompts):
            for row in _recorded(reading, each.conversation, stops, dropped):
                writer.add(row)
            progress.advance()
        why = reasons(dropped, reading.limit)
        if not len(writer):
            raise UserError(
                f"none of the data's answers can be trained on: {why}; "
                f"answers.regenerate=true lets the target write them"
            )
        if dropped:
            progress.print(f"dropped answers of the data: {why}")
        data.counts |= dropped
        writer.commit({"of": fingerprint} | data.to_json())


def _recorded(
    reading: Reading, conversation: Conversation, stops: Collection[int], dropped: Counter[str]
) -> Iterator[Row]:
    said = conversation.recorded
    if not any(message["role"] == "assistant" for message in said):
        dropped["without an answer"] += 1
        return
    try:
        "".join(message["content"] for message in said if isinstance(message["content"], str)).encode()
    except UnicodeError as error:  # half of a surrogate pair
        raise UserError(f"the answer to prompt {conversation.id} is no valid text ({error})") from error
    rows, lost = recorded_rows(reading.tokenizer, said, conversation.tools, stops, reading.config.answers.thinking)
    dropped.update(lost)
    for row in rows:
        if row.prompt_tokens > reading.room:
            dropped[TOO_LONG] += 1
        elif not row.has_anchor:
            dropped[TOO_SHORT] += 1
        else:
            yield row


class _Groups:
    """Rows by what was asked: the rows of one conversation of a file, and of others that begin with the same prompt."""

    def __init__(self) -> None:
        self._parents = array("q")
        self._names: dict[Any, int] = {}

    def of(self, name: Any) -> int:
        """The group of that name."""
        group = self._names.setdefault(name, len(self._parents))
        if group == len(self._parents):
            self._parents.append(group)
        return group

    def known(self, name: Any) -> int | None:
        """The group of that name, if there is one."""
        return self._names.get(name)

    def join(self, group: int, other: int) -> None:
        """Make them one."""
        a, b = sorted((self._root(group), self._root(other)))
        self._parents[b] = a

    def _root(self, group: int) -> int:
        while (parent := self._parents[group]) != group:
            self._parents[group] = self._parents[parent]
            group = parent
        return group

    def roots(self) -> npt.NDArray[np.int64]:
        """What each group is one with."""
        return np.fromiter(map(self._root, range(len(self._parents))), np.int64, len(self._parents))


def write_given(reading: Reading, digest: str, match: Match, folder: Path, fingerprint: Any) -> None:
    """The corpus of answers files; without files of held-out prompts, all rows of some conversations are kept out.

    Rows that ask nearly the same as a held-out prompt are left out. Among the others nothing is dropped: several
    answers to one prompt are what `dflash-data` was asked for.

    Raises:
        UserError: a file cannot be read, holds something else, or answers of another target.
    """
    config = reading.config
    options, names = config.prompts, config.answer_files
    reader, groups = AnswerReader(match), _Groups()
    group_of, file_of = array("q"), array("q")
    texts = folder.with_name(folder.name + ".texts")
    try:
        with (
            CorpusWriter(folder) as writer,
            open(texts, "w+", encoding="utf-8") as asked,
            Progress("reading answers", None) as progress,
        ):
            for written in reader.read(names):
                writer.add(written.row)
                group = groups.of((written.file, written.number("index")))
                if not written.number("part"):
                    groups.join(group, groups.of(_prompt(written.row)))
                if said := _asked(written):
                    asked.write(json.dumps([group, *said]) + "\n")
                group_of.append(group)
                file_of.append(written.file)
                progress.advance()
            roots = groups.roots()
            of, files = roots[np.frombuffer(group_of, np.int64)], np.frombuffer(file_of, np.int64)
            asks, first = np.unique(of, return_index=True)  # every group once, and its first row
            found, used = len(asks), _sample(len(asks), options.max_prompts, config.run.seed)
            if len(used) < found:
                progress.print(f"{len(used)} of {found} prompts are used (prompts.max_prompts)")
            asks, first = asks[used], first[used]
            duplicates = Duplicates(options.similarity)
            apart: set[int] = set()  # groups that are measured on
            near: set[int] = set()  # that ask nearly the same
            if config.held_out:
                modes = {sampler.get("thinking") for sampler in reader.samplers}
                thinking = config.answers.thinking
                if thinking is None and len(modes) == 1:  # as the prompts of the answers were
                    thinking = modes.pop()
                held_out = _of_files(reading, thinking, duplicates)
                same = (groups.known(digest_of(prompt.tokens)) for prompt in held_out)
                near = {int(roots[group]) for group in same if group is not None}
            else:
                held_out = []
                count = min(options.held_out, len(asks) // 2)
                for place in spread(files[first], config.run.seed):
                    if len(held_out) == count:
                        break
                    prompt = writer.prompt(int(first[place]))
                    if len(prompt) <= reading.room:
                        apart.add(int(asks[place]))
                        held_out.append(HeldOutPrompt(prompt, Source(names[files[first[place]]]).short))
            if held_out:
                near |= _near(asked, roots, apart, duplicates)
            near = (near & set(asks.tolist())) - apart
            if near:
                progress.print(f"left out: {len(near)} prompts that are near duplicates of held-out ones")
            keep = np.isin(of, asks) & ~np.isin(of, np.array([*apart, *near], np.int64))
            if not keep.any():
                raise UserError("no prompt is left to train on; give more data or a smaller prompts.held_out")
            counts = {
                "prompts": len(asks) - len(apart) - len(near), "held_out": len(held_out), "found": found,
                "like_held_out": len(near),
            }  # fmt: skip
            data = PromptData(digest, held_out, counts, reader.samplers)
            writer.commit({"of": fingerprint} | data.to_json(), keep=np.flatnonzero(keep))
    finally:
        texts.unlink(missing_ok=True)


def _prompt(row: Row) -> bytes:
    return digest_of(row.tokens[: row.prompt_tokens])


def _asked(written: Written) -> tuple[str, str] | None:
    """Instructions and what is asked in all turns, of the last row of a conversation's first sample."""
    messages = written.values.get("messages")
    whole = written.number("part") + 1 >= written.number("parts", 1)
    if written.number("sample") or not whole or not isinstance(messages, list):
        return None
    turns = [m for m in messages if isinstance(m, dict) and isinstance(m.get("content"), str)]
    tools = written.values.get("tools")
    conversation = Conversation("", (tuple(turns),), tuple(tools) if isinstance(tools, list) else ())
    return conversation.instructions, conversation.asked


def _near(asked: Any, roots: npt.NDArray[np.int64], apart: set[int], duplicates: Duplicates) -> set[int]:
    """Groups that ask nearly what those `apart` ask, or what `duplicates` holds already."""

    def lines() -> Iterator[tuple[int, str, str]]:
        asked.seek(0)
        for line in asked:
            group, instructions, text = json.loads(line)
            yield int(roots[group]), instructions, text

    for group, instructions, text in lines():
        if group in apart:
            duplicates.seen(text, under=instructions)
    return {
        group
        for group, instructions, text in lines()
        if group not in apart and duplicates.holds(text, under=instructions)
    }


def _sample(count: int, most: int, seed: int) -> npt.NDArray[np.int64]:
    """Places of at most so many of `count`, drawn, in their order."""
    if not most or count <= most:
        return np.arange(count)
    return np.sort(np.random.default_rng(seed).permutation(count)[:most])


def usable(rows: list[Row], longest: int, forbidden: set[tuple[int, ...]]) -> tuple[list[Row], dict[str, int]]:
    """Rows to train on, each there once, cut to `longest` and renumbered, and how many were left out for what.

    Args:
        forbidden: prompts (token ids) that are measured on.

    Raises:
        UserError: none is left.
    """
    left_out = dict.fromkeys(("repeated", "in_evaluation", "too_short"), 0)
    measured = {digest_of(prompt) for prompt in forbidden}
    seen: set[bytes] = set()
    kept: list[Row] = []
    for row in (row.cut(longest) for row in rows):
        tokens = digest_of(row.tokens)
        if tokens in seen:
            left_out["repeated"] += 1
        elif digest_of(row.tokens[: row.prompt_tokens]) in measured:
            left_out["in_evaluation"] += 1
        elif not row.has_anchor:
            left_out["too_short"] += 1
        else:
            kept.append(replace(row, index=len(kept)))
        seen.add(tokens)
    if not kept:
        raise UserError(f"none of {len(rows)} answers can be trained on: {left_out}")
    return kept, left_out


def hold_out(rows: list[Row], prompts: int, seed: int) -> tuple[list[Row], list[Row]]:
    """Rows to train on, and the first row of each of so many prompts, all of whose rows are kept out.

    Raises:
        UserError: there are not more prompts than that.
    """
    prompts_of = [digest_of(row.tokens[: row.prompt_tokens]) for row in rows]
    by_prompt = dict(zip(reversed(prompts_of), reversed(rows), strict=True))
    names = list(by_prompt)
    if prompts >= len(names):
        raise UserError(f"{prompts} prompts are to be kept out of training and there are {len(names)}; keep fewer out")
    order = torch.randperm(len(names), generator=torch.Generator().manual_seed(seed)).tolist()
    chosen = {names[i] for i in order[:prompts]}
    training = [row for row, name in zip(rows, prompts_of, strict=True) if name not in chosen]
    return training, [by_prompt[name] for name in names if name in chosen]


def digest_of(tokens: npt.ArrayLike) -> bytes:
    """What stands for token ids where they are compared."""
    return hashlib.blake2b(np.asarray(tokens, np.int32).tobytes(), digest_size=16).digest()
