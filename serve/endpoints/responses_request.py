"""The body of POST /v1/responses, and its translation to the body of a chat."""

import json
import re
from collections.abc import Iterable
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag, ValidationInfo, WithJsonSchema, field_validator, model_validator

from dflash_toolkit.sampling import MAX_LOGPROBS

from ..body import Strict
from ..protocol import ApiError, GenerationRequest, Int64, List
from .chat import MAX_MESSAGES, MAX_TOOLS, ChatRequest, Function
from .chat_messages import ANY_CONTENT, MAX_MESSAGE_PARTS, Part, as_parts

LOGPROBS = "message.output_text.logprobs"
NAMED = {
    "type": "object",
    "properties": {"type": {"const": "function"}, "name": {"type": "string"}},
    "required": ["type", "name"],
}
ALLOWED = {
    "type": "object",
    "properties": {
        "type": {"const": "allowed_tools"},
        "mode": {"enum": ["auto", "required"]},
        "tools": {"type": "array", "items": NAMED, "minItems": 1},
    },
    "required": ["type", "mode", "tools"],
}
CHOICE = {"anyOf": [{"enum": ["none", "auto", "required", None]}, NAMED, ALLOWED]}
MAX_INCLUDED = 64
KINDS = ("message", "function_call", "function_call_output", "reasoning")

# parameter of the chat route -> its name here
RENAMED = {
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "logprobs": "include",
}


class _Item(Strict):
    ignored: ClassVar[frozenset[str]] = frozenset({"id", "status"})  # fields of items from earlier responses


class InputMessage(_Item):
    """A turn of the conversation; also accepts messages from earlier responses."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: List[Part] = Field(max_length=MAX_MESSAGE_PARTS)

    _parts = field_validator("content", mode="before", json_schema_input_type=ANY_CONTENT)(as_parts)


class FunctionCall(_Item):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: Any = None  # JSON text or a value


class FunctionCallOutput(_Item):
    type: Literal["function_call_output"]
    call_id: str
    output: List[Part] = Field(max_length=MAX_MESSAGE_PARTS)

    _parts = field_validator("output", mode="before", json_schema_input_type=ANY_CONTENT)(as_parts)


class ReasoningText(Strict):
    type: Literal["reasoning_text", "summary_text"]
    text: str


class ReasoningItem(_Item):
    """Reasoning of an earlier answer, for the chat template."""

    type: Literal["reasoning"]
    content: List[ReasoningText] | None = Field(None, max_length=MAX_MESSAGE_PARTS)
    summary: List[ReasoningText] | None = Field(None, max_length=MAX_MESSAGE_PARTS)  # used if there is no content
    encrypted_content: str | None = None  # ignored: only OpenAI can decrypt it

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.content or self.summary or ())


def _kind(item: Any) -> str:
    kind = item.get("type", "message") if isinstance(item, dict) else item.type
    return str(kind)


Item = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[FunctionCall, Tag("function_call")]
    | Annotated[FunctionCallOutput, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(_kind),
]


class FunctionTool(Function):
    """A tool; unlike in the chat route, its fields are not in a `function` object."""

    type: Literal["function"]

    @model_validator(mode="before")
    @classmethod
    def _check_type(cls, tool: Any) -> Any:
        if isinstance(tool, dict) and tool.get("type", "function") != "function":
            raise ValueError(f"has type {tool['type']!r}, which is not supported; use type 'function'")
        return tool


class TextFormat(Strict):
    """Constrains the text; unlike in the chat route, a schema's fields are not in a `json_schema` object."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None  # has no effect: every schema is enforced

    @model_validator(mode="after")
    def _whole(self) -> "TextFormat":
        if (self.schema_ is not None) != (self.type == "json_schema"):
            raise ValueError(f"type {self.type!r} {'cannot have' if self.schema_ else 'needs'} `schema`")
        return self

    def plain(self) -> dict[str, Any]:
        """Returns the `response_format` of the chat route."""
        fields = self.model_dump(by_alias=True, exclude_none=True)
        kind = fields.pop("type")
        return {"type": kind, "json_schema": fields} if kind == "json_schema" else {"type": kind}


class TextOptions(Strict):
    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None  # has no effect


class ReasoningOptions(Strict):
    effort: str | None = None
    summary: str | None = None  # has no effect: reasoning is returned unabridged
    generate_summary: str | None = None  # OpenAI's older name of `summary`


class EventOptions(Strict):
    include_obfuscation: bool | None = None  # has no effect: events are not padded


class ResponsesRequest(GenerationRequest):
    """The body of POST /v1/responses, with the sampling parameters of the chat route."""

    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = GenerationRequest.unsupported | {
        "previous_response_id": (),
        "conversation": (),
        "background": (False,),
        "prompt": (),
        "context_management": (),
    }

    elsewhere: ClassVar[tuple[str, ...]] = ("max_tokens", "response_format", "n", "return_token_ids", "prompt_logprobs")

    input: List[Item] = Field(max_length=MAX_MESSAGES)
    instructions: str | None = None
    stream_options: EventOptions | None = None  # type: ignore[assignment]
    max_output_tokens: Int64 | None = Field(None, ge=1)
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    tools: List[FunctionTool] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: Annotated[Any, WithJsonSchema(CHOICE)] = None  # the chat route checks it
    parallel_tool_calls: bool | None = True
    include: List[str] | None = Field(None, max_length=MAX_INCLUDED)  # only log-probabilities have an effect
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    chat_template_kwargs: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None  # returned with the answer
    truncation: Literal["auto", "disabled"] | None = None  # auto: keeps the last tokens of a long prompt, as in vLLM
    max_tool_calls: int | None = None  # has no effect: it limits only calls of OpenAI's own tools

    @field_validator("input", mode="before", json_schema_input_type=str | list[Item])
    @classmethod
    def _as_items(cls, given: Any) -> Any:
        if isinstance(given, str):
            return [{"type": "message", "role": "user", "content": given}]
        if not isinstance(given, list) or not all(isinstance(item, dict) for item in given):
            raise ValueError("must be a string or a list of items")
        for number, item in enumerate(given):
            if (kind := item.get("type", "message")) not in KINDS:
                raise ValueError(f"item {number} has type {kind!r}; use one of {', '.join(KINDS)}")
        return given

    @field_validator("top_logprobs")
    @classmethod
    def _with_include(cls, best: int | None, info: ValidationInfo) -> int | None:
        if best and LOGPROBS not in (info.data.get("include") or ()):
            raise ValueError(f"is {best}, but `include` does not have {LOGPROBS!r}; add it")
        return best

    @classmethod
    def parse(cls, body: bytes) -> "ResponsesRequest":
        """Parses a request body. Raises ApiError (400) that names the first wrong parameter."""
        try:
            request = super().parse(body)
        except ApiError as error:
            raise rename_parameters(error) from error
        for name in cls.elsewhere:
            if (value := getattr(request, name)) is not None and value is not False:
                hint = f"use `{RENAMED[name]}`" if name in RENAMED else "omit it"
                message = f"`{name}` is not a parameter of /v1/responses; {hint}"
                raise ApiError(400, message, param=name, code="unknown_parameter")
        if request.logprobs and request.tools:  # with calls within the text, tokens cannot be assigned to it
            message = f"`include`: {LOGPROBS!r} cannot be combined with tools; omit one of them"
            raise ApiError(400, message, param="include")
        return request

    @property
    def logprobs(self) -> bool:
        return LOGPROBS in (self.include or ())

    def chat(self) -> ChatRequest:
        """Returns the request for the chat route. Raises ApiError (400) that names the wrong parameter."""
        shared = {*GenerationRequest.model_fields, "chat_template_kwargs"} - {*self.elsewhere, "stream_options"}
        chat = self.model_dump(by_alias=True, exclude_none=True, include=shared)
        tools = [tool.model_dump(exclude_none=True) for tool in self.tools or ()]
        choice = self.tool_choice
        if isinstance(choice, dict):
            choice = _chat_choice(choice)
        chat |= {
            "messages": self._messages(),
            "max_completion_tokens": self.max_output_tokens,
            "response_format": self.text.format.plain() if self.text and self.text.format else None,
            "tools": [{"type": tool.pop("type"), "function": tool} for tool in tools] or None,
            "tool_choice": choice,
            "parallel_tool_calls": self.parallel_tool_calls,
            "logprobs": self.logprobs,
            "top_logprobs": self.top_logprobs,
        }
        if self.truncation == "auto":
            chat.setdefault("truncate_prompt_tokens", -1)
        if self.reasoning and self.reasoning.effort is not None:
            chat["reasoning_effort"] = self.reasoning.effort
        try:
            return ChatRequest.parse(json.dumps(chat).encode())
        except ApiError as error:
            raise rename_parameters(error) from error

    def _messages(self) -> list[dict[str, Any]]:
        """Returns the items as messages; consecutive reasoning, text and calls of the assistant become one message."""
        found: list[dict[str, Any]] = []
        if self.instructions is not None:
            found.append({"role": "system", "content": self.instructions})
        called = set[str]()
        turn: dict[str, Any] | None = None

        def own(*later: str) -> dict[str, Any]:
            """Returns the assistant's current turn, or a new one if it already has one of the keys."""
            nonlocal turn
            if turn is None or any(turn.get(name) for name in later):
                turn = {"role": "assistant", "content": None}
                found.append(turn)
            return turn

        for number, item in enumerate(self.input):
            match item:
                case ReasoningItem():
                    own("reasoning_content", "content", "tool_calls")["reasoning_content"] = item.text
                case InputMessage(role="assistant"):
                    own("content", "tool_calls")["content"] = _text_of(item.content)
                case FunctionCall():
                    called.add(item.call_id)
                    function = {"name": item.name, "arguments": item.arguments}
                    own().setdefault("tool_calls", []).append(
                        {"id": item.call_id, "type": "function", "function": function}
                    )
                case InputMessage():
                    turn = None
                    found.append({"role": item.role, "content": _text_of(item.content)})
                case FunctionCallOutput():
                    turn = None
                    if item.call_id not in called:
                        message = f"no earlier function_call has the call_id {item.call_id[:100]!r}; add the call"
                        raise ApiError(400, message, param=f"input[{number}].call_id")
                    found.append({"role": "tool", "tool_call_id": item.call_id, "content": _text_of(item.output)})
        return found


def _chat_choice(choice: dict[str, Any]) -> dict[str, Any]:
    """Returns a `tool_choice` in the form of the chat route, which also checks it."""
    match choice:
        case {"type": "function", **fields}:
            return {"type": "function", "function": fields}
        case {"type": "allowed_tools", "tools": [*tools], **fields}:
            named = [_chat_choice(tool) if isinstance(tool, dict) else tool for tool in tools]
            return {"type": "allowed_tools", "allowed_tools": fields | {"tools": named}}
    return choice


def _text_of(parts: Iterable[Part]) -> str:
    return "".join(part.words for part in parts)


def rename_parameters(error: ApiError) -> ApiError:
    """Replaces the chat route's parameter names in an error by those of this route."""
    kinds = re.compile(rf"(input\[\d+\])\.(?:{'|'.join(KINDS)})\b")

    def renamed(text: str) -> str:
        text = re.sub(r"\b(tools\[\d+\])\.function\b", r"\1", kinds.sub(r"\1", text))
        for theirs, own in RENAMED.items():
            text = text.replace(f"`{theirs}`", f"`{own}`") if " " in text else own if text == theirs else text
        return text

    param = error.param and renamed(error.param)
    message = renamed(error.message)
    if error.param and message.startswith(f"{error.param}: "):
        message = f"{param}: {message.removeprefix(f'{error.param}: ')}"
    return ApiError(error.status, message, param=param, code=error.code)
