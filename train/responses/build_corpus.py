"""Builds a run's `Corpus` of responses that were written now, recorded in the data, or given as files."""

import json
import sys
from array import array
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import numpy.typing as npt

from dflash_toolkit.config import UserError
from dflash_toolkit.data.conversations import Conversation
from dflash_toolkit.data.skipped import Skipped
from dflash_toolkit.data.sources import Source
from dflash_toolkit.fingerprint import tokens_digest
from dflash_toolkit.progress import Progress

from ..prompts.choosing import chosen, first_asked
from ..prompts.dedup import Duplicates, SharedText
from ..prompts.split import PromptData, Reading, held_out_of_files, spread
from ..run.held_out import HeldOutPrompt
from .conversation import TOO_LONG, TOO_SHORT, UNKNOWN, recorded_rows
from .corpus import CorpusWriter
from .file import Match, ResponseReader, Written
from .generate import MANY_CUT, reasons
from .rows import Row

CORPUS = "corpus"  # inside the work directory
LIKE_HELD_OUT = "near duplicates of held-out ones"


def write_answered(data: PromptData, paths: Sequence[Path], match: Match, folder: Path, fingerprint: Any) -> None:
    """Writes the corpus of responses by the run's own processes, in the order of the prompts. Raises UserError."""
    keys, cut = array("q"), 0
    with CorpusWriter(folder) as writer:
        for written in ResponseReader(match).read(paths):
            writer.add(written.row)
            cut += written.values.get("finish_reason") == "length"
            keys.extend(written.number(key) for key in ("index", "sample", "part"))
        _count_cut(cut, len(writer), data.counts)
        order = np.lexsort(np.frombuffer(keys, np.int64).reshape(-1, 3).T[::-1])
        writer.commit({"of": fingerprint} | data.to_json(), keep=order)


def write_recorded(
    reading: Reading, data: PromptData, prompts: Path, stop_ids: Collection[int], folder: Path, fingerprint: Any
) -> None:
    """Writes the corpus of responses in the data, rendered with the chat template (`recorded_rows`).

    Raises:
        UserError: a response is not valid text, or none fits the template.
    """
    dropped, skipped = Counter[str](), Skipped(reading.config.prompts.strict)
    with CorpusWriter(folder) as writer, Progress("responses", data.counts["prompts"]) as progress:
        for each in chosen(prompts):
            for row in _recorded(reading, each.conversation, stop_ids, dropped, skipped):
                writer.add(row)
            progress.advance()
        dropped += skipped.counts
        why = reasons(dropped, reading.limit, skipped.first)
        if not len(writer):
            raise UserError(
                f"none of the data's responses can be trained on: {why}; "
                f"give responses.regenerate=true to let the target write them"
            )
        if dropped:
            progress.print(f"dropped responses of the data: {why}")
        data.counts |= dropped
        writer.commit({"of": fingerprint} | data.to_json())


def _recorded(
    reading: Reading, conversation: Conversation, stop_ids: Collection[int], dropped: Counter[str], skipped: Skipped
) -> Iterator[Row]:
    said = conversation.recorded
    if not any(message["role"] == "assistant" for message in said):
        skipped.add("without an answer", conversation.id)
        return
    rows, lost = recorded_rows(reading.tokenizer, said, conversation.tools, stop_ids, reading.config.responses.thinking)
    dropped.update(lost)
    for row in rows:
        if row.prompt_tokens > reading.room:
            skipped.add(TOO_LONG, conversation.id)
        elif max(row.tokens) >= reading.vocab_size:
            skipped.add(UNKNOWN, conversation.id)
        elif not row.has_anchor:
            skipped.add(TOO_SHORT, conversation.id)
        else:
            yield row


class _Groups:
    """Rows grouped by prompt: rows of one conversation of a file, and of others that begin with the same prompt."""

    def __init__(self) -> None:
        self._parents = array("q")
        self._names: dict[Any, int] = {}

    def of(self, name: Any) -> int:
        """Returns the group with this name, adding it if it is new."""
        group = self._names.setdefault(name, len(self._parents))
        if group == len(self._parents):
            self._parents.append(group)
        return group

    def known(self, name: Any) -> int | None:
        """Returns the group with this name, or None."""
        return self._names.get(name)

    def join(self, group: int, other: int) -> None:
        """Merges two groups."""
        a, b = sorted((self._root(group), self._root(other)))
        self._parents[b] = a

    def _root(self, group: int) -> int:
        while (parent := self._parents[group]) != group:
            self._parents[group] = self._parents[parent]
            group = parent
        return group

    def roots(self) -> npt.NDArray[np.int64]:
        """Returns the merged group of each group."""
        return np.fromiter(map(self._root, range(len(self._parents))), np.int64, len(self._parents))


def write_given(reading: Reading, digest: str, match: Match, folder: Path, fingerprint: Any) -> None:
    """Writes the corpus of responses files. Without held-out files, all rows of some conversations are kept out.

    Rows with a prompt similar to a held-out one are dropped. Other duplicates stay: several responses to one prompt
    are intended.

    Raises:
        UserError: a file cannot be read, holds something else, or responses of another target.
    """
    config = reading.config
    options, names = config.prompts, config.response_files
    reader, groups = ResponseReader(match), _Groups()
    group_of, file_of, cut = array("q"), array("q"), 0
    texts, texts_of = folder.with_name(folder.name + ".texts"), set[int]()
    try:
        with (
            CorpusWriter(folder) as writer,
            open(texts, "w+", encoding="utf-8") as asked,
            Progress("reading responses", None) as progress,
        ):
            for written in reader.read(names):
                writer.add(written.row)
                cut += written.values.get("finish_reason") == "length"
                group = groups.of((written.file, written.number("index")))
                if not written.number("part"):
                    prompt = written.row.tokens[: written.row.prompt_tokens]
                    groups.join(group, groups.of(tokens_digest(prompt)))
                for said in _questions_of(written):
                    line = json.dumps([group, *said])
                    if (key := hash(line)) not in texts_of:  # all samples ask the same, unless one was cut short
                        texts_of.add(key)
                        asked.write(line + "\n")
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
            shared = SharedText()
            counted: set[int] = set()
            for group, _, text in _texts(asked, roots):
                if group not in counted:
                    shared.add(text)
                counted.add(group)
            duplicates = Duplicates(options.similarity, shared)
            apart: set[int] = set()  # held-out groups
            near: set[int] = set()  # groups with similar prompts
            if config.held_out:
                modes = {sampler.get("thinking") for sampler in reader.samplers}
                thinking = config.responses.thinking
                if thinking is None and len(modes) == 1:  # same mode as the prompts of the responses
                    thinking = modes.pop()
                held_out, conversations = held_out_of_files(reading, thinking)
                for each in conversations:
                    for text in (each.asked, first_asked(each)):
                        duplicates.seen(text, under=each.instructions)
                same = (groups.known(tokens_digest(prompt.tokens)) for prompt in held_out)
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
                progress.print(f"dropped {len(near)} prompts, {LIKE_HELD_OUT} (prompts.similarity)")
            keep = np.isin(of, asks) & ~np.isin(of, np.array([*apart, *near], np.int64))
            if not keep.any():
                way_out = "prompts.similarity=1 keeps all that differ" if near else "give more data"
                raise UserError(
                    f"no prompt is left to train on: of {len(asks)}, {len(apart)} are held out and {len(near)} are "
                    f"{LIKE_HELD_OUT}; {way_out}"
                )
            counts = {
                "prompts": len(asks) - len(apart) - len(near),
                "held_out": len(held_out),
                "found": found,
                "like_held_out": len(near),
            }
            _count_cut(cut, len(writer), counts)
            data = PromptData(digest, held_out, counts, reader.samplers)
            writer.commit({"of": fingerprint} | data.to_json(), keep=np.flatnonzero(keep))
    finally:
        texts.unlink(missing_ok=True)


def _count_cut(cut: int, rows: int, counts: dict[str, int]) -> None:
    """Adds the number of responses that reached the limit to the counts, and prints it."""
    if cut:
        counts["cut"] = cut
        many = "warning: " if cut > MANY_CUT * rows else ""
        way_out = "; raise responses.max_tokens" if many else " (responses.max_tokens)"
        print(f"{many}{cut} of {rows} responses are cut at the limit{way_out}", file=sys.stderr)


def _questions_of(written: Written) -> list[tuple[str, str]]:
    """Returns instructions with the questions of all turns, and of the first one, from a conversation's last row."""
    messages, tools = (written.values.get(key) for key in ("messages", "tools"))
    if written.number("part") + 1 < written.number("parts", 1) or not isinstance(messages, list):
        return []
    turns = tuple((m,) for m in messages if isinstance(m, dict) and isinstance(m.get("content"), str))
    each = Conversation("", turns, tuple(tools) if isinstance(tools, list) else ())
    questions = [turn for turn in turns if turn[0].get("role") == "user"]
    first = replace(each, turns=tuple(questions[:1])).asked
    return [(each.instructions, text) for text in dict.fromkeys((each.asked, first))]


def _texts(asked: TextIO, roots: npt.NDArray[np.int64]) -> Iterator[tuple[int, str, str]]:
    """Yields group, instructions and questions of all conversations."""
    asked.seek(0)
    for line in asked:
        group, instructions, text = json.loads(line)
        yield int(roots[group]), instructions, text


def _near(asked: TextIO, roots: npt.NDArray[np.int64], apart: set[int], duplicates: Duplicates) -> set[int]:
    """Returns groups with prompts similar to those of the groups `apart` or to texts in `duplicates`."""
    for group, instructions, text in _texts(asked, roots):
        if group in apart:
            duplicates.seen(text, under=instructions)
    return {
        group
        for group, instructions, text in _texts(asked, roots)
        if group not in apart and duplicates.holds(text, under=instructions)
    }


def _sample(count: int, most: int, seed: int) -> npt.NDArray[np.int64]:
    """Returns a sorted random sample of at most `most` of `count` indices."""
    if not most or count <= most:
        return np.arange(count)
    return np.sort(np.random.default_rng(seed).permutation(count)[:most])
