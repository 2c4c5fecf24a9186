"""The HTTP side: OpenAI's routes over an `Engine`. Everything that fails leaves in OpenAI's error form."""

import contextlib
import hmac
import json
import time
import uuid
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse
from prometheus_client import CollectorRegistry, Counter, generate_latest

from dflash_toolkit import UserError
from dflash_toolkit.prompts import encode_chat

from .engine import Chunk, Engine
from .protocol import ApiError, ChatRequest, CompletionRequest, GenerationRequest, parse
from .text import Detokenizer, StopScanner

BODY_LIMIT = 4 * 2**20  # bytes


@dataclass(slots=True)
class Answer:
    """One request on its way: what to decode, and what has been decoded."""

    id: str
    prompt_ids: list[int]
    request: GenerationRequest
    max_new_tokens: int
    chat: bool
    created: int = field(default_factory=lambda: int(time.time()))
    completion_tokens: int = 0
    finish_reason: str | None = None
    last: Chunk | None = None

    def usage(self) -> dict[str, Any]:
        """OpenAI's usage object, and what the drafter brought."""
        last = self.last or Chunk([], None)
        return {
            "prompt_tokens": len(self.prompt_ids),
            "completion_tokens": self.completion_tokens,
            "total_tokens": len(self.prompt_ids) + self.completion_tokens,
            "dflash": {
                "verify_steps": last.verify_steps,
                "drafted": last.drafted,
                "accepted": last.accepted,
                "acceptance_length": round(last.committed / last.verify_steps, 4) if last.verify_steps else None,
            },
        }


class Metrics:
    """Prometheus counters of one app."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

        def counter(name: str, text: str) -> Counter:
            return Counter(f"dflash_{name}", text, registry=self.registry)

        self.requests = counter("requests", "Requests answered, completely or not")
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens")
        self.generated_tokens = counter("generated_tokens", "Tokens generated")
        self.verify_steps = counter("verify_steps", "Verification steps")
        self.accepted_tokens = counter("accepted_tokens", "Drafted tokens accepted")

    def count(self, answer: Answer) -> None:
        """Add a request that has ended."""
        last = answer.last or Chunk([], None)
        self.requests.inc()
        self.prompt_tokens.inc(len(answer.prompt_ids))
        self.generated_tokens.inc(answer.completion_tokens)
        self.verify_steps.inc(last.verify_steps)
        self.accepted_tokens.inc(last.accepted)


def create_app(engine: Engine, model_name: str, api_key: str | None = None) -> FastAPI:
    """The application; `model_name` is the only model it answers for."""
    app = FastAPI(title="dflash-serve", docs_url=None, redoc_url=None, openapi_url=None)
    metrics = Metrics()
    card = {"id": model_name, "object": "model", "created": int(time.time()), "owned_by": "dflash-toolkit"}

    def authorise(request: Request) -> None:
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        if api_key is not None and not hmac.compare_digest(given.encode(), api_key.encode()):
            raise ApiError(401, "wrong or missing API key", code="invalid_api_key")

    def check_model(name: str) -> None:
        if name != model_name:
            raise ApiError(
                404, f"model {name!r} does not exist; this server has {model_name!r}", "model", "model_not_found"
            )

    def start(request: GenerationRequest, prompt_ids: list[int], wanted: int | None, chat: bool) -> Answer:
        limit = engine.target.context_limit
        if not prompt_ids:
            raise ApiError(400, "the prompt is empty", "messages" if chat else "prompt")
        if len(prompt_ids) >= limit:
            raise ApiError(
                400, f"the prompt has {len(prompt_ids)} tokens; the context limit is {limit} and an answer needs one",
                "messages" if chat else "prompt", "context_length_exceeded",
            )  # fmt: skip
        room = limit - len(prompt_ids)
        prefix = "chatcmpl-" if chat else "cmpl-"
        return Answer(prefix + uuid.uuid4().hex, prompt_ids, request, min(wanted or room, room), chat)

    async def pieces(answer: Answer) -> AsyncGenerator[str, None]:
        """Text as it becomes safe to send; fills the answer's counts and finish reason."""
        tokenizer, request = engine.target.tokenizer, answer.request
        text, scanner = Detokenizer(tokenizer), StopScanner(request.stops())
        chunks = engine.generate(answer.prompt_ids, request.sampling(answer.max_new_tokens))
        try:
            async for chunk in chunks:
                answer.last = chunk
                answer.completion_tokens += len(chunk.tokens)
                answer.finish_reason = chunk.finish_reason
                piece = scanner.push(text.push(chunk.tokens))
                if not scanner.stopped and chunk.finish_reason is not None:
                    piece += scanner.push(text.flush(), last=True)
                if scanner.stopped:
                    answer.finish_reason = "stop"
                yield piece  # empty too: each one is a chance to notice that the client has gone
                if scanner.stopped:
                    return
        finally:
            await chunks.aclose()
            metrics.count(answer)

    async def respond(http: Request, answer: Answer) -> Response:
        answer.request.stops(), answer.request.sampling(answer.max_new_tokens)  # refuse before the first byte
        if answer.request.stream:
            return StreamingResponse(events(answer, model_name, pieces(answer)), media_type="text/event-stream")
        text = []
        async with contextlib.aclosing(pieces(answer)) as parts:  # closing it stops the decoding
            async for piece in parts:
                text.append(piece)
                if await http.is_disconnected():
                    break
        return JSONResponse(whole(answer, model_name, "".join(text)))

    @app.post("/v1/chat/completions")
    async def chat_completions(http: Request) -> Response:
        authorise(http)
        request: ChatRequest = parse(ChatRequest, await read_json(http))
        check_model(request.model)
        try:
            prompt_ids = encode_chat(engine.target.tokenizer, [m.plain() for m in request.messages])
        except UserError as error:
            raise ApiError(400, str(error), "messages") from error
        wanted = request.max_completion_tokens or request.max_tokens
        return await respond(http, start(request, prompt_ids, wanted, chat=True))

    @app.post("/v1/completions")
    async def completions(http: Request) -> Response:
        authorise(http)
        request: CompletionRequest = parse(CompletionRequest, await read_json(http))
        check_model(request.model)
        prompt = request.prompt
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], str):
            if len(prompt) > 1:
                raise ApiError(400, "this server takes one prompt a request", "prompt", "unsupported_parameter")
            prompt = prompt[0]
        prompt_ids = list(engine.target.tokenizer(prompt).input_ids) if isinstance(prompt, str) else prompt
        rows = engine.target.embedding.num_embeddings
        if any(not 0 <= int(token) < rows for token in prompt_ids):
            raise ApiError(400, f"a token id of the prompt is outside 0..{rows - 1}", "prompt")
        return await respond(http, start(request, prompt_ids, request.max_tokens or 16, chat=False))  # type: ignore[arg-type]

    @app.get("/v1/models")
    async def models(http: Request) -> dict[str, Any]:
        authorise(http)
        return {"object": "list", "data": [card]}

    @app.get("/v1/models/{name:path}")
    async def model(http: Request, name: str) -> dict[str, Any]:
        authorise(http)
        check_model(name)
        return card

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/metrics")
    async def prometheus(http: Request) -> Response:
        authorise(http)
        return PlainTextResponse(generate_latest(metrics.registry))

    _install_error_forms(app)
    return app


def _install_error_forms(app: FastAPI) -> None:
    def as_response(error: ApiError) -> JSONResponse:
        return JSONResponse(error.body, status_code=error.status)

    @app.exception_handler(ApiError)
    async def api_error(_: Request, error: ApiError) -> JSONResponse:
        return as_response(error)

    @app.exception_handler(404)
    async def unknown_path(http: Request, _: Exception) -> JSONResponse:
        return as_response(ApiError(404, f"no such path: {http.url.path}", code="unknown_url"))

    @app.exception_handler(405)
    async def wrong_method(http: Request, _: Exception) -> JSONResponse:
        return as_response(
            ApiError(405, f"{http.method} is not allowed for {http.url.path}", code="method_not_allowed")
        )

    @app.exception_handler(Exception)
    async def internal(_: Request, error: Exception) -> JSONResponse:
        return as_response(ApiError(500, f"internal error: {type(error).__name__}", code="internal_error"))


async def read_json(http: Request) -> Any:
    """The body as JSON. Raises ApiError: too long (by its header or by counting), or not JSON."""
    too_long = ApiError(413, f"the request body is longer than {BODY_LIMIT} bytes", code="request_too_large")
    length = http.headers.get("content-length", "")
    if length.isdigit() and int(length) > BODY_LIMIT:
        raise too_long
    body = bytearray()
    async for part in http.stream():
        body += part
        if len(body) > BODY_LIMIT:
            raise too_long
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the request body is not valid JSON: {error}") from error


def whole(answer: Answer, model: str, text: str) -> dict[str, Any]:
    """A response that is not streamed."""
    choice: dict[str, Any] = {"index": 0, "finish_reason": answer.finish_reason, "logprobs": None}
    choice |= {"message": {"role": "assistant", "content": text}} if answer.chat else {"text": text}
    kind = "chat.completion" if answer.chat else "text_completion"
    head = {"id": answer.id, "object": kind, "created": answer.created, "model": model}
    return head | {"choices": [choice], "usage": answer.usage()}


async def events(answer: Answer, model: str, pieces: AsyncGenerator[str, None]) -> AsyncGenerator[str]:
    """Server-sent events: text, the finish reason, usage when asked for, `[DONE]`."""
    kind = "chat.completion.chunk" if answer.chat else "text_completion"
    head = {"id": answer.id, "object": kind, "created": answer.created, "model": model}

    def event(text: str | None, finish: str | None = None, role: bool = False) -> str:
        choice: dict[str, Any] = {"index": 0, "finish_reason": finish}
        if answer.chat:
            choice["delta"] = ({"role": "assistant"} if role else {}) | ({} if text is None else {"content": text})
        else:
            choice["text"] = text or ""
        return f"data: {json.dumps(head | {'choices': [choice]})}\n\n"

    try:
        if answer.chat:
            yield event("", role=True)
        async for piece in pieces:
            if piece:
                yield event(piece)
        yield event(None, finish=answer.finish_reason)
        options = answer.request.stream_options
        if options is not None and options.include_usage:
            yield f"data: {json.dumps(head | {'choices': [], 'usage': answer.usage()})}\n\n"
        yield "data: [DONE]\n\n"
    except Exception as error:  # the status line is out: the error becomes the last event
        yield f"data: {json.dumps(ApiError(500, f'internal error: {type(error).__name__}').body)}\n\n"
    finally:
        await pieces.aclose()
