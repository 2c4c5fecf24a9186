"""Prompts and chat templates: rows become messages, messages become token ids."""

import inspect
import itertools
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from ..config import UserError
from ..templates import encode_text, is_text
from .benchmarks import BENCHMARKS, PLACEHOLDER, SPEED_BENCH
from .conversations import BY_NAME, Conversation, Message, Tool, split_messages, with_short_ids
from .conversations import MALFORMED as MALFORMED
from .conversations import read_chat as read_chat
from .messages import REASONING
from .skipped import Skipped
from .sources import UNREADABLE as UNREADABLE
from .sources import Malformed, Source
from .sources import open_text as open_text


@dataclass(frozen=True, slots=True)
class Prompt:
    """The messages before the assistant's first answer, and the recorded rest."""

    id: str
    messages: tuple[Message, ...]
    rest: tuple[Message, ...] = ()  # from the recorded first answer (a text or tool calls) to the end
    tools: tuple[Tool, ...] = ()
    category: str | None = None  # the row's
    later: tuple[tuple[Message, ...], ...] = ()  # the messages after the first answer, turn by turn

    @property
    def answer(self) -> str | None:
        """The text of the recorded first answer."""
        return self.rest[0]["content"] if self.rest else None


# ---- files ---------------------------------------------------------------------------------------------------


def read_prompts(
    source: str | Path | Source,
    limit: int | None = None,
    *,
    form: str = BY_NAME,
    split: str = "train",
    skipped: Skipped | None = None,
) -> list[Prompt]:
    """Reads prompts from any source that `Source` supports, in its order, also rows of datasets.

    A row has any format that `read_chat` knows, or is a bare text; the messages before the first assistant turn are the
    prompt. `id` or `task_id` names the row; `category`, `domain` or `subject` is its category.

    Args:
        limit: maximum number of prompts; later rows are not read.
        form: one of `FORM_CHOICES`, if `source` is a text.
        split: of a dataset.
        skipped: counts malformed rows, which do not count towards the limit; without it they raise UserError.

    Raises:
        UserError: no such source, an empty one, or a malformed row (with its line number).
    """
    if not isinstance(source, Source):
        source = Source(str(source), form)
    skipped = Skipped(strict=True, option=None) if skipped is None else skipped
    return list(itertools.islice(_usable(source.read(split), skipped), limit))


def _usable(rows: Iterable[Conversation | Malformed], skipped: Skipped) -> Iterator[Prompt]:
    for found in rows:
        if isinstance(found, Malformed):
            skipped.add(found.reason, found.where)
        else:
            yield _prompt(found)


@dataclass(frozen=True, slots=True)
class PromptSet:
    """Rows of a source of prompts, under a name."""

    name: str
    source: Source
    split: str | None = None  # a benchmark's own, which overrides the common one

    def read(self, limit: int | None = None, split: str = "train", skipped: Skipped | None = None) -> list[Prompt]:
        """Returns the prompts, at most `limit` of them. Raises as `read_prompts` does."""
        return read_prompts(self.source, limit, split=self.split or split, skipped=skipped)

    def contents(self, split: str) -> str:
        """As `Source.contents`."""
        return self.source.contents(self.split or split)


def parse_prompt_sets(items: Sequence[str], form: str = BY_NAME) -> list[PromptSet]:
    """Items NAME=SOURCE, or NAME=SOURCE[START:STOP], which takes rows START..STOP - 1 of it, counted from 0.

    A bare SOURCE is one of `BENCHMARKS` on the hub, or is named after its file without the suffix, or after the last
    part of its dataset's name.

    Args:
        form: one of `FORM_CHOICES`: the prompt template of all sets; `auto` goes by each NAME.

    Raises:
        ValueError: another form, a range without rows, or a name used twice.
    """
    sets: dict[str, PromptSet] = {}
    for item in items:
        name, equals, source = item.partition("=")
        split = None
        base, bracket, rows = item.partition("[")
        if base in BENCHMARKS and not Path(item).exists():
            known = BENCHMARKS[base]
            if not known.place:
                raise ValueError(
                    f"prompts {item!r}: no dataset that can be streamed; give {base}=FILE, {known.elsewhere}"
                )
            name, split, source = base, known.split, known.place + bracket + rows
        elif not equals and not Path(base).suffix and "/" not in base and not Path(base).exists():
            names = ", ".join(BENCHMARKS)
            raise ValueError(f"prompts {item!r}: no such file; sets known by name are {names}; a dataset is OWNER/NAME")
        elif not equals:
            name, source = Path(item.partition("[")[0].partition(":")[0]).stem, item
        if not name or not source:
            raise ValueError(f"prompts {item!r}: expected NAME=SOURCE or NAME=SOURCE[START:STOP]")
        if name in sets:
            raise ValueError(f"prompts {item!r}: the name {name!r} is used twice")
        try:
            sets[name] = PromptSet(name, Source(source, form, label=name), split)
        except UserError as error:
            raise ValueError(f"prompts {item!r}: {str(error).partition(': ')[2]}") from error
    return list(sets.values())


def read_prompt_sets(
    items: Sequence[str],
    limit: int | None = None,
    *,
    form: str = BY_NAME,
    split: str = "train",
    skipped: Skipped | None = None,
) -> dict[str, list[Prompt]]:
    """Returns prompts by set, from items in the form of `parse_prompt_sets`.

    Args:
        limit: maximum per set.
        form: one of `FORM_CHOICES`.
        split: of datasets.
        skipped: as in `read_prompts`.

    Raises:
        UserError: as `parse_prompt_sets` and `read_prompts`, or no such rows.
    """
    try:
        found = parse_prompt_sets(items, form)
    except ValueError as error:
        raise UserError(str(error)) from error
    return {each.name: each.read(limit, split, skipped) for each in found}


def _prompt(found: Conversation) -> Prompt:
    if any(message["content"].startswith(PLACEHOLDER) for turn in found.turns for message in turn):
        raise UserError(f"{found.id}: SPEED-Bench only refers to this prompt; give a file {SPEED_BENCH}")
    _, rest = split_messages(list(found.recorded))
    return Prompt(found.id, found.turns[0], tuple(rest), found.tools, found.category, found.turns[1:])


# ---- chat templates ------------------------------------------------------------------------------------------

SHORT_IDS = re.compile(r"id\s*\|\s*length\s*!=\s*9")  # in Mistral's templates
_shown: set[int] = set()  # kinds of chats, see `_kind`, that a template has shown whole
MOST_KINDS = 4096


def encode_chat(
    tokenizer: Any,
    messages: Sequence[Message],
    thinking: bool | None = None,
    tools: Sequence[Tool] = (),
    *,
    ask: bool = True,
    variables: Mapping[str, Any] | None = None,
) -> list[int]:
    """Returns the token ids of the rendered chat, ready for the assistant's first token.

    Args:
        thinking: passed to templates that know `enable_thinking`; None leaves it to the template.
        tools: passed to the template, which must show them.
        ask: False for a chat that ends with an answer.
        variables: further variables for the template, see `template_variables`.

    Raises:
        UserError: the tokenizer has no chat template, or the template refuses these messages or leaves their tools out.
    """
    if is_text(tokenizer):
        return encode_text(tokenizer, messages, tools)
    given = {} if thinking is None else {"enable_thinking": thinking}
    given |= variables or {}
    return list(apply_template(tokenizer, messages, given, tools, add_generation_prompt=ask, return_dict=False))


def template_variables(tokenizer: Any, tools: Sequence[Tool] = ()) -> frozenset[str]:
    """Returns the variables that a chat template reads, except messages and tools; empty without a template."""
    if not getattr(tokenizer, "chat_template", None):
        return frozenset()
    given = {"messages", "raise_exception", "strftime_now", "bos_token", "eos_token", *tokenizer.special_tokens_map}
    given |= set(inspect.signature(tokenizer.apply_chat_template).parameters)
    return _looked_up(tokenizer.get_chat_template(None, list(tools) or None)) - given


def template_shows(tokenizer: Any, tools: Sequence[Tool] = ()) -> tuple[bool, bool]:
    """Returns whether a tokenizer's chat template reads tools, and whether it reads tool calls."""
    if not getattr(tokenizer, "chat_template", None):
        return False, False
    template = tokenizer.get_chat_template(None, list(tools) or None)
    return "tools" in _looked_up(template), "tool_calls" in template


def warn_of_thinking(tokenizer: Any, thinking: bool | None) -> None:
    """Warns on stderr that a chosen thinking mode changes nothing, if the chat template has none."""
    if thinking is not None and "enable_thinking" not in template_variables(tokenizer):
        print(
            f"warning: thinking={str(thinking).lower()} changes nothing: the target's chat template does not look at "
            f"enable_thinking",
            file=sys.stderr,
        )


@lru_cache(maxsize=16)
def _looked_up(template: str) -> frozenset[str]:
    from jinja2 import Environment, TemplateError, meta, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser

    class Generation(Extension):
        """Hugging Face's tags around an assistant's answer."""

        tags = {"generation"}  # noqa: RUF012 - as its base declares it

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    try:
        return frozenset(
            meta.find_undeclared_variables(Environment(extensions=[Generation, loopcontrols]).parse(template))
        )
    except TemplateError:  # rendering reports it
        return frozenset()


def apply_template(
    tokenizer: Any, messages: Sequence[Message], variables: Mapping[str, Any], tools: Sequence[Tool], **options: Any
) -> Any:
    """`tokenizer.apply_chat_template`. Raises as `encode_chat` does."""
    if not getattr(tokenizer, "chat_template", None):
        raise UserError(
            "the target's tokenizer has no chat template; give one with --chat-template FILE, or complete prompts as "
            "they are: --prompt-format text, and /v1/completions of a server"
        )

    def render(messages: list[Message], tools: list[Tool], **options: Any) -> Any:
        text = False
        if any("tool_calls" in message for message in messages):
            template = tokenizer.get_chat_template(None, tools or None)
            text = _wants_text(tokenizer, template)
            messages = with_short_ids(messages) if SHORT_IDS.search(template) else messages
        named = [_for_template(message, text) for message in messages]
        return tokenizer.apply_chat_template(named, tools=tools or None, **options, **variables)

    try:
        thought = not options.get("add_generation_prompt") and _thought(messages)
        kind = _kind(tokenizer, messages, variables, tools, thought)
        if kind not in _shown:
            if lost := _lost(partial(render, tokenize=False), list(messages), list(tools), thought):
                raise ValueError(f"it leaves out {lost}")
            if len(_shown) == MOST_KINDS:
                _shown.clear()
            _shown.add(kind)
        return render(list(messages), list(tools), **options)
    except Exception as error:  # jinja's own errors and whatever a template raises
        raise UserError(f"the chat template refuses these messages: {error}") from error


def _for_template(message: Message, text_arguments: bool) -> Message:
    """Returns a message with every name of its reasoning, and arguments as JSON text for templates that print them."""
    if text := message.get("reasoning_content"):
        message = message | dict.fromkeys(REASONING, text)
    if text_arguments and "tool_calls" in message:
        functions = [call["function"] for call in message["tool_calls"]]
        texts = [json.dumps(function["arguments"], ensure_ascii=False) for function in functions]
        functions = [each | {"arguments": text} for each, text in zip(functions, texts, strict=True)]
        calls = [call | {"function": each} for call, each in zip(message["tool_calls"], functions, strict=True)]
        message = message | {"tool_calls": calls}
    return message


@lru_cache(maxsize=16)
def _wants_text(tokenizer: Any, template: str) -> bool:
    """Returns whether a template joins arguments of calls to text, or prints them: a mapping would be Python's form."""
    call = {"id": "call00000", "type": "function", "function": {"name": "f", "arguments": {"a": {"quoted": "b"}}}}
    question: Message = {"role": "user", "content": "a"}
    result: Message = {"role": "tool", "content": "c", "tool_call_id": "call00000"}
    chat = [question, {"role": "assistant", "content": "", "tool_calls": [call]}, result]
    shown = []
    for text in (False, True):
        try:
            messages = [_for_template(message, text) for message in chat]
            shown.append(tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False))
        except Exception:  # the template refuses this form of arguments
            shown.append("")
    return bool(shown[1]) and (not shown[0] or "{'quoted'" in shown[0])


def _thought(messages: Sequence[Message]) -> bool:
    """Returns whether a chat ends with reasoning, which templates may leave out only of earlier turns."""
    return bool(messages and messages[-1].get("reasoning_content", "").strip())


def _kind(
    tokenizer: Any, messages: Sequence[Message], variables: Mapping[str, Any], tools: Sequence[Tool], thought: bool
) -> int:
    """Returns a key for whether a template shows a chat whole: the template, and the kinds of messages.

    To find out takes up to four renderings, which are slow for a long chat.
    """
    kinds = frozenset((m.get("role"), bool(m.get("content")), bool(m.get("tool_calls"))) for m in messages)
    return hash((str(tokenizer.chat_template), kinds, thought, bool(tools), repr(sorted(variables.items()))))


def _lost(render: Callable[..., str], messages: list[Message], tools: list[Tool], thought: bool) -> str | None:
    """Returns what a template does not show: one that was written without tools ignores them without an error."""
    called = any("tool_calls" in message or message["role"] == "tool" for message in messages)
    if not (tools or called or thought):
        return None
    whole = render(messages, tools)
    no_calls = [{k: v for k, v in message.items() if k != "tool_calls"} for message in messages]
    no_results = [message for message in messages if message["role"] != "tool"]
    without = {"tools": (messages, []), "tool calls": (no_calls, tools), "tool results": (no_results, tools)}
    if thought:
        no_thought = {key: value for key, value in messages[-1].items() if key != "reasoning_content"}
        without["reasoning"] = ([*messages[:-1], no_thought], tools)
    for part, (fewer, fewer_tools) in without.items():
        if (fewer, fewer_tools) == (messages, tools):
            continue
        try:
            if render(fewer, fewer_tools) == whole:
                return part
        except Exception:  # the template needs them: it knows them
            continue
    return None
