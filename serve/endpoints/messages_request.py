"""The bodies of POST /v1/messages and /v1/messages/count_tokens, and their translation to the body of a chat."""

import json
import re
from collections.abc import Collection, Iterable
from typing import Annotated, Any, ClassVar, Literal, Self, TypeAlias

from pydantic import Field, ValidationInfo, field_validator, model_validator

from ..body import Strict
from ..protocol import ApiError, Int64, List, validate
from .chat import MAX_MESSAGES, MAX_TOOLS, ChatRequest
from .chat_messages import MAX_MESSAGE_PARTS

# role of a message -> types of its content blocks
BLOCKS = {
    "system": ("text",),
    "user": ("text", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
}
CHOICES = {"any": "required"}  # Anthropic's tool_choice -> the chat route's, where they differ
BILLING = "x-anthropic-billing-header"  # a text of Claude Code with a number that changes
# text in errors of the chat route -> text of this route
RENAMED = {
    r"^stop\b|`stop`": "stop_sequences",
    r"\bresponse_format\b": "output_config.format",
    r"\breasoning_effort\b": "output_config.effort",
    r"\b(tools\[\d+\])\.function\b": r"\1",
    r"'required'": "'any'",
}


def _checked(content: Any, known: Collection[str]) -> Any:
    """Returns the blocks of a content, which may be a string."""
    if content is None or isinstance(content, str):
        return [{"type": "text", "text": content}] if content else []
    if not isinstance(content, list):
        raise ValueError("must be a string or a list of content blocks")
    for number, block in enumerate(content):
        kind = block.get("type") if isinstance(block, dict) else None
        if kind not in known:
            reason = "the model reads only text" if kind in ("image", "document") else f"use {', '.join(known)}"
            raise ValueError(f"block {number} has type {str(kind)[:100]!r}, which is not supported here; {reason}")
    return content


class TextBlock(Strict):
    ignored: ClassVar[frozenset[str]] = frozenset({"cache_control", "citations"})

    type: Literal["text"]
    text: str


class ThinkingBlock(Strict):
    type: Literal["thinking"]
    thinking: str
    signature: str | None = None  # has no effect


class RedactedThinkingBlock(Strict):
    """Reasoning that only Anthropic can decrypt; it is left out."""

    type: Literal["redacted_thinking"]
    data: str | None = None


class ToolUseBlock(Strict):
    ignored: ClassVar[frozenset[str]] = frozenset({"cache_control", "caller"})

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]

    def plain(self) -> dict[str, Any]:
        """Returns the tool call of the chat route."""
        function = {"name": self.name, "arguments": json.dumps(self.input, ensure_ascii=False)}
        return {"id": self.id, "type": "function", "function": function}


class ToolResultBlock(Strict):
    ignored: ClassVar[frozenset[str]] = frozenset({"cache_control"})

    type: Literal["tool_result"]
    tool_use_id: str
    content: List[TextBlock] = Field([], max_length=MAX_MESSAGE_PARTS)
    is_error: bool | None = None

    @field_validator("content", mode="before", json_schema_input_type=str | list[TextBlock] | None)
    @classmethod
    def _blocks(cls, content: Any) -> Any:
        return _checked(content, ("text",))

    def plain(self) -> dict[str, Any]:
        """Returns the message of the chat route."""
        text = ("Error: " if self.is_error else "") + _text_of(self.content)
        return {"role": "tool", "tool_call_id": self.tool_use_id, "content": text}


Block: TypeAlias = Annotated[
    TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock, Field(discriminator="type")
]


class Message(Strict):
    role: Literal["user", "assistant", "system"]
    content: List[Block] = Field(max_length=MAX_MESSAGE_PARTS)

    @field_validator("content", mode="before", json_schema_input_type=str | list[Block] | None)
    @classmethod
    def _blocks(cls, content: Any, info: ValidationInfo) -> Any:
        return _checked(content, BLOCKS[info.data.get("role", "assistant")])


class MessageTool(Strict):
    """A tool that the client runs."""

    ignored: ClassVar[frozenset[str]] = frozenset(
        {"allowed_callers", "cache_control", "defer_loading", "eager_input_streaming", "input_examples"}
    )

    type: Literal["custom"] | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None

    @field_validator("type", mode="before")
    @classmethod
    def _no_server_tool(cls, kind: Any) -> Any:
        if kind not in (None, "custom"):
            raise ValueError(f"is {str(kind)[:100]!r}; this server runs no tools; describe yours with type 'custom'")
        return kind

    def plain(self) -> dict[str, Any]:
        """Returns the tool of the chat route."""
        fields = {"name": self.name, "description": self.description, "parameters": self.input_schema}
        function = {name: value for name, value in fields.items() if value is not None}
        return {"type": "function", "function": function | ({"strict": True} if self.strict else {})}


class ToolChoice(Strict):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _named(self) -> "ToolChoice":
        if (self.name is None) == (self.type == "tool"):
            raise ValueError(f"type {self.type!r} {'needs' if self.type == 'tool' else 'cannot have'} `name`")
        return self

    def plain(self) -> str | dict[str, Any]:
        """Returns the `tool_choice` of the chat route."""
        if self.name is not None:
            return {"type": "function", "function": {"name": self.name}}
        return CHOICES.get(self.type, self.type)


class Thinking(Strict):
    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: int | None = None  # has no effect
    display: str | None = None  # has no effect


class OutputFormat(Strict):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Strict):
    effort: str | None = None
    format: OutputFormat | None = None


class AgentChat(ChatRequest):
    """A chat by Anthropic's rules: the context may end the answer before `max_tokens`."""

    @property
    def requested_tokens(self) -> int | None:
        return None

    def length(self, most: int) -> int:
        return min(self.max_tokens or most, most)


class CountTokensRequest(Strict):
    """The body of POST /v1/messages/count_tokens: a conversation."""

    ignored: ClassVar[frozenset[str]] = frozenset(
        {"cache_control", "context_management", "inference_geo", "metadata", "service_tier", "speed"}
    )
    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = {"container": (), "mcp_servers": ([],)}

    model: str
    messages: List[Message] = Field(min_length=1, max_length=MAX_MESSAGES)
    system: List[TextBlock] | None = Field(None, max_length=MAX_MESSAGE_PARTS)
    tools: List[MessageTool] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: dict[str, Any] | None = None  # as in vLLM

    @field_validator("system", mode="before", json_schema_input_type=str | list[TextBlock] | None)
    @classmethod
    def _blocks(cls, content: Any) -> Any:
        return _checked(content, ("text",))

    @classmethod
    def parse(cls, body: bytes) -> Self:
        """Parses a body. Raises ApiError (400) that names the wrong parameter."""
        return validate(cls, body)

    def chat(self) -> AgentChat:
        """Returns the request for the chat route. Raises ApiError (400) that names the wrong parameter."""
        output, choice = self.output_config or OutputConfig(), self.tool_choice or ToolChoice(type="auto")
        schema = output.format and {"type": "json_schema", "json_schema": {"schema": output.format.schema_}}
        chat = {
            "model": self.model,
            "messages": self._messages(),
            "tools": [tool.plain() for tool in self.tools or ()],
            "tool_choice": choice.plain(),
            "parallel_tool_calls": not choice.disable_parallel_tool_use,
            "response_format": schema,
            "reasoning_effort": output.effort,
            "thinking": self.thinking and self.thinking.type != "disabled",
            "chat_template_kwargs": self.chat_template_kwargs,
        }
        try:
            return AgentChat.parse(json.dumps(chat | self._sampling()).encode())
        except ApiError as error:
            raise _renamed(error) from error

    def _sampling(self) -> dict[str, Any]:
        return {}

    def _messages(self) -> list[dict[str, Any]]:
        """Returns the messages of the chat.

        A system message after the first turn becomes text of the user's turn or of the last tool result before it: many
        templates accept only one at the start, and a prompt must be the beginning of the next one for the prefix cache.
        """
        system = [block for block in self.system or () if not block.text.startswith(BILLING)]
        found: list[dict[str, Any]] = []
        notes: list[str] = []  # system messages for the next turn of the user

        def add(text: str) -> None:
            """Adds a text to the turn of the user."""
            if found and found[-1]["role"] == "user":
                text = f"{found.pop()['content']}\n\n{text}"
            found.append({"role": "user", "content": text})

        def flush() -> None:
            if notes and found and found[-1]["role"] == "tool":
                found[-1]["content"] += "".join(f"\n\n{note}" for note in notes)
            elif notes:
                add("\n\n".join(notes))
            notes.clear()

        for message in self.messages:
            texts = [block for block in message.content if isinstance(block, TextBlock)]
            text = ("" if message.role == "assistant" else "\n").join(block.text for block in texts)
            if message.role == "system":
                if not found:
                    system += texts
                    continue
                notes.append(text)
                if found[-1]["role"] != "assistant":
                    flush()
            elif message.role == "user":
                found += [block.plain() for block in message.content if isinstance(block, ToolResultBlock)]
                flush()
                if text or not message.content:
                    add(text)
            else:
                flush()
                found.append(_assistant(message, text))
        flush()
        if system:
            found.insert(0, {"role": "system", "content": _text_of(system)})
        return found


class MessagesRequest(CountTokensRequest):
    """The body of POST /v1/messages, Anthropic's API."""

    max_tokens: int = Field(ge=1, lt=2**63)
    stream: bool | None = False
    stop_sequences: List[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int64 | None = None
    cache_salt: str | None = None  # as on the other routes

    @field_validator("messages")
    @classmethod
    def _new_turn(cls, messages: list[Message]) -> list[Message]:
        if messages[-1].role == "assistant":
            raise ValueError("end with an assistant's message, which this server cannot continue; end with a user's")
        return messages

    def _sampling(self) -> dict[str, Any]:
        names = ("max_tokens", "stream", "temperature", "top_p", "top_k", "cache_salt")
        return {name: getattr(self, name) for name in names} | {"stop": self.stop_sequences}


def _text_of(blocks: Iterable[TextBlock]) -> str:
    return "\n".join(block.text for block in blocks)


def _assistant(message: Message, text: str) -> dict[str, Any]:
    thoughts = "\n".join(block.thinking for block in message.content if isinstance(block, ThinkingBlock))
    calls = [block.plain() for block in message.content if isinstance(block, ToolUseBlock)]
    return {"role": "assistant", "content": text, "reasoning_content": thoughts or None, "tool_calls": calls or None}


def _renamed(error: ApiError) -> ApiError:
    """Replaces the chat route's parameter names in an error by those of this route."""
    message = error.message
    for theirs, own in RENAMED.items():
        message = re.sub(theirs, own, message)
    return ApiError(error.status, message, param=error.param, code=error.code)
