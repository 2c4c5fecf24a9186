"""Prompt files and chat templates: JSONL rows of the usual shapes become messages, messages become token ids."""

import gzip
import hashlib
import json
import lzma
import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from .config import UserError

Message = dict[str, str]

REASONING = "Please reason step by step, and put your final answer within \\boxed{}."
UNREADABLE = (OSError, UnicodeDecodeError, lzma.LZMAError, zlib.error, EOFError)  # what reading `open_text` may raise
SOLVE = "Write a solution to the following problem and make sure that it passes the tests:\n```python\n{prompt}\n```"


@dataclass(frozen=True, slots=True)
class Prompt:
    """What is asked, up to and without the assistant's answer; the file's own answer, where it has one."""

    id: str
    messages: tuple[Message, ...]
    answer: str | None = None


@dataclass(frozen=True, slots=True)
class Conversation:
    """What is asked, turn by turn: the messages before each answer. The answers themselves are left out."""

    id: str
    turns: tuple[tuple[Message, ...], ...]

    @property
    def asked(self) -> str:
        """What is asked, all turns."""
        return self._said("user")

    @property
    def instructions(self) -> str:
        """The system messages."""
        return self._said("system")

    def _said(self, role: str) -> str:
        return "\n".join(message["content"] for turn in self.turns for message in turn if message["role"] == role)


ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bard": "assistant", "bing": "assistant"}


def conversation(row: Any, default_id: str) -> Conversation:
    """A row of any usual shape, all its turns.

    Besides what `read_prompts` knows: ShareGPT's `conversations` (`from` and `value`), every one of `turns`, a `prompt`
    that is a list of messages, contents that are lists of text parts, and a bare string.

    Raises:
        ValueError: says in a few words what is wrong with the row.
    """
    if isinstance(row, str):
        row = {"prompt": row}
    if not isinstance(row, dict):
        raise ValueError(f"expected an object, got {type(row).__name__}")
    name = next((row[key] for key in ("id", "task_id") if isinstance(row.get(key), str | int)), default_id)
    try:
        turns = _asked(row)
    except (TypeError, LookupError, AttributeError) as error:
        raise ValueError(f"malformed row ({error!r})") from error
    if not turns or not all(any(m["role"] == "user" and m["content"].strip() for m in turn) for turn in turns):
        raise ValueError("a turn asks nothing")
    return Conversation(str(name), turns)


def _asked(row: dict[str, Any]) -> tuple[tuple[Message, ...], ...]:
    messages = next((row[k] for k in ("messages", "conversations", "prompt") if isinstance(row.get(k), list)), None)
    if messages is not None:
        return _turns([_message(turn) for turn in messages])
    if isinstance(row.get("turns"), list):
        return tuple(({"role": "user", "content": turn.strip()},) for turn in row["turns"])
    given = {key: value for key, value in row.items() if value is not None}  # columns that a row does not fill
    asked, _ = _messages({key: value for key, value in given.items() if key not in ("messages", "turns")})
    if asked is None:
        raise ValueError("none of messages, conversations, turns, question, prompt, text, instruction is in this row")
    if not all(isinstance(message["content"], str) for message in asked):
        raise TypeError("the prompt must be text")
    return (tuple(asked),)


def _message(turn: dict[str, Any]) -> Message:
    role = turn["role"] if "role" in turn else turn["from"]
    content = turn["content"] if "content" in turn else turn["value"]
    if isinstance(content, list) and all(part["type"] == "text" for part in content):
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise TypeError("content must be text")
    role = ROLES.get(role, role)
    if role not in ("system", "user", "assistant"):
        raise ValueError(f"role {role!r} is not one of system, user, assistant")
    return {"role": role, "content": content}


def _turns(messages: list[Message]) -> tuple[tuple[Message, ...], ...]:
    turns: list[list[Message]] = [[]]
    for message in messages:
        if message["role"] == "assistant":
            turns.append([])
        else:
            turns[-1].append(message)
    return tuple(tuple(turn) for turn in (turns if turns[-1] else turns[:-1]))


def read_prompts(path: str | Path, limit: int | None = None) -> list[Prompt]:
    """Read a JSONL file (plain, .gz or .xz) with one prompt a line.

    A row holds one of: `messages` (what precedes the first assistant turn is the prompt), `turns` (the first),
    `question` (asked to reason step by step, as gsm8k and math500 are evaluated), `prompt` (with `entry_point`: a
    HumanEval row, asked to be solved; else verbatim), `text` (MBPP) or `instruction` with an optional `input`.
    `id` or `task_id` names the row.

    Raises:
        UserError: no such file, an empty one, or a malformed row (with its line number).
    """
    prompts: list[Prompt] = []
    try:
        with open_text(Path(path)) as lines:
            for number, line in enumerate(lines, 1):
                if limit is not None and len(prompts) >= limit:
                    break
                if line.strip():
                    prompts.append(_parse(line, f"{path}, line {number}", f"{Path(path).name}/{number}"))
    except UNREADABLE as error:
        raise UserError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})") from error
    if not prompts:
        raise UserError(f"{path}: holds no prompts; expected one JSON object a line")
    return prompts


@dataclass(frozen=True, slots=True)
class PromptSet:
    """Rows of a prompt file, under a name."""

    name: str
    file: str
    start: int = 0
    stop: int | None = None  # None: to the end

    def read(self, limit: int | None = None) -> list[Prompt]:
        """The prompts, at most `limit` of them.

        Raises:
            UserError: no such rows, and what `read_prompts` raises.
        """
        ends = [end for end in (self.stop, None if limit is None else self.start + limit) if end is not None]
        prompts = read_prompts(self.file, min(ends, default=None))[self.start :]
        if not prompts:
            raise UserError(f"{self.file}: no such rows; the set {self.name!r} begins with row {self.start}")
        return prompts


def parse_prompt_sets(items: Sequence[str]) -> list[PromptSet]:
    """Items NAME=FILE, or NAME=FILE[START:STOP], which takes rows START..STOP - 1 of the file, counted from 0.

    Raises:
        ValueError: another form, a range without rows, or a name used twice.
    """
    sets: dict[str, PromptSet] = {}
    for item in items:
        found = re.fullmatch(r"([^=]+)=(.+?)(?:\[(\d*):(\d*)\])?", item)
        if not found:
            raise ValueError(f"prompts {item!r}: expected NAME=FILE or NAME=FILE[START:STOP]")
        name, file = found[1], found[2]
        start, stop = int(found[3] or 0), int(found[4]) if found[4] else None
        if stop is not None and stop <= start:
            raise ValueError(f"prompts {item!r}: no such rows")
        if name in sets:
            raise ValueError(f"prompts {item!r}: the name {name!r} is used twice")
        sets[name] = PromptSet(name, file, start, stop)
    return list(sets.values())


def read_prompt_sets(items: Sequence[str], limit: int | None = None) -> dict[str, list[Prompt]]:
    """Prompts by name, of items that `parse_prompt_sets` knows.

    Args:
        limit: at most so many of each.

    Raises:
        UserError: what `parse_prompt_sets` finds wrong, no such rows, and what `read_prompts` raises.
    """
    try:
        found = parse_prompt_sets(items)
    except ValueError as error:
        raise UserError(str(error)) from error
    return {each.name: each.read(limit) for each in found}


def open_text(path: Path) -> TextIO:
    """A text file, plain, .gz or .xz."""
    openers: dict[str, Any] = {".gz": gzip.open, ".xz": lzma.open}
    return openers.get(path.suffix, open)(path, "rt", encoding="utf-8-sig")  # some editors write a byte order mark


def _parse(line: str, where: str, default_id: str) -> Prompt:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: not valid JSON ({error})") from error
    if not isinstance(row, dict):
        raise UserError(f"{where}: expected a JSON object, got {type(row).__name__}")
    try:
        messages, answer = _messages(row)
        if answer is not None and not isinstance(answer, str):
            raise TypeError(f"the answer must be text, not {answer!r}")
        if not all(isinstance(message["content"], str) for message in messages or ()):
            raise TypeError("the prompt must be text")
    except (TypeError, LookupError, AttributeError) as error:
        raise UserError(f"{where}: malformed row ({error!r})") from error
    if messages is None:
        raise UserError(f"{where}: none of messages, turns, question, prompt, text, instruction is in this row")
    if not messages or not all(m["content"].strip() for m in messages if m["role"] == "user"):
        raise UserError(f"{where}: the prompt is empty")
    names = (row.get("id"), row.get("task_id"), default_id)  # a null is no name
    return Prompt(str(next(name for name in names if name is not None)), tuple(messages), answer)


def _messages(row: dict[str, Any]) -> tuple[list[Message] | None, str | None]:
    if "messages" in row:
        return split_messages([{"role": m["role"], "content": m["content"]} for m in row["messages"]])
    if "turns" in row:
        if not isinstance(row["turns"], list):
            raise TypeError("turns must be a list")
        return [{"role": "user", "content": row["turns"][0].strip()}], None
    text: str | None = None
    if "question" in row:
        text = f"{row['question'].strip()}\n{REASONING}"
    elif "prompt" in row and "entry_point" in row:
        text = SOLVE.format(prompt=row["prompt"].strip())
    elif "prompt" in row:
        text = row["prompt"]
    elif "text" in row:
        tests = row.get("test_list")
        text = f"{row['text']}\nYour code should pass this test:\n{tests[0]}" if tests else row["text"]
    elif "instruction" in row:
        text = "\n".join(part for part in (row["instruction"], row.get("input") or "") if part)
    answer = row.get("response", row.get("output"))
    return (None if text is None else [{"role": "user", "content": text}]), answer


def split_messages(messages: list[Message]) -> tuple[list[Message], str | None]:
    """What precedes the first assistant turn, and that turn's content. Raises TypeError for contents not text."""
    if not all(isinstance(m["role"], str) and isinstance(m["content"], str) for m in messages):
        raise TypeError("role and content must be text")
    for i, message in enumerate(messages):
        if message["role"] == "assistant":
            return messages[:i], message["content"]
    return messages, None


def encode_chat(
    tokenizer: Any, messages: tuple[Message, ...] | list[Message], thinking: bool | None = None
) -> list[int]:
    """Token ids of the rendered chat, ready for the assistant's first token.

    Args:
        thinking: passed to templates that know `enable_thinking`; None leaves it to the template.

    Raises:
        UserError: the tokenizer has no chat template, or the template refuses these messages.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise UserError("the target's tokenizer has no chat template; use an instruction-tuned target")
    extra = {} if thinking is None else {"enable_thinking": thinking}
    try:
        return list(
            tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, return_dict=False, **extra)
        )
    except Exception as error:  # jinja's own errors and whatever a template raises
        raise UserError(f"the chat template refuses these messages: {error}") from error


def template_hash(tokenizer: Any) -> str:
    """sha256 of the chat template: a drafter is only as good as the match between training and serving."""
    return hashlib.sha256(str(getattr(tokenizer, "chat_template", None)).encode()).hexdigest()


def file_hash(paths: tuple[str, ...] | list[str]) -> str:
    """sha256 over the contents of files, in order. Raises UserError."""
    digest = hashlib.sha256()
    for path in paths:
        for chunk in _chunks(Path(path)):
            digest.update(chunk)
    return digest.hexdigest()


def _chunks(path: Path) -> Iterator[bytes]:
    try:
        with open(path, "rb") as handle:
            while chunk := handle.read(1 << 20):
                yield chunk
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from error
