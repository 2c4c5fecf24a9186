"""`/v1/responses`: the part of OpenAI's Responses API that keeps no state between requests.

Translates a request for the chat route, which answers it, and the answer to a response object.
"""

import json
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import Discriminator, Field, Tag, ValidationInfo, WithJsonSchema, field_validator, model_validator

from dflash_toolkit.runtime.client import PreparedRequest
from dflash_toolkit.sampling import MAX_LOGPROBS

from .answer import Piece
from .logprobs import AnswerToken, TokenStrings, chat_logprobs
from .parsing import Delta
from .protocol import (
    MAX_MESSAGE_PARTS,
    MAX_MESSAGES,
    MAX_TOOLS,
    ApiError,
    ChatRequest,
    Function,
    GenerationRequest,
    List,
    _Strict,
)
from .replies import ReplyForm
from .thread_pools import ThreadPools

LOGPROBS = "message.output_text.logprobs"
CHOICE = {
    "anyOf": [
        {"enum": ["none", "auto", "required", None]},
        {
            "type": "object",
            "properties": {"type": {"const": "function"}, "name": {"type": "string"}},
            "required": ["type", "name"],
        },
    ]
}
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
# inherited parameters of the other routes
ELSEWHERE = ("max_tokens", "response_format", "n", "return_token_ids", "prompt_logprobs")


class InputText(_Strict):
    type: Literal["input_text", "output_text"]
    text: str


def _as_parts(content: Any) -> Any:
    return [{"type": "input_text", "text": content}] if isinstance(content, str) else content


class InputMessage(_Strict):
    """A turn of the conversation; also accepts messages from earlier responses."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: List[InputText] = Field(max_length=MAX_MESSAGE_PARTS)

    _parts = field_validator("content", mode="before", json_schema_input_type=str | list[InputText])(_as_parts)


class FunctionCall(_Strict):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str  # JSON


class FunctionCallOutput(_Strict):
    type: Literal["function_call_output"]
    call_id: str
    output: List[InputText] = Field(max_length=MAX_MESSAGE_PARTS)

    _parts = field_validator("output", mode="before", json_schema_input_type=str | list[InputText])(_as_parts)


class ReasoningText(_Strict):
    type: Literal["reasoning_text", "summary_text"]
    text: str


class ReasoningItem(_Strict):
    """Reasoning of an earlier answer, for the chat template."""

    type: Literal["reasoning"]
    content: List[ReasoningText] | None = Field(None, max_length=MAX_MESSAGE_PARTS)
    summary: List[ReasoningText] | None = Field(None, max_length=MAX_MESSAGE_PARTS)  # used if there is no content
    encrypted_content: None = None  # only OpenAI can decrypt it

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


class TextFormat(_Strict):
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


class TextOptions(_Strict):
    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None  # has no effect


class ReasoningOptions(_Strict):
    effort: str | None = None
    summary: None = None  # reasoning is returned unabridged
    generate_summary: None = None


class EventOptions(_Strict):
    include_obfuscation: bool | None = None

    @field_validator("include_obfuscation", mode="before", json_schema_input_type=Literal[False] | None)
    @classmethod
    def _plain(cls, wanted: Any) -> Any:
        if wanted is True:
            raise ValueError("is true, which is not supported; omit it")
        return wanted


class ResponsesRequest(GenerationRequest):
    """The body of POST /v1/responses, with the sampling parameters of the chat route."""

    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = GenerationRequest.unsupported | {
        "previous_response_id": (),
        "conversation": (),
        "background": (False,),
        "store": (False,),
        "prompt": (),
        "max_tool_calls": (),
        "truncation": ("disabled",),
        "context_management": (),
        "moderation": (),
        "prompt_cache_options": (),
    }

    input: List[Item] = Field(max_length=MAX_MESSAGES)
    instructions: str | None = None
    stream_options: EventOptions | None = None  # type: ignore[assignment]
    max_output_tokens: int | None = Field(None, ge=1)
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    tools: List[FunctionTool] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: Annotated[Any, WithJsonSchema(CHOICE)] = None  # the chat route checks it
    parallel_tool_calls: bool | None = True
    include: List[Literal["message.output_text.logprobs"]] | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    chat_template_kwargs: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None  # returned with the answer

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
        if best and not info.data.get("include"):
            raise ValueError(f"is {best}, but `include` does not have {LOGPROBS!r}; add it")
        return best

    @classmethod
    def parse(cls, body: bytes) -> "ResponsesRequest":
        """Parses a request body. Raises ApiError (400) that names the first wrong parameter."""
        try:
            request = super().parse(body)
        except ApiError as error:
            raise rename_parameters(error) from error
        for name in ELSEWHERE:
            if (value := getattr(request, name)) is not None and value is not False:
                hint = f"use `{RENAMED[name]}`" if name in RENAMED else "omit it"
                message = f"`{name}` is not a parameter of /v1/responses; {hint}"
                raise ApiError(400, message, param=name, code="unknown_parameter")
        if request.include and request.tools:  # with calls within the text, tokens cannot be assigned to it
            message = f"`include`: {LOGPROBS!r} cannot be combined with tools; omit one of them"
            raise ApiError(400, message, param="include")
        return request

    def chat(self) -> ChatRequest:
        """Returns the request for the chat route. Raises ApiError (400) that names the wrong parameter."""
        shared = {*GenerationRequest.model_fields, "chat_template_kwargs"} - {*ELSEWHERE, "stream_options"}
        chat = self.model_dump(by_alias=True, exclude_none=True, include=shared)
        tools = [tool.model_dump(exclude_none=True) for tool in self.tools or ()]
        choice = self.tool_choice
        if isinstance(choice, dict) and choice.get("type") == "function":
            choice = {"type": "function", "function": {"name": choice.get("name")}}
        chat |= {
            "messages": self._messages(),
            "max_completion_tokens": self.max_output_tokens,
            "response_format": self.text.format.plain() if self.text and self.text.format else None,
            "tools": [{"type": tool.pop("type"), "function": tool} for tool in tools] or None,
            "tool_choice": choice,
            "parallel_tool_calls": self.parallel_tool_calls,
            "logprobs": bool(self.include),
            "top_logprobs": self.top_logprobs,
        }
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


def _text_of(parts: Iterable[InputText]) -> str:
    return "".join(part.text for part in parts)


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


class ResponseReply:
    """Builds a response object, or the events that describe its progress.

    The same methods build both: the object is the final state of the events.
    """

    kind: Literal["chat", "text"] = "chat"
    answers_per_prompt = 1
    end = b""

    def __init__(self, request: ResponsesRequest, prepared: PreparedRequest, strings: TokenStrings | None) -> None:
        self.strings = strings
        self._request, self._params = request, prepared.params
        self._id, self._created = f"resp_{secrets.token_hex(16)}", int(time.time())
        self._events = 0
        self._items: list[dict[str, Any]] = []
        self._open = ""  # type of the last item, until it is complete
        self._texts: list[str] = []  # texts of the open item
        self._raw = self._content = 0  # characters of the model's text, and of the message in it
        self._tokens: list[AnswerToken] = []  # tokens whose text may belong to the message
        self._logprobs: list[dict[str, Any]] = []  # log-probabilities of the open message
        self._status, self._incomplete = "in_progress", False

    def event(self, chunk: dict[str, Any]) -> bytes:
        return b"event: " + chunk["type"].encode() + b"\ndata: " + msgspec.json.encode(chunk) + b"\n\n"

    def whole(self, answers: Sequence[tuple[Piece, str | None]], usage: dict[str, Any]) -> dict[str, Any]:
        ((piece, reason),) = answers
        self.piece(0, piece)
        self.ended(0, reason)
        return self._response(usage)

    def opening(self, answers: int) -> list[dict[str, Any]]:
        return [self._event(name, response=self._response()) for name in ("response.created", "response.in_progress")]

    def piece(self, index: int, piece: Piece) -> list[dict[str, Any]]:
        deltas = piece.deltas if piece.deltas is not None else (Delta(piece.text),)
        self._raw += len(piece.text)
        self._content += sum(len(delta.content) for delta in deltas)
        self._tokens += piece.tokens
        events = []
        for delta in deltas:
            if delta.tool is not None:
                if delta.tool.id is not None:
                    events += self._begin("function_call", call_id=delta.tool.id, name=delta.tool.name)
                events += self._more("response.function_call_arguments.delta", delta.tool.arguments)
            elif delta.reasoning:
                events += self._begin("reasoning") if self._open != "reasoning" else []
                events += self._more("response.reasoning_text.delta", delta.reasoning, content_index=0)
            elif delta.content:
                events += self._begin("message") if self._open != "message" else []
                logprobs = self._logprobs_now()
                self._logprobs += logprobs
                events += self._more("response.output_text.delta", delta.content, content_index=0, logprobs=logprobs)
        return events

    def ended(self, index: int, finish_reason: str | None) -> list[dict[str, Any]]:
        self._incomplete = finish_reason == "length"
        events = self._begin("message") if not self._items else []  # an empty answer is an empty message
        if self._open == "message":
            self._logprobs += self._logprobs_now()
        events += self._close()
        self._status = "incomplete" if self._incomplete else "completed"
        return events

    def closing(self, usage: dict[str, Any]) -> list[dict[str, Any]]:
        return [self._event(f"response.{self._status}", response=self._response(usage))]

    def failed(self, error: ApiError) -> list[dict[str, Any]]:
        self._status = "failed"
        failure = {"code": "server_error", "message": error.message}
        return [self._event("response.failed", response=self._response() | {"error": failure})]

    def _logprobs_now(self) -> list[dict[str, Any]]:
        """Returns those of the waiting tokens that belong to the message, the end of the model's text."""
        if self.strings is None:
            return []
        tokens = [token for token in self._tokens if token.start >= self._raw - self._content]
        self._tokens.clear()
        found: list[dict[str, Any]] = chat_logprobs(self.strings, tokens)["content"]
        for entry in found:
            for each in (entry, *entry["top_logprobs"]):
                each["bytes"] = each["bytes"] or []
        return found

    def _event(self, name: str, /, **fields: Any) -> dict[str, Any]:
        self._events += 1
        return {"type": name, "sequence_number": self._events - 1, **fields}

    def _place(self) -> dict[str, Any]:
        """Returns the fields that locate the open item."""
        return {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}

    def _begin(self, kind: str, **fields: Any) -> list[dict[str, Any]]:
        events = self._close()
        unique = secrets.token_hex(16)
        self._open, self._texts = kind, []
        match kind:
            case "message":
                item = {"id": f"msg_{unique}", "type": kind, "role": "assistant", "content": []}
                part: dict[str, Any] | None = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            case "reasoning":
                item = {"id": f"rs_{unique}", "type": kind, "summary": [], "content": []}
                part = {"type": "reasoning_text", "text": ""}
            case _:
                item, part = {"id": f"fc_{unique}", "type": kind, **fields, "arguments": ""}, None
        self._items.append(item | {"status": "in_progress"})
        added = {"output_index": len(self._items) - 1, "item": dict(self._items[-1])}
        events.append(self._event("response.output_item.added", **added))
        if part is not None:
            events.append(self._event("response.content_part.added", **self._place(), content_index=0, part=part))
        return events

    def _more(self, name: str, text: str, **fields: Any) -> list[dict[str, Any]]:
        if not text:
            return []
        self._texts.append(text)
        return [self._event(name, **self._place(), delta=text, **fields)]

    def _close(self) -> list[dict[str, Any]]:
        """Completes the open item, and returns its last events."""
        kind, self._open = self._open, ""
        if not kind:
            return []
        item, text, place = self._items[-1], "".join(self._texts), self._place()
        part: dict[str, Any] | None = None
        if kind == "message":
            logprobs, self._logprobs = self._logprobs, []
            part = {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
            done = self._event("response.output_text.done", **place, content_index=0, text=text, logprobs=logprobs)
        elif kind == "reasoning":
            part = {"type": "reasoning_text", "text": text}
            done = self._event("response.reasoning_text.done", **place, content_index=0, text=text)
        else:
            item["arguments"] = text
            done = self._event("response.function_call_arguments.done", **place, name=item["name"], arguments=text)
        events = [done]
        if part is not None:
            item["content"] = [part]
            events.append(self._event("response.content_part.done", **place, content_index=0, part=part))
        item["status"] = "incomplete" if self._incomplete else "completed"
        events.append(self._event("response.output_item.done", output_index=place["output_index"], item=item))
        return events

    def _response(self, usage: dict[str, Any] | None = None) -> dict[str, Any]:
        request, text = self._request, self._request.text or TextOptions()
        reasoning = request.reasoning or ReasoningOptions()
        tools = [tool.model_dump(exclude_unset=True) for tool in request.tools or ()]
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": self._status,
            "background": False,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if self._status == "incomplete" else None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "metadata": request.metadata or {},
            "model": request.model,
            "output": list(self._items),
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": reasoning.effort, "summary": None},
            "store": False,
            "temperature": self._params.temperature,
            "text": {"format": text.format.model_dump(by_alias=True, exclude_none=True) if text.format else PLAIN},
            "tool_choice": request.tool_choice or "auto",
            "tools": [{"parameters": None, "strict": False} | tool for tool in tools],
            "top_logprobs": request.top_logprobs or 0,
            "top_p": self._params.top_p,
            "truncation": "disabled",
            "usage": usage and _usage(usage),
        }


PLAIN = {"type": "text"}


def _usage(usage: dict[str, Any]) -> dict[str, Any]:
    """Returns the chat route's usage with this route's names."""
    renamed = {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": usage["prompt_tokens_details"] | {"cache_write_tokens": 0},  # OpenAI's, always 0
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": usage["completion_tokens_details"],
    }
    return renamed | {name: value for name, value in usage.items() if not name.startswith(("prompt", "completion"))}


def responses(
    answer: Callable[
        [Request, ChatRequest, Callable[[PreparedRequest, TokenStrings | None], ReplyForm]], Awaitable[Response]
    ],
    pools: ThreadPools,
) -> APIRouter:
    """Creates the route.

    Args:
        answer: answers a chat request in a given reply form.
    """
    routes = APIRouter()

    @routes.post("/v1/responses")
    async def respond(request: Request) -> Response:
        def parse(raw: bytes) -> tuple[ResponsesRequest, ChatRequest]:
            body = ResponsesRequest.parse(raw)
            return body, body.chat()

        body, chat = await pools.parsed(request, parse)
        try:
            return await answer(request, chat, lambda prepared, strings: ResponseReply(body, prepared, strings))
        except ApiError as error:
            raise rename_parameters(error) from error

    return routes
