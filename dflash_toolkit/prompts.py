"""Prompts to be answered, and chat templates: rows become messages, messages become token ids."""

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from .config import UserError
from .conversations import MALFORMED as MALFORMED
from .conversations import Message, Tool, read_chat, split_messages
from .sources import UNREADABLE, open_text
from .sources import file_hash as file_hash


@dataclass(frozen=True, slots=True)
class Prompt:
    """What is asked, up to and without the assistant's answer, and what the file has from there on."""

    id: str
    messages: tuple[Message, ...]
    rest: tuple[Message, ...] = ()  # from the recorded first answer (a text or tool calls) to the end
    tools: tuple[Tool, ...] = ()

    @property
    def answer(self) -> str | None:
        """The text of the recorded first answer."""
        return self.rest[0]["content"] if self.rest else None


# ---- files ---------------------------------------------------------------------------------------------------


def read_prompts(path: str | Path, limit: int | None = None) -> list[Prompt]:
    """Read a JSONL file (plain, .gz or .xz) with one prompt a line.

    A row has any shape that `read_chat` knows; what precedes the first assistant turn is the prompt. `id` or `task_id`
    names the row.

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


def _parse(line: str, where: str, default_id: str) -> Prompt:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: not valid JSON ({error})") from error
    if not isinstance(row, dict):
        raise UserError(f"{where}: expected a JSON object, got {type(row).__name__}")
    try:
        messages, tools = read_chat(row)
        if not all(isinstance(message["content"], str) for message in messages):
            raise TypeError("prompt and answer must be text")
    except (TypeError, LookupError, AttributeError, RecursionError) as error:
        raise UserError(f"{where}: malformed row ({error!r})") from error
    except ValueError as error:
        raise UserError(f"{where}: {error}") from error
    asked, rest = split_messages(messages)
    if not asked or not all(m["content"].strip() for m in asked if m["role"] == "user"):
        raise UserError(f"{where}: the prompt is empty")
    names = (row.get("id"), row.get("task_id"), default_id)  # a null is no name
    return Prompt(str(next(name for name in names if name is not None)), tuple(asked), tuple(rest), tools)


# ---- chat templates ------------------------------------------------------------------------------------------


def encode_chat(
    tokenizer: Any,
    messages: Sequence[Message],
    thinking: bool | None = None,
    tools: Sequence[Tool] = (),
    *,
    ask: bool = True,
) -> list[int]:
    """Token ids of the rendered chat, ready for the assistant's first token.

    Args:
        thinking: passed to templates that know `enable_thinking`; None leaves it to the template.
        tools: passed to the template, which must show them.
        ask: False for a chat that ends with what it says.

    Raises:
        UserError: the tokenizer has no chat template, or the template refuses these messages or leaves their tools out.
    """
    return list(apply_template(tokenizer, messages, thinking, tools, add_generation_prompt=ask, return_dict=False))


def apply_template(
    tokenizer: Any, messages: Sequence[Message], thinking: bool | None, tools: Sequence[Tool], **options: Any
) -> Any:
    """`tokenizer.apply_chat_template`. Raises as `encode_chat` does."""
    if not getattr(tokenizer, "chat_template", None):
        raise UserError("the target's tokenizer has no chat template; use an instruction-tuned target")
    extra = {} if thinking is None else {"enable_thinking": thinking}

    def render(messages: list[Message], tools: list[Tool], **options: Any) -> Any:
        return tokenizer.apply_chat_template(messages, tools=tools or None, **options, **extra)

    try:
        if lost := _lost(partial(render, tokenize=False), list(messages), list(tools)):
            raise ValueError(f"it leaves out {lost}")
        return render(list(messages), list(tools), **options)
    except Exception as error:  # jinja's own errors and whatever a template raises
        raise UserError(f"the chat template refuses these messages: {error}") from error


def _lost(render: Callable[..., str], messages: list[Message], tools: list[Tool]) -> str | None:
    """What a template does not show: one that was written without tools passes over them in silence."""
    if not tools and not any("tool_calls" in message or message["role"] == "tool" for message in messages):
        return None
    whole = render(messages, tools)
    uncalled = [{k: v for k, v in message.items() if k != "tool_calls"} for message in messages]
    untold = [message for message in messages if message["role"] != "tool"]
    without = {"tools": (messages, []), "tool calls": (uncalled, tools), "tool results": (untold, tools)}
    for part, (fewer, fewer_tools) in without.items():
        if (fewer, fewer_tools) == (messages, tools):
            continue
        try:
            if render(fewer, fewer_tools) == whole:
                return part
        except Exception:  # the template needs them: it knows them
            continue
    return None


def template_hash(tokenizer: Any) -> str:
    """sha256 of the chat template: a drafter is only as good as the match between training and serving."""
    return hashlib.sha256(str(getattr(tokenizer, "chat_template", None)).encode()).hexdigest()
