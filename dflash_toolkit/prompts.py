"""Prompt files and chat templates: JSONL rows of the usual shapes become messages, messages become token ids."""

import gzip
import hashlib
import json
import lzma
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from .config import UserError

Message = dict[str, Any]  # role and content, both text; with tools also tool_calls, tool_call_id, name
Tool = dict[str, Any]  # {"type": "function", "function": {"name", "description", "parameters"}}

REASONING = "Please reason step by step, and put your final answer within \\boxed{}."
MALFORMED = (TypeError, LookupError, AttributeError, RecursionError, ValueError)  # what `read_chat` may raise
UNREADABLE = (OSError, UnicodeDecodeError, lzma.LZMAError, zlib.error, EOFError)  # what reading `open_text` may raise
SOLVE = "Write a solution to the following problem and make sure that it passes the tests:\n```python\n{prompt}\n```"


ROLES = {
    "human": "user", "gpt": "assistant", "chatgpt": "assistant", "bard": "assistant", "bing": "assistant",
    "developer": "system", "observation": "tool", "function": "tool", "tool_response": "tool",
}  # fmt: skip
CALLS = ("function_call", "tool_call")  # roles of ShareGPT's turns that hold calls alone


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


# ---- rows ----------------------------------------------------------------------------------------------------


def read_chat(row: dict[str, Any]) -> tuple[list[Message], tuple[Tool, ...]]:
    """Messages, recorded answers included, and tools of a row of any usual shape.

    The shapes: `messages`, ShareGPT's `conversations` (`from` and `value`) or a `prompt` that is a list of messages;
    `turns` (the first); `question` (asked to reason step by step, as gsm8k and math500 are evaluated), `prompt` (with
    `entry_point`: a HumanEval row, asked to be solved; else verbatim), `text` (MBPP), `instruction` with an optional
    `input`, `query` or `input`, with the answer in `response` or `output`. A column `system` or `system_prompt` goes
    first unless there is a system message; `tools` is a list or the JSON text of one.

    Raises:
        ValueError, TypeError, LookupError, AttributeError: the row is malformed. Contents of rows that are no lists of
            messages are not looked at: they may be of any type.
    """
    given = {key: value for key, value in row.items() if value is not None}  # columns that a row does not fill
    turns = next((given[key] for key in ("messages", "conversations", "prompt") if type(given.get(key)) is list), None)
    messages = _asked(given) if turns is None else _said(turns)
    system = given.get("system") or given.get("system_prompt") or ""
    if not isinstance(system, str):
        raise TypeError("system must be text")
    if system.strip() and not any(message["role"] == "system" for message in messages[:1]):
        messages.insert(0, {"role": "system", "content": system})
    return messages, _tools(given.get("tools"))


def _said(turns: list[Any]) -> list[Message]:
    messages: list[Message] = []
    for message in map(_message, turns):
        last = messages[-1] if messages else message
        if "tool_calls" in message and not message["content"] and messages and last["role"] == "assistant":
            # ShareGPT gives a text and each of its calls a turn of its own
            messages[-1] = last | {"tool_calls": [*last.get("tool_calls", ()), *message["tool_calls"]]}
        else:
            messages.append(message)
    return messages


def _message(turn: dict[str, Any]) -> Message:
    turn = {key: value for key, value in turn.items() if value is not None}
    role = turn["role"] if "role" in turn else turn["from"]
    content = turn.get("content", turn.get("value"))
    if role in CALLS:
        return {"role": "assistant", "content": "", "tool_calls": _calls(content)}
    role = ROLES.get(role, role)
    if role not in ("system", "user", "assistant", "tool"):
        raise ValueError(f"role {role!r} is not one of system, user, assistant, tool")
    more: dict[str, Any] = {}
    if role == "assistant" and (calls := turn.get("tool_calls") or turn.get("function_call")):
        more["tool_calls"] = _calls(calls)
    elif role == "tool":
        more = {key: turn[key] for key in ("name", "tool_call_id") if isinstance(turn.get(key), str)}
    if content is None:
        if not more and role != "tool":
            raise KeyError("content")
        content = ""
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        content = "".join(part["text"] for part in content)
    if role == "tool" and isinstance(content, dict | list):
        content = json.dumps(content, ensure_ascii=False)
    if not isinstance(content, str):
        raise TypeError("content must be text")
    return {"role": role, "content": content, **more}


def _calls(value: Any) -> list[dict[str, Any]]:
    """Tool calls as templates want them: each under `function`, its arguments a mapping."""
    found = _parsed(value)
    calls = []
    for call in map(_parsed, found if isinstance(found, list) else [found]):
        function = call["function"] if isinstance(call.get("function"), dict) else call
        arguments = _parsed(function.get("arguments") or {})
        if not isinstance(function.get("name"), str) or not isinstance(arguments, dict):
            raise ValueError("a tool call needs a name, and arguments that are a JSON object")
        named = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
        made = {"type": "function", "function": {"name": function["name"], "arguments": _filled(arguments)}}
        calls.append(named | made)
    return calls


def _tools(value: Any) -> tuple[Tool, ...]:
    found = _parsed(value or [])
    tools = [_parsed(tool) for tool in (found if isinstance(found, list) else [found])]
    for tool in tools:
        if not isinstance(tool, dict) or not isinstance((tool.get("function") or tool).get("name"), str):
            raise ValueError("tools must be a list of JSON objects, each with a name")
    return tuple(_filled(tool if tool.get("function") else {"type": "function", "function": tool}) for tool in tools)


def _parsed(value: Any) -> Any:
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError as error:
        raise ValueError(f"tools and tool calls must be JSON, not {value[:40]!r}") from error


def _filled(value: Any) -> Any:
    """Without the keys that have no value: Arrow gives every struct of a column the keys of all."""
    if isinstance(value, dict):
        return {key: _filled(each) for key, each in value.items() if each is not None}
    return [_filled(each) for each in value] if isinstance(value, list) else value


def _asked(row: dict[str, Any]) -> list[Message]:
    """Messages of a row that is no list of them."""
    text: Any = None
    if isinstance(row.get("turns"), list):
        return [{"role": "user", "content": row["turns"][0].strip()}]
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
    elif "query" in row or "input" in row:
        text = row["query"] if "query" in row else row["input"]
    elif key := next((key for key in ("messages", "conversations", "turns") if key in row), None):
        raise TypeError(f"{key} must be a list")
    else:
        names = "messages, conversations, turns, question, prompt, text, instruction, query, input"
        raise ValueError(f"none of {names} is in this row")
    asked = [{"role": "user", "content": text}]
    answer = row.get("response", row.get("output"))
    return asked if answer is None else [*asked, {"role": "assistant", "content": answer}]


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


def split_messages(messages: list[Message]) -> tuple[list[Message], list[Message]]:
    """What precedes the first assistant turn, and what there is from it on."""
    first = next((i for i, message in enumerate(messages) if message["role"] == "assistant"), len(messages))
    return messages[:first], messages[first:]


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
