"""POST /v1/responses: the part of OpenAI's Responses API that keeps no state between requests.

Translates a request for the chat endpoint, which answers it, and the answer to a response object.
"""

import functools
import secrets
import time
from collections.abc import Sequence
from typing import Any, Literal

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import BaseModel

from dflash_toolkit.runtime.connection import PreparedRequest

from ..answer import Answer, Piece
from ..logprobs import AnswerToken, TokenStrings, chat_logprobs
from ..openapi import DECODED, Acceptance, CompletionDetails, TokenLogprob, operation
from ..parsing import Delta
from ..protocol import ApiError
from ..replies import typed_event
from ..service import Service
from .chat import answer
from .responses_request import ReasoningOptions, ResponsesRequest, TextOptions, rename_parameters


class OutputText(BaseModel):
    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[TokenLogprob]


class OutputMessage(BaseModel):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    content: list[OutputText]
    status: Literal["in_progress", "completed", "incomplete"]


class OutputReasoningText(BaseModel):
    type: Literal["reasoning_text"]
    text: str


class OutputReasoning(BaseModel):
    id: str
    type: Literal["reasoning"]
    summary: list[Any]
    content: list[OutputReasoningText]
    status: Literal["in_progress", "completed", "incomplete"]


class OutputCall(BaseModel):
    id: str
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    status: Literal["in_progress", "completed", "incomplete"]


class InputDetails(BaseModel):
    cached_tokens: int
    cache_write_tokens: int


class ResponseUsage(BaseModel):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: CompletionDetails
    total_tokens: int
    dflash: Acceptance


class ResponseError(BaseModel):
    code: str
    message: str


class IncompleteDetails(BaseModel):
    reason: Literal["max_output_tokens"]


class ResponseObject(BaseModel):
    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    background: Literal[False]
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, Any]
    model: str
    output: list[OutputMessage | OutputReasoning | OutputCall]
    parallel_tool_calls: bool
    previous_response_id: None
    reasoning: dict[str, str | None]
    store: Literal[False]
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["auto", "disabled"]
    usage: ResponseUsage | None


class ResponseEvent(BaseModel):
    """An event; its `type` decides which fields it has, as in OpenAI's API."""

    type: str
    sequence_number: int
    response: ResponseObject | None = None
    output_index: int = 0
    content_index: int = 0
    item_id: str = ""
    delta: str = ""


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
        self._tokens: list[AnswerToken] = []  # tokens with text that may belong to the message
        self._logprobs: list[dict[str, Any]] = []  # log-probabilities of the open message
        self._status, self._incomplete = "in_progress", False

    def event(self, chunk: dict[str, Any]) -> bytes:
        return typed_event(chunk)

    def whole(self, answers: Sequence[tuple[Piece, Answer]], usage: dict[str, Any]) -> dict[str, Any]:
        ((piece, answer),) = answers
        self.piece(0, piece)
        self.ended(0, answer)
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

    def ended(self, index: int, answer: Answer) -> list[dict[str, Any]]:
        self._incomplete = answer.reason == "length"
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
            "truncation": request.truncation or "disabled",
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


def routes(service: Service) -> APIRouter:
    found = APIRouter()
    described = operation(
        "Answer a list of items", ResponseObject, DECODED, body=ResponsesRequest, events=ResponseEvent
    )

    @found.post("/v1/responses", openapi_extra=described)
    async def respond(request: Request) -> Response:
        body = await service.pools.parsed(request, ResponsesRequest.parse)
        chat = await service.pools.run(request, body.chat)
        try:
            return await answer(service, request, chat, functools.partial(ResponseReply, body))
        except ApiError as error:
            raise rename_parameters(error) from error

    return found
