"""The parts of an answer in their order: text, reasoning, tool calls."""

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ToolDelta:
    """A part of one tool call: the first has the id and the name, the others more of the arguments."""

    index: int  # among the calls of the answer, from 0
    id: str | None = None
    name: str | None = None
    arguments: str = ""  # a piece of the JSON text


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of content, of reasoning or of a tool call; the other two are empty."""

    content: str = ""
    reasoning: str = ""
    tool: ToolDelta | None = None


@dataclass(slots=True)
class Call:
    """A whole tool call."""

    id: str
    name: str
    arguments: str  # JSON text, incomplete if the answer was cut


@dataclass(slots=True)
class Message:
    """The joined deltas of an answer."""

    content: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)


def joined(deltas: Iterable[Delta]) -> Message:
    """Joins the deltas of a message."""
    content, reasoning, arguments = [], [], []
    calls: list[Call] = []
    for delta in deltas:
        content.append(delta.content)
        reasoning.append(delta.reasoning)
        if (tool := delta.tool) is not None:
            if tool.id is not None and tool.name is not None:
                calls.append(Call(tool.id, tool.name, ""))
                arguments.append([tool.arguments])
            else:
                arguments[tool.index].append(tool.arguments)
    for call, pieces in zip(calls, arguments, strict=True):
        call.arguments = "".join(pieces)
    return Message("".join(content), "".join(reasoning), calls)


def merged(deltas: Iterable[Delta]) -> list[Delta]:
    """Merges adjacent deltas of one kind, so that they are sent together."""
    result: list[Delta] = []
    for delta in deltas:
        last = result[-1] if result else None
        if last is None or (last.tool is None) != (delta.tool is None):
            result.append(delta)
        elif last.tool is not None and delta.tool is not None:
            if delta.tool.id is None and delta.tool.index == last.tool.index:
                arguments = last.tool.arguments + delta.tool.arguments
                result[-1] = Delta(tool=ToolDelta(last.tool.index, last.tool.id, last.tool.name, arguments))
            else:
                result.append(delta)
        elif bool(last.content) == bool(delta.content):
            result[-1] = Delta(last.content + delta.content, last.reasoning + delta.reasoning)
        else:
            result.append(delta)
    return result
