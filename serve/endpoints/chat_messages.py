"""Messages of a chat, in the forms that clients send and send back."""

from typing import Any, ClassVar, Literal, TypeAlias

from pydantic import Field, ValidationInfo, field_validator, model_validator

from dflash_toolkit.data.messages import call_arguments

from ..body import Strict
from ..protocol import List, clipped

MAX_MESSAGE_PARTS = 1024  # parts, or calls
PART_KEYS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal", "thinking": "thinking"}


class Part(Strict):
    """A part of a message's content. Its type decides which key has the text."""

    ignored: ClassVar[frozenset[str]] = frozenset({"annotations", "cache_control", "logprobs", "signature"})

    type: Literal["text", "input_text", "output_text", "refusal", "thinking"]
    text: str | None = None
    refusal: str | None = None
    thinking: str | None = None

    @field_validator("type", mode="before")
    @classmethod
    def _check_type(cls, kind: Any) -> Any:
        if kind not in list(PART_KEYS):  # a list, as the value may not be hashable
            raise ValueError(f"is {clipped(repr(kind), 100)}, but this server reads only text; send parts of type text")
        return kind

    @model_validator(mode="after")
    def _check_text(self) -> "Part":
        if getattr(self, key := PART_KEYS[self.type]) is None:
            raise ValueError(f"a part of type {self.type} needs `{key}`")
        return self

    @property
    def words(self) -> str:
        return str(getattr(self, PART_KEYS[self.type]))


ANY_CONTENT: TypeAlias = str | list[str | Part] | None


def as_parts(content: Any) -> Any:
    """Returns the parts of a content, which may be a string or null."""
    if content is None:
        return []
    if isinstance(content, str):
        content = [content]
    if not isinstance(content, list):
        raise ValueError("must be a string or a list of text parts")
    return [{"type": "text", "text": part} if isinstance(part, str) else part for part in content]


class CalledFunction(Strict):
    name: str
    arguments: Any = None  # JSON text or a value; the model may have written it incompletely

    def plain(self) -> dict[str, Any]:
        """Returns the call for chat templates, its arguments as a mapping."""
        return {"name": self.name, "arguments": call_arguments(self.arguments)}


class ToolCall(Strict):
    ignored: ClassVar[frozenset[str]] = frozenset({"index"})

    id: str | None = None
    type: Literal["function", ""] | None = "function"  # clients that join a stream may leave it empty
    function: CalledFunction

    def plain(self) -> dict[str, Any]:
        """Returns the call for chat templates."""
        return ({"id": self.id} if self.id else {}) | {"type": "function", "function": self.function.plain()}


class ChatMessage(Strict):
    """One turn. `developer` is OpenAI's newer name of `system`; chat templates know the older one."""

    ignored: ClassVar[frozenset[str]] = frozenset({"annotations", "audio", "cache_control"})

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: List[Part] = Field(default=[], max_length=MAX_MESSAGE_PARTS)
    refusal: str | None = None
    tool_calls: List[ToolCall] | None = Field(None, max_length=MAX_MESSAGE_PARTS)
    function_call: CalledFunction | None = None  # OpenAI's older name of a tool call
    tool_call_id: str | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # vLLM's name
    thinking: str | None = None  # Ollama's name

    _parts = field_validator("content", mode="before", json_schema_input_type=ANY_CONTENT)(as_parts)

    @field_validator("tool_calls", "function_call", "reasoning_content", "reasoning", "thinking", "refusal")
    @classmethod
    def _check_assistant(cls, value: Any, info: ValidationInfo) -> Any:
        if value and (role := info.data.get("role")) not in ("assistant", None):
            raise ValueError(f"is allowed only in a message with role assistant, not {role}")
        return value

    def plain(self) -> dict[str, Any]:
        """Returns the message for chat templates."""
        role = {"developer": "system", "function": "tool"}.get(self.role, self.role)
        content = "".join(part.words for part in self.content if part.type != "thinking")
        message: dict[str, Any] = {"role": role, "content": content or self.refusal or ""}
        calls = [call.plain() for call in self.tool_calls or ()]
        if self.function_call and not calls:
            calls = [{"type": "function", "function": self.function_call.plain()}]
        if calls:
            message["tool_calls"] = calls
        thoughts = "".join(part.words for part in self.content if part.type == "thinking")
        if reasoning := self.reasoning_content or self.reasoning or self.thinking or thoughts:
            message |= {"reasoning_content": reasoning, "reasoning": reasoning}  # templates know one name or the other
        if role == "tool":
            message |= {key: value for key in ("tool_call_id", "name") if (value := getattr(self, key))}
        return message
