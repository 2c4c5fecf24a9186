"""`/openapi.json`: describes the requests by the models that parse them, and the replies by the models below."""

import copy
import functools
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from fastapi import APIRouter
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from dflash_toolkit.version import __version__

from .metrics import CONTENT_TYPE
from .page import FILES
from .protocol import IGNORED, ChatRequest, CompletionRequest, GenerationRequest
from .responses_api import ELSEWHERE, ResponsesRequest
from .tokenizing import DetokenizeRequest, TokenizeRequest

REF = "#/components/schemas/{model}"
ERRORS = {
    400: "The request is invalid; the message names the wrong parameter and what to do",
    401: "A wrong or missing API key",
    404: "No such model or path",
    405: "The path does not support this method",
    413: "The body is too long",
    429: "Too many answers are running or waiting",
    500: "The request failed, or the server has a defect; see its log",
    503: "The engine has failed, or the server is shutting down",
    504: "The answer took longer than the server allows",
}

# ---- replies: fields without a default are always present; options may add more ------------------------------


class Fault(BaseModel):
    message: str
    type: Literal["invalid_request_error", "server_error"]
    param: str | None
    code: str | None


class Error(BaseModel):
    """An error in OpenAI's form, as every route returns it."""

    error: Fault


class Acceptance(BaseModel):
    """Acceptance statistics of a request."""

    verify_steps: int
    drafted: int
    accepted: int
    acceptance_length: float | None


class PromptDetails(BaseModel):
    cached_tokens: int


class CompletionDetails(BaseModel):
    reasoning_tokens: int


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails
    dflash: Acceptance


class DraftMetrics(BaseModel):
    mean_acceptance_length: float
    draft_acceptance_rate: float
    acceptance_histogram: list[int]  # number of steps by accepted tokens
    num_spec_steps: int
    num_accepted_draft_tokens: int
    num_draft_tokens: int
    num_spec_tokens: int
    per_step_accepted: list[int] = []
    per_step_drafted: list[int] = []


class AnswerMetrics(BaseModel):
    speculative_decoding: DraftMetrics


class TopLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    content: list[TokenLogprob]


class TextLogprobs(BaseModel):
    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class PromptLogprob(BaseModel):
    logprob: float
    rank: int
    decoded_token: str


class CalledFunctionReply(BaseModel):
    name: str
    arguments: str


class ToolCallReply(BaseModel):
    id: str
    type: Literal["function"]
    function: CalledFunctionReply


class AssistantMessage(BaseModel):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str = ""
    tool_calls: list[ToolCallReply] = []


class ChatChoice(BaseModel):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]
    token_ids: list[int] = []
    stop_reason: str | int | None = None


class ChatCompletion(BaseModel):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: list[dict[str, PromptLogprob] | None] = []
    metrics: AnswerMetrics | None = None
    prompt_token_ids: list[int] = []


class FunctionDelta(BaseModel):
    name: str = ""
    arguments: str


class ToolCallDelta(BaseModel):
    index: int
    id: str = ""
    type: Literal["function"] = "function"
    function: FunctionDelta


class ChatDelta(BaseModel):
    role: Literal["assistant"] = "assistant"
    content: str | None = ""
    reasoning_content: str = ""
    tool_calls: list[ToolCallDelta] = []


class ChatChunkChoice(BaseModel):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"] | None
    token_ids: list[int] = []
    stop_reason: str | int | None = None


class ChatCompletionChunk(BaseModel):
    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    metrics: AnswerMetrics | None = None
    prompt_token_ids: list[int] = []


class TextChoice(BaseModel):
    index: int
    text: str
    logprobs: TextLogprobs | None
    prompt_logprobs: list[dict[str, PromptLogprob] | None] = []
    finish_reason: Literal["stop", "length"] | None  # null in the chunks before the last
    token_ids: list[int] = []
    prompt_token_ids: list[int] = []
    stop_reason: str | int | None = None


class Completion(BaseModel):
    """The answers, or a chunk of them."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage | None = None
    metrics: AnswerMetrics | None = None


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
    truncation: Literal["disabled"]
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


class ModelCard(BaseModel):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    num_speculative_tokens: int
    draft_sample_method: Literal["greedy", "probabilistic"]


class ModelList(BaseModel):
    object: Literal["list"]
    data: list[ModelCard]


class Tokenized(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(BaseModel):
    prompt: str


class Version(BaseModel):
    version: str


# ---- routes --------------------------------------------------------------------------------------------------

REQUESTS: tuple[type[BaseModel], ...] = (
    ChatRequest,
    CompletionRequest,
    ResponsesRequest,
    TokenizeRequest,
    DetokenizeRequest,
)
REPLIES: tuple[type[BaseModel], ...] = (
    Error,
    ChatCompletion,
    ChatCompletionChunk,
    Completion,
    ResponseObject,
    ResponseEvent,
    ModelCard,
    ModelList,
    Tokenized,
    Detokenized,
    Version,
)
KEYED = (401, 500, 503)  # errors of every route that needs a key
POSTED = (400, *KEYED, 413)  # errors of routes with a body
DECODED = (*POSTED, 404, 429, 504)  # errors of routes that decode


def describe_routes(models: Sequence[str], keyed: bool = False, root_path: str = "") -> dict[str, Any]:
    """Returns the OpenAPI 3.1 description of a server.

    Args:
        models: the served names.
        keyed: an API key is required.
        root_path: path under which a proxy exposes the routes.
    """
    schemas = copy.deepcopy(_schemas())
    for each in REQUESTS:
        schema = schemas[each.__name__]
        schema["properties"]["model"] = {"enum": [*models]}
        if issubclass(each, GenerationRequest):
            _close(schema, each)
    for name in ("TokenizeRequest", "DetokenizeRequest"):
        schemas[name]["properties"]["model"] = {"enum": [*models, None]}

    chat = _post("Answer a conversation", "ChatRequest", "ChatCompletion", DECODED, "ChatCompletionChunk")
    text = _post("Continue prompts", "CompletionRequest", "Completion", DECODED, "Completion")
    items = _post("Answer a list of items", "ResponsesRequest", "ResponseObject", DECODED, "ResponseEvent")
    named = {"name": "name", "in": "path", "required": True, "schema": {"enum": [*models]}}
    paths: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"post": chat},
        "/v1/completions": {"post": text},
        "/v1/responses": {"post": items},
        "/v1/models": {"get": _get("The served model", KEYED, _json("ModelList"))},
        "/v1/models/{name}": {
            "get": _get("The served model", (*KEYED, 404), _json("ModelCard")) | {"parameters": [named]}
        },
        "/tokenize": {
            "post": _post("Tokens of a text or a conversation", "TokenizeRequest", "Tokenized", (*POSTED, 404))
        },
        "/detokenize": {"post": _post("The text of tokens", "DetokenizeRequest", "Detokenized", (*POSTED, 404))},
        "/metrics": {"get": _get("Metrics in Prometheus's text format", KEYED, _text(CONTENT_TYPE))},
        "/openapi.json": {"get": _get("This description", KEYED, {"application/json": {"schema": {"type": "object"}}})},
        "/health": {"get": _get("Whether the engine serves", (500, 503), None)},
        "/ready": {"get": _get("Whether new answers begin", (500, 503), None)},
        "/version": {"get": _get("The server's release", (500,), _json("Version"))},
    }
    for path, (_, kind) in FILES.items():
        paths[path] = {"get": _get("The page", (500,), _text(kind))}
    for path, methods in paths.items():
        for operation in methods.values():
            operation["responses"]["405"] = {"$ref": "#/components/responses/405"}
            if not keyed or path in ("/health", "/ready", "/version", *FILES):
                operation["security"] = []
                operation["responses"].pop("401", None)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "dflash-serve",
            "version": __version__,
            "description": "OpenAI's API, with speculative decoding",
        },
        "servers": [{"url": root_path or "/"}],
        "security": [{"key": []}],
        "paths": paths,
        "components": {
            "schemas": schemas,
            "responses": {str(status): _error(status) for status in ERRORS},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


@functools.cache
def _schemas() -> dict[str, Any]:
    """Returns the schema of every body by the name of its class."""
    _, accepted = models_json_schema([(each, "validation") for each in REQUESTS], ref_template=REF)
    _, answered = models_json_schema([(each, "serialization") for each in REPLIES], ref_template=REF)
    found: dict[str, Any] = accepted["$defs"] | answered["$defs"]
    return found


def _close(schema: dict[str, Any], request: type[GenerationRequest]) -> None:
    """Adds the checks of `GenerationRequest.parse` to a schema: ignored and unsupported parameters, and no others."""
    properties = schema["properties"]
    if request is ResponsesRequest:
        for name in ELSEWHERE:
            properties.pop(name, None)
    for name in IGNORED:
        properties.setdefault(name, {"description": "Ignored; does not change the answer"})
    for name, harmless in request.unsupported.items():
        if name in request.model_fields:
            continue
        properties[name] = {
            "enum": [None, *copy.deepcopy(harmless)],
            "description": "Not supported; only values without effect are accepted",
        }
    schema["additionalProperties"] = False


def _json(name: str) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": REF.format(model=name)}}}


def _text(kind: str) -> dict[str, Any]:
    return {kind: {"schema": {"type": "string"}}}


def _error(status: int) -> dict[str, Any]:
    headers = {429: ("Retry-After", "seconds"), 405: ("Allow", "methods"), 401: ("WWW-Authenticate", "Bearer")}
    found: dict[str, Any] = {"description": ERRORS[status], "content": _json("Error")}
    if status in headers:
        name, text = headers[status]
        found["headers"] = {name: {"description": text, "schema": {"type": "string"}}}
    return found


def _get(summary: str, errors: Iterable[int], content: dict[str, Any] | None) -> dict[str, Any]:
    done: dict[str, Any] = {"description": "Success"} | ({"content": content} if content else {})
    refused = {str(status): {"$ref": f"#/components/responses/{status}"} for status in sorted(errors)}
    return {"summary": summary, "responses": {"200": done} | refused}


def _post(summary: str, body: str, reply: str, errors: Iterable[int], events: str | None = None) -> dict[str, Any]:
    content = _json(reply)
    if events is not None:  # with `stream`; chats and completions end with [DONE], a late error is an event too
        data = {
            "type": "string",
            "contentMediaType": "application/json",
            "contentSchema": {"$ref": REF.format(model=events)},
        }
        event = {"type": "object", "properties": {"event": {"type": "string"}, "data": data}, "required": ["data"]}
        content["text/event-stream"] = {"itemSchema": event}  # of OpenAPI 3.2; FastAPI writes it too
    return _get(summary, errors, content) | {"requestBody": {"required": True, "content": _json(body)}}


def description(models: Sequence[str], keyed: bool = False, root_path: str = "") -> APIRouter:
    """Creates the route of the description; see `describe_routes`."""
    routes, document = APIRouter(), describe_routes(models, keyed, root_path)

    @routes.get("/openapi.json")
    async def openapi() -> Response:
        return JSONResponse(document)

    return routes
