"""The HTTP application: routes, API keys, and errors in OpenAI's form."""

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from contextlib import aclosing
from itertools import zip_longest
from typing import Any, TypeAlias

import msgspec
from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse, Response, StreamingResponse

from dflash_toolkit.config import UserError
from dflash_toolkit.data.prompts import template_variables
from dflash_toolkit.generation import PromptError
from dflash_toolkit.runtime import EngineClient, EngineClosedError, RequestFailedError
from dflash_toolkit.runtime.client import PreparedRequest
from dflash_toolkit.sampling import BiasError, Grammar, GrammarError
from dflash_toolkit.version import __version__

from .access import Access
from .answer import Answer, AnswerOptions, Piece, speculative_decoding, usage
from .keys import matching
from .logprobs import Echo, TokenStrings, prompt_logprobs
from .metrics import CONTENT_TYPE, Clock, Metrics, fetch_counts
from .openapi import description
from .page import page
from .parsing import OutputParser, Parsers
from .protocol import (
    MAX_PROMPT_LOGPROBS,
    ApiError,
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    NamedTool,
    ignores_its_end,
)
from .replies import Replies, ReplyForm
from .responses_api import responses
from .state import Count, ServerState
from .text import special_tokens
from .thread_pools import CLIENT_CLOSED_REQUEST, ThreadPools, unless_disconnected
from .tokenizing import Encoder, tokenizing

STATS_S = 5.0
ENGINE_TIMEOUT_S = 30.0  # an engine that does not answer for this long counts as failed
MAX_QUEUE = 1024  # answers
MakeForm: TypeAlias = Callable[[PreparedRequest, TokenStrings | None], ReplyForm]
Pieces: TypeAlias = AsyncGenerator[tuple[int, Piece | None]]  # with the index of the answer; None ends it
log = logging.getLogger("dflash_toolkit.serve")


def create_app(
    engine: EngineClient,
    model: str,
    api_keys: Sequence[str] = (),
    defaults: Mapping[str, float] | None = None,
    tool_call_parser: str = "auto",
    reasoning_parser: str = "auto",
    *,
    state: ServerState | None = None,
    max_queue: int = MAX_QUEUE,
    request_timeout_s: float | None = None,
    root_path: str = "",
    allowed_origins: Sequence[str] = (),
    scheduling_policy: str = "fair",
    aliases: Sequence[str] = (),
    per_request_spec_decode_metrics: str = "none",
) -> FastAPI:
    """Creates the application that serves `engine` as `model`.

    Args:
        api_keys: accepted keys; empty: no key is required.
        defaults: sampling parameters for requests that omit them (`defaults.py`).
        tool_call_parser, reasoning_parser: see the options of `dflash-serve`.
        state: shared with the server.
        max_queue: answers that may wait for a place in the batch; more are refused (429).
        request_timeout_s: seconds after which an answer is aborted.
        root_path: path under which a proxy exposes the routes.
        allowed_origins: sites whose pages may send requests from a browser.
        scheduling_policy: "priority" follows the priority of requests; "fair" shares time among keys.
        aliases: more names of the model.
        per_request_spec_decode_metrics: "summary" or "detailed" adds draft statistics to an answer.
    """
    metrics = Metrics(model)
    shared = state or ServerState()
    parsers = Parsers.choose(engine.tokenizer, tool_call_parser, reasoning_parser)
    priorities = scheduling_policy == "priority"
    service = _Service(
        engine,
        model,
        metrics,
        defaults or {},
        max_queue,
        request_timeout_s,
        priorities,
        per_request_spec_decode_metrics,
        shared.answers,
        (model, *aliases),
    )
    limit = engine.info.capacity.context_limit
    pools, encoder = ThreadPools(), Encoder(engine.tokenizer, limit)
    card = {
        "id": model,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "dflash-toolkit",
        "max_model_len": limit,
        "num_speculative_tokens": engine.info.block_size - 1,  # of the longest draft
        "draft_sample_method": engine.info.draft_sample_method,
    }

    async def authorise(request: Request) -> None:  # async: a thread would wait for the interpreter lock
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        number = matching(api_keys, key.strip() if scheme.lower() == "bearer" else "")
        if api_keys and number is None:
            message = "wrong or missing API key; send one as `Authorization: Bearer KEY`"
            raise ApiError(401, message, code="invalid_api_key")
        request.state.key = "" if number is None else str(number)

    open_routes, routes = APIRouter(), APIRouter(dependencies=[Depends(authorise)])

    @open_routes.get("/health")
    async def health() -> Response:
        try:
            await engine.check(ENGINE_TIMEOUT_S)
        except EngineClosedError as error:
            if error.code == "engine_failed":
                return _error_response(_as_api_error(error))
        return Response()

    @open_routes.get("/ready")
    async def ready() -> Response:
        if shared.draining:
            return _error_response(_as_api_error(EngineClosedError()))
        return await health()

    @open_routes.get("/version")
    async def version() -> Response:
        return JSONResponse({"version": __version__})

    @routes.get("/metrics")
    async def render_metrics() -> Response:
        stats = None  # if the engine does not answer, the last statistics are shown
        with contextlib.suppress(EngineClosedError, TimeoutError):
            stats = await asyncio.wait_for(engine.ping(), STATS_S)
        counts = [asyncio.wait_for(fetch_counts(path), STATS_S) for path in shared.others]
        found = await asyncio.gather(*counts, return_exceptions=True)
        others = [one for one in found if isinstance(one, bytes) and one]
        return Response(metrics.render(stats, others), media_type=CONTENT_TYPE)

    @routes.get("/v1/models")
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [card | {"id": name} for name in (model, *aliases)]})

    @routes.get("/v1/models/{name:path}")  # names like `Qwen/Qwen3-8B`
    async def one_model(name: str) -> Response:
        service.check_model(name)
        return JSONResponse(card | {"id": name})

    @routes.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        return await answer_chat(request, await pools.parsed(request, ChatRequest.parse))

    async def answer_chat(request: Request, body: ChatRequest, form: MakeForm | None = None) -> Response:
        """Answers a chat request; `form` replaces the reply form of /v1/chat/completions."""
        service.check_model(body.model)
        tools = body.tools_for(parsers.tool_calls)
        known = template_variables(engine.tokenizer, tools) if body.has_template_variables else ()
        variables, cut = body.variables(known), body.cut(limit)

        def encoded() -> list[int]:
            return encoder.chat([message.plain() for message in body.messages], tools, variables, cut)

        ids = await pools.run(request, encoded)
        start = parsers.start_of(engine.tokenizer, ids)
        grammar = body.grammar_for(parsers.tool_calls, start)
        requests = await service.requests(body, [ids], "messages", request.state.key, grammar)
        strings = service.strings_for(body)
        shown = [one.prompt_ids for one in requests] if body.return_token_ids else ()
        replies: ReplyForm = Replies(
            "chat",
            body.model,
            body.include_usage,
            strings,
            answers_per_prompt=body.answers,
            unique=body.request_id or request.state.request_id,
            prompt_ids=shown,
        )
        if form is not None:
            replies = form(requests[0], strings)
        parallel, named = body.parallel_tool_calls is not False, isinstance(body.tool_choice, NamedTool)
        output_parsers = [parsers.of_answer(start, tools, parallel, named) for _ in requests]
        return await service.respond(request, body, requests, replies, output_parsers, parsers.markers(bool(tools)))

    @routes.post("/v1/completions")
    async def completions(request: Request) -> Response:
        body = await pools.parsed(request, CompletionRequest.parse)
        service.check_model(body.model)
        decode, cut = engine.tokenizer.decode, body.cut(limit)

        def encoded(prompt: str | list[int]) -> list[int]:
            return encoder.text(prompt, cut=cut) if isinstance(prompt, str) else cut.of(prompt) if cut else prompt

        def text_of(prompt: str | list[int], ids: list[int]) -> str:
            whole = isinstance(prompt, str) and (cut is None or len(ids) < cut.most)
            return str(prompt) if whole else decode(ids, clean_up_tokenization_spaces=False)

        prompts = await pools.run(request, lambda: list(map(encoded, body.prompt)))
        requests = await service.requests(body, prompts, "prompt", request.state.key, body.grammar())
        strings = service.strings_for(body)
        shown = (
            await pools.run(request, lambda: list(map(text_of, body.prompt, prompts))) if strings or body.echo else []
        )
        echoes = [Echo(*prompt, body.logprobs) for prompt in zip(prompts, shown, strict=True)] if body.echo else []
        ids = [one.prompt_ids for one in requests] if body.return_token_ids else ()
        lengths = list(map(len, shown))
        name = body.request_id or request.state.request_id
        replies = Replies("text", body.model, body.include_usage, strings, lengths, body.answers, name, prompt_ids=ids)
        return await service.respond(request, body, requests, replies, echoes=echoes)

    routes.include_router(responses(answer_chat, pools))
    routes.include_router(description([model, *aliases], bool(api_keys), root_path))
    routes.include_router(tokenizing(engine, service.check_model, pools, encoder))

    async def refuse(request: Request, error: Any) -> Response:
        metrics.refused(error.status)
        return _error_response(error)

    async def no_such_route(request: Request, error: Any) -> Response:
        message = f"no such path: {request.url.path}; /openapi.json lists the paths"
        return await refuse(request, ApiError(404, message, code="not_found"))

    async def wrong_method(request: Request, error: Any) -> Response:
        allowed = (error.headers or {}).get("Allow", "another method")
        message = f"{request.method} is not allowed for {request.url.path}; use {allowed}"
        response = await refuse(request, ApiError(405, message, code="method_not_allowed"))
        response.headers.update(error.headers or {})
        return response

    async def failed(request: Request, error: Exception) -> Response:
        return _error_response(_as_api_error(error))

    # without FastAPI's schema routes, every path that is not listed above is a 404 in OpenAI's form
    app = FastAPI(openapi_url=None, redirect_slashes=False)
    app.root_path = root_path  # uvicorn would add its own to every path, even if the proxy has kept it
    app.state.metrics = metrics
    app.include_router(page())
    app.include_router(open_routes)
    app.include_router(routes)
    app.add_exception_handler(ApiError, refuse)
    app.add_exception_handler(404, no_such_route)
    app.add_exception_handler(405, wrong_method)
    for known in (EngineClosedError, LateError, RequestFailedError):
        app.add_exception_handler(known, failed)
    app.add_exception_handler(UserError, failed)
    app.add_exception_handler(Exception, failed)  # starlette raises it again, so the traceback is logged
    if allowed_origins:
        app.add_middleware(CORSMiddleware, allow_origins=allowed_origins, allow_methods=["*"], allow_headers=["*"])
    app.add_middleware(Access, state=shared, responded=metrics.responded)
    return app


class _Service:
    """Decodes requests and sends their answers, for all routes."""

    def __init__(
        self,
        engine: EngineClient,
        model: str,
        metrics: Metrics,
        defaults: Mapping[str, float],
        max_queue: int,
        request_timeout_s: float | None,
        priorities: bool,
        draft_metrics: str,
        opened: Count,
        names: Sequence[str],
    ) -> None:
        self._names = names
        self._engine, self._model, self._metrics, self._defaults = engine, model, metrics, defaults
        self._max_open = engine.info.max_num_seqs + max_queue
        self._timeout_s, self._priorities, self._draft_metrics = request_timeout_s, priorities, draft_metrics
        self._open = opened  # answers, running or queued
        self._strings = TokenStrings(engine.tokenizer)

    def check_model(self, name: str) -> None:
        """Raises ApiError (404) for a name that is not served."""
        if name not in self._names:
            message = f"the model {name!r} does not exist; this server serves {self._model!r}"
            raise ApiError(404, message, param="model", code="model_not_found")

    async def requests(
        self,
        body: GenerationRequest,
        prompts: Sequence[list[int]],
        param: str,
        key: str,
        grammar: tuple[str, Grammar] | None,
    ) -> list[PreparedRequest]:
        """Prepares one engine request for each answer to each prompt; each has its own seed.

        Args:
            param: the body's parameter that holds the prompt.
            key: number of the API key.
            grammar: the parameter that sets a grammar, and the grammar.

        Raises:
            ApiError: (400) it cannot be decoded; (429) the queue is full.
        """
        if self._open.total + len(prompts) * body.answers > self._max_open:
            message = f"{self._open.total} answers are running or waiting; try again later"
            raise ApiError(429, message, code="queue_full")
        if grammar and body.ignore_eos:
            raise ignores_its_end(grammar[0])
        if body.priority and not self._priorities:  # otherwise every client could overtake all others
            message = f"`priority` is {body.priority}, but the server was not started with --scheduling-policy priority"
            raise ApiError(400, message + "; omit it", param="priority", code="unsupported_parameter")
        limit, eos = self._engine.info.capacity.context_limit, self._engine.tokenizer.eos_token_id
        least = body.least(body.length(limit), grammar and grammar[0])
        params = body.sampling(limit, self._defaults, eos, grammar[1] if grammar else None)
        scores = sum(map(len, prompts)) * body.answers * (1 + (params.prompt_logprobs or 0))
        if params.prompt_logprobs is not None and scores > MAX_PROMPT_LOGPROBS:
            message = f"{scores} log-probabilities of prompts are requested; request at most {MAX_PROMPT_LOGPROBS}"
            raise ApiError(400, message, param="echo" if body.prompt_logprobs is None else "prompt_logprobs")
        found = []
        for ids in prompts:
            if (wanted := body.requested_tokens) is not None and len(ids) < limit < len(ids) + wanted:
                raise ApiError(
                    400,
                    f"{wanted} tokens are requested, but the prompt leaves {limit - len(ids)} of a context of {limit}; "
                    f"request fewer tokens or shorten the prompt",
                    param="max_completion_tokens" if "max_completion_tokens" in body.model_fields_set else "max_tokens",
                    code="context_length_exceeded",
                )
            if len(ids) < limit < len(ids) + least:
                message = f"min_tokens is {least}, but the prompt leaves {limit - len(ids)} of a context of {limit}"
                raise ApiError(
                    400,
                    f"{message}; lower it or shorten the prompt",
                    param="min_tokens",
                    code="context_length_exceeded",
                )
            try:  # before a stream starts and its status is sent
                first = self._engine.request(ids, params, key, body.priority or 0)
            except UserError as error:
                at_fault = {PromptError: param, BiasError: "logit_bias"}.get(type(error))
                raise ApiError(400, str(error), param=at_fault, code=getattr(error, "code", None)) from error
            seeds = ((params.seed + i + 2**63) % 2**64 - 2**63 for i in range(1, body.answers))  # wrapped to 64 bits
            found += [first, *map(first.with_seed, seeds)]
        try:
            await self._engine.compile(params)
        except GrammarError as error:
            raise ApiError(400, str(error), param=grammar and grammar[0], code="invalid_grammar") from error
        return found

    def strings_for(self, body: GenerationRequest) -> TokenStrings | None:
        """Returns the token strings if the request wants log-probabilities."""
        return None if body.best_tokens() is None else self._strings

    async def respond(
        self,
        request: Request,
        body: GenerationRequest,
        requests: list[PreparedRequest],
        replies: ReplyForm,
        output_parsers: Sequence[OutputParser | None] = (),
        shown: Collection[str] = (),
        echoes: Sequence[Echo] = (),
    ) -> Response:
        """Decodes the requests, and sends the answers as one body or as events.

        Args:
            echoes: the prompts, if answers begin with them.
        """
        silent = body.skip_special_tokens is not False
        everything = () if silent else tuple(special_tokens(self._engine.tokenizer).values())
        before = self._strings.before if replies.kind == "text" else ()  # a completion continues its prompt
        options = AnswerOptions(
            stops=body.stop or (),
            stop_ids=body.stop_token_ids or (),
            include_stop=bool(body.include_stop_str_in_output),
            least=body.min_tokens or 0,
            before=before,
            shown=everything or (shown if any(output_parsers) else ()),
            strings=replies.strings,
            ids=bool(body.return_token_ids),
            follow=body.follow,
            trace=self._draft_metrics != "none" and len(requests) == 1,
            prompt_alone=body.prompt_alone,
        )
        each_echo = [echo for echo in echoes for _ in range(body.answers)]
        answers = [
            Answer(self._engine.tokenizer, len(one.prompt_ids), options, parser, echo)
            for one, parser, echo in zip_longest(requests, output_parsers, each_echo)
        ]
        pieces = self._pieces(requests, answers)
        if body.stream:
            return EventResponse(self._events(pieces, answers, replies, body.continuous_usage))
        whole = await unless_disconnected(request, _join(pieces, len(answers)))
        if whole is None:
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        reasons = [answer.reason for answer in answers]

        def reply() -> Response:
            found = replies.whole(list(zip(whole, reasons, strict=True)), usage(answers, body.answers))
            found |= self._metrics_field(answers, replies)
            for choice, answer, one in zip(found.get("choices", ()), answers, requests, strict=False):
                ids, scores = one.prompt_ids, answer.prompt_logprobs
                choice["stop_reason"] = answer.stop_reason
                if body.prompt_logprobs is not None and scores is not None:
                    where = choice if replies.kind == "text" else found
                    where["prompt_logprobs"] = prompt_logprobs(self._strings, ids, scores, body.prompt_logprobs)
            return Response(msgspec.json.encode(found), media_type="application/json")

        # in a thread, so that other answers do not wait while a long prompt's log-probabilities are encoded
        return await asyncio.to_thread(reply) if body.best_prompt_tokens() is not None else reply()

    async def _pieces(self, requests: list[PreparedRequest], answers: list[Answer]) -> Pieces:
        """Yields the pieces of the answers as they arrive, and counts how each answer ends."""
        outcome = "disconnected"
        clocks, prompts = [Clock() for _ in requests], set[int]()
        self._metrics.waiting.inc(len(answers))
        self._open.add(len(answers))
        late = None
        try:
            with self._engine.decode(requests) as responses:
                if self._timeout_s is not None:
                    late = asyncio.get_running_loop().call_later(self._timeout_s, responses.put, LateError())
                waiting: dict[int, list[Piece]] = {}  # pieces that arrive while the client lags are sent as one
                async for index, progress in responses:
                    answer = answers[index]
                    if id(requests[index].prompt_ids) not in prompts:  # all answers to a prompt share its list
                        prompts.add(id(requests[index].prompt_ids))
                        self._metrics.prompt(answer.prompt_tokens)
                    before = answer.completion_tokens
                    waiting.setdefault(index, []).append(answer.add(progress))
                    self._metrics.progress(clocks[index], progress.step, answer.completion_tokens - before)
                    if answer.finish_reason is not None and progress.finish_reason is None:  # a stop string
                        responses.cancel(index)
                    if responses.ready:
                        continue
                    for index, pieces in waiting.items():
                        if piece := pieces[0] if len(pieces) == 1 else Piece.joined(pieces):
                            yield index, piece
                        if answers[index].finish_reason is not None:
                            yield index, None
                    waiting.clear()
        except Exception:
            outcome = "error"
            raise
        finally:
            if late is not None:
                late.cancel()
            self._open.add(-len(answers))
            self._metrics.waiting.dec(len(answers))
            for answer, clock in zip(answers, clocks, strict=True):
                self._metrics.ended(clock, answer.finish_reason or outcome)

    async def _events(
        self, pieces: Pieces, answers: list[Answer], replies: ReplyForm, continuous_usage: bool
    ) -> AsyncGenerator[bytes]:
        def event(chunk: dict[str, Any], index: int) -> bytes:
            return replies.event(chunk | {"usage": usage([answers[index]], 1)} if continuous_usage else chunk)

        try:
            for index, chunk in enumerate(replies.opening(len(answers))):
                yield event(chunk, index)
            async with aclosing(pieces):
                async for index, piece in pieces:
                    if piece is None:
                        chunks = replies.ended(index, answers[index].reason)
                        if isinstance(replies, Replies):
                            chunks[0]["choices"][0]["stop_reason"] = answers[index].stop_reason
                    else:
                        long = piece.echo is not None and piece.echo.logprobs is not None
                        make = functools.partial(replies.piece, index, piece)
                        chunks = await asyncio.to_thread(make) if long else make()
                    for chunk in chunks:
                        yield event(chunk, index)
            for chunk in replies.closing(usage(answers, replies.answers_per_prompt)):
                yield replies.event(chunk | self._metrics_field(answers, replies))
            if replies.end:
                yield replies.end
        except Exception as error:  # the status has been sent, so the error must be an event
            if not isinstance(error, EngineClosedError | LateError | RequestFailedError | UserError):
                log.exception("a streamed answer failed")
            for chunk in replies.failed(_as_api_error(error)):
                yield replies.event(chunk)

    def _metrics_field(self, answers: list[Answer], replies: ReplyForm) -> dict[str, Any]:
        """Returns vLLM's `metrics` of a reply: only for chats and completions with one answer, as in vLLM."""
        if self._draft_metrics == "none" or len(answers) > 1 or not isinstance(replies, Replies):
            return {}
        longest, detailed = self._engine.info.block_size - 1, self._draft_metrics == "detailed"
        return {"metrics": {"speculative_decoding": speculative_decoding(answers[0], longest, detailed)}}


class LateError(Exception):
    """Raised when an answer takes longer than the server allows."""


class EventResponse(StreamingResponse):
    """A streaming response that closes its generator, and so ends the decoding, when it ends for any reason."""

    def __init__(self, events: AsyncGenerator[bytes]) -> None:
        # otherwise nginx buffers events
        super().__init__(events, media_type="text/event-stream", headers={"X-Accel-Buffering": "no"})
        self._events = events

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._events.aclose()  # a cancelled response leaves its generator suspended


async def _join(pieces: Pieces, answers: int) -> list[Piece]:
    """Collects each answer in one piece."""
    parts: list[list[Piece]] = [[] for _ in range(answers)]
    async with aclosing(pieces):
        async for index, piece in pieces:
            if piece is not None:
                parts[index].append(piece)
    return [Piece.joined(each) for each in parts]


def _as_api_error(error: Exception) -> ApiError:
    if isinstance(error, ApiError):
        return error
    if isinstance(error, LateError):
        message = "the answer took longer than this server allows; request fewer tokens, or stream the answer"
        return ApiError(504, message, code="deadline_exceeded")
    if isinstance(error, RequestFailedError):
        return ApiError(500, str(error), code="request_failed")
    if isinstance(error, EngineClosedError):
        return ApiError(503, str(error), code=error.code)
    if isinstance(error, UserError):  # the engine cannot hold or compute the request
        return ApiError(400, str(error))
    return ApiError(500, "internal error; see the server's log", code="internal_error")


def _error_response(error: ApiError) -> Response:
    headers = {"WWW-Authenticate": "Bearer"} if error.status == 401 else {}
    if error.status == 429:
        headers["Retry-After"] = "1"
    if error.code == "internal_error":  # starlette raises it again, and uvicorn then closes the connection
        headers["Connection"] = "close"
    return JSONResponse(error.body(), error.status, headers)
