"""The HTTP side: routes, who may use them, and every error in OpenAI's form."""

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
from .lanes import CLIENT_CLOSED_REQUEST, Lanes, unless_disconnected
from .logprobs import Echo, TokenStrings, prompt_logprobs
from .metrics import CONTENT_TYPE, Clock, Metrics, told
from .openapi import description
from .page import page
from .parsing import OutputParser, Parsers
from .protocol import (
    MOST_SCORES,
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
from .tokenizing import Encoder, tokenizing

STATS_S = 5.0
ENGINE_TIMEOUT_S = 30.0  # an engine that says nothing for so long is taken for hung
MAX_QUEUE = 1024  # answers
MakeForm: TypeAlias = Callable[[PreparedRequest, TokenStrings | None], ReplyForm]
Pieces: TypeAlias = AsyncGenerator[tuple[int, Piece | None]]  # each with its answer's number; None is the end of one
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
    """The application that serves `engine` as `model`.

    Args:
        api_keys: every route but /health asks for one of them.
        defaults: of sampling, where a request names none (`defaults.py`).
        tool_call_parser, reasoning_parser: as the options of `dflash-serve`.
        state: shared with the server.
        max_queue: answers that may wait for a place in the batch; more are refused (429).
        request_timeout_s: after so many seconds an answer is given up.
        root_path: where a proxy shows the routes.
        allowed_origins: pages of other sites that browsers may let ask.
        scheduling_policy: "priority" lets requests say what comes first; otherwise turns are fair over keys.
        aliases: more names for it.
        per_request_spec_decode_metrics: "summary" or "detailed" says in an answer what became of its drafts.
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
    lanes, encoder = Lanes(), Encoder(engine.tokenizer, limit)
    card = {
        "id": model,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "dflash-toolkit",
        "max_model_len": limit,
        "num_speculative_tokens": engine.info.block_size - 1,  # of the longest draft
        "draft_sample_method": engine.info.draft_sample_method,
    }

    async def authorise(request: Request) -> None:  # in a thread it would wait for the interpreter
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        number = matching(api_keys, key.strip() if scheme.lower() == "bearer" else "")
        if api_keys and number is None:
            raise ApiError(401, "wrong or missing API key", code="invalid_api_key")
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
        stats = None  # of an engine that does not answer the last ones are shown
        with contextlib.suppress(EngineClosedError, TimeoutError):
            stats = await asyncio.wait_for(engine.ping(), STATS_S)
        asked = [asyncio.wait_for(told(path), STATS_S) for path in shared.others]
        others = [one for one in await asyncio.gather(*asked, return_exceptions=True) if isinstance(one, bytes) and one]
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
        return await answer_chat(request, await lanes.parsed(request, ChatRequest.parse))

    async def answer_chat(request: Request, body: ChatRequest, form: MakeForm | None = None) -> Response:
        """Answer in another form than the route's own, if there is one."""
        service.check_model(body.model)
        tools = body.tools_for(parsers.tool_calls)
        told = body.variables(template_variables(engine.tokenizer, tools)) if body.tells_the_template else {}
        cut = body.cut(limit)

        def encoded() -> list[int]:
            return encoder.chat([message.plain() for message in body.messages], tools, told, cut)

        ids = await lanes.run(request, encoded)
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
            of_a_prompt=body.answers,
            unique=body.request_id or request.state.request_id,
            prompt_ids=shown,
        )
        if form is not None:
            replies = form(requests[0], strings)
        parallel, named = body.parallel_tool_calls is not False, isinstance(body.tool_choice, NamedTool)
        parse = [parsers.of_answer(start, tools, parallel, named) for _ in requests]
        return await service.respond(request, body, requests, replies, parse, parsers.markers(bool(tools)))

    @routes.post("/v1/completions")
    async def completions(request: Request) -> Response:
        body = await lanes.parsed(request, CompletionRequest.parse)
        service.check_model(body.model)
        decode, cut = engine.tokenizer.decode, body.cut(limit)

        def encoded(prompt: str | list[int]) -> list[int]:
            return encoder.text(prompt, cut=cut) if isinstance(prompt, str) else cut.of(prompt) if cut else prompt

        def text_of(prompt: str | list[int], ids: list[int]) -> str:
            whole = isinstance(prompt, str) and (cut is None or len(ids) < cut.most)
            return str(prompt) if whole else decode(ids, clean_up_tokenization_spaces=False)

        prompts = await lanes.run(request, lambda: list(map(encoded, body.prompt)))
        requests = await service.requests(body, prompts, "prompt", request.state.key, body.grammar())
        strings = service.strings_for(body)
        shown = (
            await lanes.run(request, lambda: list(map(text_of, body.prompt, prompts))) if strings or body.echo else []
        )
        echoes = [Echo(*prompt, body.logprobs) for prompt in zip(prompts, shown, strict=True)] if body.echo else []
        told = [one.prompt_ids for one in requests] if body.return_token_ids else ()
        lengths = list(map(len, shown))
        name = body.request_id or request.state.request_id
        replies = Replies("text", body.model, body.include_usage, strings, lengths, body.answers, name, prompt_ids=told)
        return await service.respond(request, body, requests, replies, echoes=echoes)

    routes.include_router(responses(answer_chat, lanes))
    routes.include_router(description([model, *aliases], bool(api_keys), root_path))
    routes.include_router(tokenizing(engine, service.check_model, lanes, encoder))

    async def refuse(request: Request, error: Any) -> Response:
        metrics.refused(error.status)
        return _error_response(error)

    async def no_such_route(request: Request, error: Any) -> Response:
        message = f"no such path: {request.url.path}"
        return await refuse(request, ApiError(404, message, code="not_found"))

    async def wrong_method(request: Request, error: Any) -> Response:
        message = f"{request.method} is not allowed for {request.url.path}"
        response = await refuse(request, ApiError(405, message, code="method_not_allowed"))
        response.headers.update(error.headers or {})  # Allow
        return response

    async def failed(request: Request, error: Exception) -> Response:
        return _error_response(_as_api_error(error))

    # no schema routes of its own, so that every path that is not listed above is a 404 in OpenAI's form
    app = FastAPI(openapi_url=None, redirect_slashes=False)
    app.root_path = root_path  # uvicorn's would stand before every path, which a proxy may have left there already
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
    """What both endpoints do once they have token ids."""

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
        self._most_open = engine.info.max_num_seqs + max_queue
        self._timeout_s, self._priorities, self._draft_metrics = request_timeout_s, priorities, draft_metrics
        self._open = opened  # answers, running or queued
        self._strings = TokenStrings(engine.tokenizer)

    def check_model(self, name: str) -> None:
        """Raises ApiError (404) for a name that is not served."""
        if name not in self._names:
            message = f"the model {name!r} does not exist; this server has {self._model!r}"
            raise ApiError(404, message, param="model", code="model_not_found")

    async def requests(
        self,
        body: GenerationRequest,
        prompts: Sequence[list[int]],
        param: str,
        key: str,
        grammar: tuple[str, Grammar] | None,
    ) -> list[PreparedRequest]:
        """Every prompt once for each of its answers, of which each has a seed of its own.

        Args:
            param: what the client calls the prompt.
            key: whose request it is.
            grammar: what asks for one, and the grammar.

        Raises:
            ApiError: (400) it cannot be decoded; (429) too many answers wait already.
        """
        if self._open.total + len(prompts) * body.answers > self._most_open:
            raise ApiError(429, f"{self._open.total} answers are under way or wait; try again later", code="queue_full")
        if grammar and body.ignore_eos:
            raise ignores_its_end(grammar[0])
        if body.priority and not self._priorities:  # whoever likes would go before all others
            message = "`priority` counts only where the server was started with --scheduling-policy priority"
            raise ApiError(400, message, param="priority", code="unsupported_parameter")
        limit, eos = self._engine.info.capacity.context_limit, self._engine.tokenizer.eos_token_id
        least = body.least(body.length(limit), grammar and grammar[0])
        params = body.sampling(limit, self._defaults, eos, grammar[1] if grammar else None)
        scores = sum(map(len, prompts)) * body.answers * (1 + (params.prompt_logprobs or 0))
        if params.prompt_logprobs is not None and scores > MOST_SCORES:
            message = f"{scores} log-probabilities of prompts are asked for; ask for {MOST_SCORES} at most at a time"
            raise ApiError(400, message, param="echo" if body.prompt_logprobs is None else "prompt_logprobs")
        found = []
        for ids in prompts:
            if (asked := body.asked_tokens) is not None and len(ids) < limit < len(ids) + asked:
                raise ApiError(
                    400,
                    f"{asked} tokens are asked for, and the prompt leaves {limit - len(ids)} of a context of {limit}; "
                    f"ask for fewer or shorten the prompt",
                    param="max_completion_tokens" if "max_completion_tokens" in body.model_fields_set else "max_tokens",
                    code="context_length_exceeded",
                )
            if len(ids) < limit < len(ids) + least:
                message = f"min_tokens is {least}, and the prompt leaves {limit - len(ids)} of a context of {limit}"
                raise ApiError(400, message, param="min_tokens", code="context_length_exceeded")
            try:  # before a stream begins, whose status would be sent
                first = self._engine.request(ids, params, key, body.priority or 0)
            except UserError as error:
                at_fault = {PromptError: param, BiasError: "logit_bias"}.get(type(error))
                raise ApiError(400, str(error), param=at_fault, code=getattr(error, "code", None)) from error
            seeds = ((params.seed + i + 2**63) % 2**64 - 2**63 for i in range(1, body.answers))  # in 64 bits
            found += [first, *map(first.with_seed, seeds)]
        try:
            await self._engine.compile(params)
        except GrammarError as error:
            raise ApiError(400, str(error), param=grammar and grammar[0], code="invalid_grammar") from error
        return found

    def strings_for(self, body: GenerationRequest) -> TokenStrings | None:
        """The token strings, if the request asks for log-probabilities."""
        return None if body.best_tokens() is None else self._strings

    async def respond(
        self,
        request: Request,
        body: GenerationRequest,
        asked: list[PreparedRequest],
        replies: ReplyForm,
        parse: Sequence[OutputParser | None] = (),
        shown: Collection[str] = (),
        echoes: Sequence[Echo] = (),
    ) -> Response:
        """Decode what is asked for, and send the answers, at once or as events.

        Args:
            echoes: the prompts, if they are given back.
        """
        silent = body.skip_special_tokens is not False
        everything = () if silent else tuple(special_tokens(self._engine.tokenizer).values())
        before = self._strings.before if replies.kind == "text" else ()  # a completion goes on, a chat starts
        options = AnswerOptions(
            stops=body.stop or (),
            stop_ids=body.stop_token_ids or (),
            include_stop=bool(body.include_stop_str_in_output),
            least=body.min_tokens or 0,
            before=before,
            shown=everything or (shown if any(parse) else ()),
            strings=replies.strings,
            ids=bool(body.return_token_ids),
            follow=body.follow,
            trace=self._draft_metrics != "none" and len(asked) == 1,
            prompt_alone=body.prompt_alone,
        )
        answers = [
            Answer(self._engine.tokenizer, len(one.prompt_ids), options, parser, echo)
            for one, parser, echo in zip_longest(asked, parse, [echo for echo in echoes for _ in range(body.answers)])
        ]
        pieces = self._pieces(asked, answers)
        if body.stream:
            return EventResponse(self._events(pieces, answers, replies, body.continuous_usage))
        whole = await unless_disconnected(request, _join(pieces, len(answers)))
        if whole is None:
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        reasons = [answer.reason for answer in answers]

        def reply() -> Response:
            found = replies.whole(list(zip(whole, reasons, strict=True)), usage(answers, body.answers))
            found |= self._beside_usage(answers, replies)
            for choice, answer, one in zip(found.get("choices", ()), answers, asked, strict=False):
                ids, scores = one.prompt_ids, answer.prompt_logprobs
                choice["stop_reason"] = answer.stop_reason
                if body.prompt_logprobs is not None and scores is not None:
                    where = choice if replies.kind == "text" else found
                    where["prompt_logprobs"] = prompt_logprobs(self._strings, ids, scores, body.prompt_logprobs)
            return Response(msgspec.json.encode(found), media_type="application/json")

        # a long prompt's log-probabilities are not written while other answers wait
        return await asyncio.to_thread(reply) if body.best_prompt_tokens() is not None else reply()

    async def _pieces(self, asked: list[PreparedRequest], answers: list[Answer]) -> Pieces:
        """The answers as they come, counted however they end."""
        outcome = "disconnected"
        clocks, prompts = [Clock() for _ in asked], set[int]()
        self._metrics.waiting.inc(len(answers))
        self._open.add(len(answers))
        late = None
        try:
            with self._engine.decode(asked) as responses:
                if self._timeout_s is not None:
                    late = asyncio.get_running_loop().call_later(self._timeout_s, responses.put, LateError())
                waiting: dict[int, list[Piece]] = {}  # what came while the client or this process lagged goes as one
                async for index, progress in responses:
                    answer = answers[index]
                    if id(asked[index].prompt_ids) not in prompts:  # one list for all answers to it
                        prompts.add(id(asked[index].prompt_ids))
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
            for chunk in replies.closing(usage(answers, replies.of_a_prompt)):
                yield replies.event(chunk | self._beside_usage(answers, replies))
            if replies.end:
                yield replies.end
        except Exception as error:  # the status has been sent, so the error can only be an event
            if not isinstance(error, EngineClosedError | LateError | RequestFailedError | UserError):
                log.exception("a streamed answer failed")
            for chunk in replies.failed(_as_api_error(error)):
                yield replies.event(chunk)

    def _beside_usage(self, answers: list[Answer], replies: ReplyForm) -> dict[str, Any]:
        """As in vLLM, of a request with one answer and in the two routes only."""
        if self._draft_metrics == "none" or len(answers) > 1 or not isinstance(replies, Replies):
            return {}
        longest, detailed = self._engine.info.block_size - 1, self._draft_metrics == "detailed"
        return {"metrics": {"speculative_decoding": speculative_decoding(answers[0], longest, detailed)}}


class LateError(Exception):
    """An answer took longer than the server allows."""


class EventResponse(StreamingResponse):
    """A streaming response that ends its generator, and so the decoding, when it is over for any reason."""

    def __init__(self, events: AsyncGenerator[bytes]) -> None:
        # nginx would hold events back until its buffer is full
        super().__init__(events, media_type="text/event-stream", headers={"X-Accel-Buffering": "no"})
        self._events = events

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._events.aclose()  # a response cancelled while it sends leaves its generator suspended


async def _join(pieces: Pieces, answers: int) -> list[Piece]:
    """Each answer in one piece."""
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
        return ApiError(504, "the answer took longer than this server allows", code="deadline_exceeded")
    if isinstance(error, RequestFailedError):
        return ApiError(500, str(error), code="request_failed")
    if isinstance(error, EngineClosedError):
        return ApiError(503, str(error), code=error.code)
    if isinstance(error, UserError):  # a request that this engine cannot hold or compute
        return ApiError(400, str(error))
    return ApiError(500, "internal error; see the server's log", code="internal_error")


def _error_response(error: ApiError) -> Response:
    headers = {"WWW-Authenticate": "Bearer"} if error.status == 401 else {}
    if error.status == 429:
        headers["Retry-After"] = "1"
    if error.code == "internal_error":  # starlette raises it again, whereupon uvicorn closes the connection
        headers["Connection"] = "close"
    return JSONResponse(error.body(), error.status, headers)
