"""Prompts that the target writes itself: `self:N` among the sources of data.

The chat template up to the user's words is the target's input, and it samples what a user would say there (Magpie, Xu
et al., arXiv 2406.08464). Texts that are no prompts and near duplicates are left out and counted. All attempts go to a
journal in their order, so that a run resumes, and its prompts follow from the seed.
"""

import itertools
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dflash_toolkit.config import UserError
from dflash_toolkit.data.prompts import Message, encode_chat
from dflash_toolkit.evaluation.measure.decoders import Chat, Decoder, Response
from dflash_toolkit.files import append_lines, cut_journal, read_json, write_json, write_text
from dflash_toolkit.fingerprint import files_digest
from dflash_toolkit.progress import Progress
from dflash_toolkit.sampling import SamplingParams

from ..data_options import SynthesisOptions, own_count
from ..responses.conversation import said
from ..responses.generate import seed_of, submit_all
from ..run.settings import first_difference
from .dedup import Duplicates
from .quality import fault_of
from .user_turn import UserTurn, user_turn

SYSTEMS = (  # the template's system message says, for breadth; "": the template's own
    "",
    "You are a helpful assistant.",
    "You are an expert in mathematics. The user asks you to solve word problems, equations and proofs.",
    "You are an expert programmer. The user asks you to write, explain or fix code.",
    "You are a helpful assistant. The user asks for explanations of science, technology and history.",
    "You are a writer. The user asks you to write or edit stories, emails, essays and other texts.",
    "You are a helpful assistant. The user gives a text and asks for a summary, a translation or facts from it.",
    "You are an adviser. The user asks for practical advice on work, money, health, travel or daily life.",
    "You are a data analyst. The user asks about data, tables, SQL and statistics.",
    "You are a helpful assistant. The user gives puzzles and questions that need reasoning step by step.",
)
ANSWER_TOKENS = 512  # longest answer between two turns
WINDOW, LEAST_KEPT = 500, 10  # fewer prompts of this many attempts end the run
CUT, DUPLICATE = "without an end", "near duplicates"


def systems_of(options: SynthesisOptions) -> tuple[str, ...]:
    """Returns the system messages, of topics if a file has any. Raises UserError."""
    if not options.topics:
        return SYSTEMS
    try:
        lines = Path(options.topics).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"topics {options.topics}: cannot be read ({error})") from error
    topics = [line.strip() for line in lines if line.strip()]
    if not topics:
        raise UserError(f"topics {options.topics}: holds no topics; write one on each line")
    return tuple(f"You are a helpful assistant. The user asks about this topic: {topic}" for topic in topics)


@dataclass(frozen=True, kw_only=True)
class OwnPrompts:
    """The inputs that determine the prompts."""

    target: str
    digest: str | None  # digest of its weights
    template: str  # digest of its chat template
    tokenizer: Any
    count: int
    seed: int
    similarity: float  # see `Duplicates`
    max_length: int  # tokens of prompt and answer together
    options: SynthesisOptions

    def places(self) -> list[tuple[list[Message], UserTurn]]:
        """Returns system messages with the user's turn after each. Raises UserError if a template knows none."""
        found = []
        for system in systems_of(self.options):
            before = [{"role": "system", "content": system}] if system else []
            try:
                found.append((before, user_turn(self.tokenizer, before)))
            except UserError as error:
                if not before or self.options.topics:
                    raise UserError(f"target {self.target}: {error}") from error
        return found  # without those that the template refuses

    @property
    def record(self) -> dict[str, Any]:
        topics = files_digest([self.options.topics]) if self.options.topics else None
        return {
            "target": self.target, "target_digest": self.digest, "template_hash": self.template, "count": self.count,
            "seed": self.seed, "similarity": self.similarity, "max_length": self.max_length, "topics": topics,
            "turns": self.options.turns, "script": self.options.script, "max_tokens": self.options.max_tokens,
            "temperature": self.options.temperature,
        }  # fmt: skip


@dataclass(slots=True)
class Attempt:
    """One conversation whose user turns the target writes; `request` is what is decoded next, if anything."""

    number: int
    plan: OwnPrompts
    before: list[Message]
    turn: UserTurn
    messages: list[Message] = field(default_factory=list)
    fault: str | None = None
    tokens: int = 0
    request: tuple[list[int], SamplingParams] | None = None

    def __post_init__(self) -> None:
        self._ask_user()

    @property
    def chat(self) -> Chat:
        return Chat([*self.before, *self.messages])

    def _ask_user(self) -> None:
        options = self.plan.options
        room = min(options.max_tokens, self.plan.max_length - len(self.turn.opening) - 2)
        if room < 1:
            self._end("too long")
            return
        self.request = self.turn.opening, self._params(room, self.turn.stop_ids)

    def _params(self, tokens: int, stops: tuple[int, ...] = ()) -> SamplingParams:
        seed = seed_of(self.plan.seed, self.number, len(self.messages))
        temperature = self.plan.options.temperature
        return SamplingParams(temperature=temperature, seed=seed, max_tokens=tokens, stop_token_ids=stops)

    def _end(self, fault: str | None = None) -> None:
        """Ends the conversation with the user's last turn."""
        self.request = None
        if not self.messages:
            self.fault = fault
        elif self.messages[-1]["role"] == "assistant":
            self.messages.pop()

    def on_response(self, response: Response) -> None:
        """Adds the words that the target wrote. A later turn that is no prompt ends the conversation before it."""
        self.tokens += len(response.tokens)
        stopped = response.finish_reason == "stop"
        tokens = response.tokens[:-1] if stopped else response.tokens
        if self.messages and self.messages[-1]["role"] == "user":
            self._take_answer(said(self.plan.tokenizer, tokens), stopped)
            return
        words, ended = self.turn.words_in(str(self.plan.tokenizer.decode(tokens, skip_special_tokens=False)))
        fault = fault_of(words, self.plan.options.script) if stopped or ended else CUT
        if fault:
            self._end(fault)
            return
        self.messages.append({"role": "user", "content": words})
        if sum(message["role"] == "user" for message in self.messages) >= self.plan.options.turns:
            self._end()
            return
        ids = encode_chat(self.plan.tokenizer, [*self.before, *self.messages])
        room = min(ANSWER_TOKENS, self.plan.max_length - len(ids))
        if room < 1:
            self._end()
            return
        self.request = ids, self._params(room)

    def _take_answer(self, text: str, stopped: bool) -> None:
        self.request = None
        if not stopped or not text.strip():
            self._end()
            return
        self.messages.append({"role": "assistant", "content": text})
        try:
            self.turn = user_turn(self.plan.tokenizer, [*self.before, *self.messages])
        except UserError:  # a template for one turn
            self._end()
            return
        self._ask_user()


@dataclass(slots=True)
class _Kept:
    """The prompts so far, and why attempts were left out."""

    duplicates: Duplicates
    prompts: list[dict[str, Any]] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)
    attempts: int = 0
    before_window: int = 0  # prompts when the window of attempts began

    def take(self, line: dict[str, Any]) -> dict[str, Any]:
        """Counts the next attempt; returns its line for the journal. Raises UserError if too few are prompts."""
        self.attempts += 1
        messages = line.get("messages")
        if messages:
            asked = "\n".join(message["content"] for message in messages if message["role"] == "user")
            if self.duplicates.seen(asked):
                line = {"attempt": line["attempt"], "left_out": DUPLICATE}
        if "left_out" in line:
            self.left_out[line["left_out"]] += 1
        else:
            self.prompts.append(line)
        if self.attempts % WINDOW == 0:
            if len(self.prompts) - self.before_window < LEAST_KEPT:
                raise UserError(
                    f"the target wrote only {len(self.prompts)} usable prompts in {self.attempts} attempts "
                    f"({self.reasons}); ask for fewer, give other --topics, or prompts with --data"
                )
            self.before_window = len(self.prompts)
        return line

    @property
    def reasons(self) -> str:
        return ", ".join(f"{count} {reason}" for reason, count in self.left_out.most_common()) or "none"


def write_own(plan: OwnPrompts, path: Path, open_decoder: Callable[[], Decoder], leads: bool = True) -> None:
    """Lets the target write prompts into `path`, a file of ordinary prompts; resumes an earlier call.

    Args:
        open_decoder: loads the target, unless the prompts are there.
        leads: whether this process writes; others only decode with it.

    Raises:
        UserError: the template has no user's turn, too few texts are prompts, or other settings wrote the file.
    """
    places, meta, journal = plan.places(), path.with_suffix(".run.json"), path.with_suffix(".attempts.jsonl")
    of = json.loads(json.dumps(plan.record))
    if path.exists() and meta.exists():
        _check_same(path, read_json(meta).get("of"), of)
        return
    kept = _Kept(Duplicates(plan.similarity))
    for line in _resumed(journal, of, leads):
        kept.take(line)
    began, decoded = time.perf_counter(), 0
    if len(kept.prompts) < plan.count:
        backend = open_decoder()
        try:
            with Progress("prompts", plan.count, unit="tok") as progress:
                progress.advance(len(kept.prompts), units=0)
                for attempt in _in_order(backend, _attempts(plan, places, kept.attempts), kept.attempts):
                    before = len(kept.prompts)
                    line = {"attempt": attempt.number}
                    line |= {"left_out": attempt.fault} if attempt.fault else {"messages": attempt.messages}
                    line = kept.take(line)
                    if leads:
                        append_lines(journal, [line])
                    decoded += attempt.tokens
                    note = f"{kept.left_out.total()} left out" if kept.left_out else None
                    progress.advance(len(kept.prompts) - before, attempt.tokens, note)
                    if len(kept.prompts) == plan.count:
                        break
        finally:
            backend.close()
    if not leads:
        return
    seconds = time.perf_counter() - began
    rows = ({"id": f"self/{line['attempt']}", "messages": line["messages"]} for line in kept.prompts)
    write_text(path, "".join(json.dumps(row) + "\n" for row in rows))
    counts = {"prompts": len(kept.prompts), "attempts": kept.attempts, "left_out": dict(kept.left_out)}
    speed = {"tokens": decoded, "seconds": round(seconds, 1), "tokens_per_second": round(decoded / seconds, 1)}
    write_json(meta, {"of": of, "counts": counts, "speed": speed})
    journal.unlink(missing_ok=True)
    said_so = f"{path}: {len(kept.prompts)} prompts of {kept.attempts} attempts; left out: {kept.reasons}"
    print(said_so, file=sys.stderr)


def _check_same(path: Path, old: Any, of: dict[str, Any]) -> None:
    if difference := first_difference(old if isinstance(old, dict) else {}, of):
        raise UserError(f"{path} holds prompts of another run ({difference}); choose another --output or remove it")


def _resumed(journal: Path, of: dict[str, Any], leads: bool) -> list[dict[str, Any]]:
    """Returns the attempts in a journal, which is begun if there is none; cuts off a torn line."""
    if not journal.exists() or not journal.stat().st_size:
        if leads:
            append_lines(journal, [{"of": of}])
        return []
    lines, whole = [], 0
    with open(journal, "rb") as handle:
        for line in handle:
            if not line.endswith(b"\n"):
                break
            try:
                lines.append(json.loads(line))
            except ValueError as error:
                raise UserError(f"{journal}: damaged ({error}); remove it to begin again") from error
            whole += len(line)
    if leads:
        cut_journal(journal, whole)
    first, *attempts = lines or [{}]
    _check_same(journal, first.get("of"), of)
    return attempts


def _attempts(plan: OwnPrompts, places: Sequence[tuple[list[Message], UserTurn]], begin: int) -> Iterator[Attempt]:
    """Yields attempts without an end, the system messages in turn."""
    return (Attempt(number, plan, *places[number % len(places)]) for number in itertools.count(begin))


def _in_order(backend: Decoder, attempts: Iterator[Attempt], begin: int) -> Iterator[Attempt]:
    """Yields finished attempts by number: what is a duplicate must not depend on which ends first."""
    ended: dict[int, Attempt] = {}
    for attempt in submit_all(backend, attempts):
        ended[attempt.number] = attempt
        while (found := ended.pop(begin, None)) is not None:
            begin += 1
            yield found


def own_file(output: Path) -> Path:
    """Returns the file of own prompts: in an output folder, or next to an output file."""
    return output.with_suffix(".self.jsonl") if output.suffix == ".jsonl" else output / "self.jsonl"


def with_own_file(names: tuple[str, ...], path: Path) -> tuple[str, ...]:
    """Returns the sources with the file of own prompts in place of `self:N`."""
    return tuple(str(path) if own_count(name) is not None else name for name in names)
