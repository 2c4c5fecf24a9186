"""`/openapi.json`: describes the requests by the models that parse them, and the replies by models as well.

Fields of replies without a default are always present; options may add more.
"""

import copy
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

from fastapi import APIRouter
from fastapi.routing import APIRoute
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from dflash_toolkit.version import __version__

from .body import Strict
from .protocol import GenerationRequest

REF = "#/components/schemas/{model}"
ERRORS = {
    400: "The request is invalid; the message names the wrong parameter and what to do",
    401: "A wrong or missing API key",
    404: "No such model or path",
    405: "The path does not support this method",
    413: "The body is too long",
    415: "The body is compressed",
    429: "Too many answers are running or waiting",
    500: "The request failed, or the server has a defect; see its log",
    503: "The engine has failed, or the server is shutting down",
    504: "The answer took longer than the server allows",
}
DECODED = (404, 429, 504)  # errors of endpoints that decode
Body = type[BaseModel]


def operation(
    summary: str,
    reply: Body | str | None = None,
    errors: Sequence[int] = (),
    *,
    body: Body | None = None,
    events: Body | None = None,
    error: Body | None = None,
) -> dict[str, Any]:
    """Describes a route of an endpoint, for its `openapi_extra`.

    Args:
        reply: the model of the reply, or the media type of a text.
        errors: statuses that not every route has.
        events: the model of each event of a streamed reply.
        error: the model of an error; None: OpenAI's.
    """
    return {"summary": summary, "reply": reply, "errors": errors, "body": body, "events": events, "error": error}


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
    target_version: int
    drafter_version: int


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


class PromptLogprob(BaseModel):
    logprob: float
    rank: int
    decoded_token: str


def document(
    routers: Iterable[tuple[APIRouter, bool]],
    models: Sequence[str],
    keyed: bool = False,
    root_path: str = "",
    strict: bool = False,
    administration: Iterable[APIRouter] = (),
) -> dict[str, Any]:
    """Returns the OpenAPI 3.1 description of a server.

    Args:
        routers: the routes, and whether they ask for a key if the server has one.
        models: the served names.
        keyed: the server has API keys.
        root_path: path under which a proxy exposes the routes.
        strict: unknown fields of bodies are refused.
        administration: routes that always ask for a key, an admin key.
    """
    every = [
        *((router, asks, keyed and asks) for router, asks in routers),
        *((each, True, True) for each in administration),
    ]
    paths: dict[str, dict[str, Any]] = {}
    bodies, replies = dict[str, Body](), dict[str, Body]({"Error": Error})
    for router, asks, asked in every:
        for route in router.routes:
            assert isinstance(route, APIRoute) and route.openapi_extra is not None, route
            given = route.openapi_extra
            bodies |= {each.__name__: each for each in (given["body"],) if each is not None}
            answered = (given["reply"], given["events"], given["error"])
            replies |= {each.__name__: each for each in answered if isinstance(each, type)}
            described = _operation(keyed=asked, key=asks, **given)
            if "{" in route.path_format:  # a route with a parameter has one, a served name
                described["parameters"] = [
                    {"name": "name", "in": "path", "required": True, "schema": {"enum": [*models]}}
                ]
            paths[route.path_format] = {method.lower(): described for method in route.methods or () if method != "HEAD"}
    _, accepted = models_json_schema([(each, "validation") for each in bodies.values()], ref_template=REF)
    _, returned = models_json_schema([(each, "serialization") for each in replies.values()], ref_template=REF)
    schemas: dict[str, Any] = accepted["$defs"] | returned["$defs"]
    for name, body in bodies.items():
        if (field := body.model_fields.get("model")) is not None and field.annotation in (str, str | None):
            schemas[name]["properties"]["model"] = {"enum": [*models, *[None] * (not field.is_required())]}
        if issubclass(body, GenerationRequest):
            for elsewhere in body.elsewhere:
                unset = [*dict.fromkeys((None, body.model_fields[elsewhere].default))]
                schemas[name]["properties"][elsewhere] = {"enum": unset, "description": "Not a parameter of this route"}
    for model in _models(Strict):
        if model.__name__ in schemas:
            _describe_undeclared(schemas[model.__name__], model, strict)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "dflash-serve",
            "version": __version__,
            "description": "OpenAI's API, with speculative decoding",
        },
        "servers": [{"url": root_path or "/"}],
        "security": [{"key": []}, {"x-api-key": []}],
        "paths": paths,
        "components": {
            "schemas": schemas,
            "responses": {str(status): _error(status) for status in ERRORS},
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer"},
                "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


def _operation(
    summary: str,
    reply: Body | str | None,
    errors: Sequence[int],
    body: Body | None,
    events: Body | None,
    error: Body | None,
    *,
    key: bool,
    keyed: bool,
) -> dict[str, Any]:
    success: dict[str, Any] = {"description": "Success"}
    if isinstance(reply, str):
        success["content"] = {reply: {"schema": {"type": "object" if reply == "application/json" else "string"}}}
    elif reply is not None:
        success["content"] = _json(reply)
    if events is not None:  # with `stream`; chats and completions end with [DONE], a late error is an event too
        content = {"contentMediaType": "application/json", "contentSchema": _reference(events)}
        data = {"type": "string", "anyOf": [{"const": "[DONE]"}, content]}
        event = {"type": "object", "properties": {"event": {"type": "string"}, "data": data}, "required": ["data"]}
        success["content"]["text/event-stream"] = {"itemSchema": event}  # a field of OpenAPI 3.2; FastAPI writes it too
    statuses = {405, 500, *errors} | ({503} if key else set()) | ({401} if keyed else set())
    statuses |= {400, 413, 415} if body is not None else set()
    refused = {
        str(status): _error(status, error) if error else {"$ref": f"#/components/responses/{status}"}
        for status in sorted(statuses)
    }
    described = {"summary": summary, "responses": {"200": success} | refused}
    if body is not None:
        described["requestBody"] = {"required": True, "content": _json(body)}
    return described if keyed else described | {"security": []}


def _models(base: type[Strict]) -> Iterator[type[Strict]]:
    for model in base.__subclasses__():
        yield model
        yield from _models(model)


def _describe_undeclared(schema: dict[str, Any], model: type[Strict], strict: bool) -> None:
    """Adds the checks of `unknown.py` to the schema of a model."""
    properties = schema.setdefault("properties", {})
    for name in model.ignored:
        properties.setdefault(name, {"description": "Ignored; does not change the answer"})
    for name, harmless in model.unsupported.items():
        if name not in model.model_fields:
            properties[name] = {
                "enum": [None, *copy.deepcopy(harmless)],
                "description": "Not supported; only values without effect are accepted",
            }
    schema["additionalProperties"] = model.open or not strict


def _reference(body: Body) -> dict[str, Any]:
    return {"$ref": REF.format(model=body.__name__)}


def _json(body: Body) -> dict[str, Any]:
    return {"application/json": {"schema": _reference(body)}}


def _error(status: int, error: Body = Error) -> dict[str, Any]:
    headers = {429: ("Retry-After", "seconds"), 405: ("Allow", "methods"), 401: ("WWW-Authenticate", "Bearer")}
    found: dict[str, Any] = {"description": ERRORS[status], "content": _json(error)}
    if status in headers:
        name, text = headers[status]
        found["headers"] = {name: {"description": text, "schema": {"type": "string"}}}
    return found
