"""Decodes requests and sends their answers, for all endpoints."""

import asyncio
import functools
import logging
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from contextlib import aclosing
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec
from fastapi import Request
from fastapi.responses import Response, StreamingResponse

from dflash_toolkit.config import UserError
from dflash_toolkit.generation import PromptError
from dflash_toolkit.runtime import EngineClient, EngineClosedError, RequestFailedError
from dflash_toolkit.runtime.connection import CompileQueueError, PreparedRequest
from dflash_toolkit.runtime.request import Origin
from dflash_toolkit.sampling import BiasError, Grammar, GrammarError, SamplingParams

from .answer import Answer, AnswerOptions, Piece, speculative_decoding, usage
from .errors import LateError, as_api_error
from .logprobs import Echo, TokenStrings, prompt_logprobs
from .metrics import Metrics
from .parsing import OutputParser, Parsers
from .protocol import ApiError, GenerationRequest
from .replies import Replies, ReplyForm
from .state import ServerState
from .text import special_tokens
from .thread_pools import CLIENT_CLOSED_REQUEST, ThreadPools, unless_disconnected
from .tokenizing import Encoder
from .unknown import UnknownFields

if TYPE_CHECKING:
    from .config import ServeConfig

MAX_LOGPROBS_OF_ANSWERS = 1 << 23  # in several whole answers; they are in memory until the last one ends
MAX_PROMPT_LOGPROBS = 1 << 19  # in one request, those of the most probable tokens included
Batch: TypeAlias = list[tuple[int, Piece | None]]  # pieces with the index of their answer; None ends it
log = logging.getLogger("dflash_toolkit.serve")


class Service:
    """Decodes requests and sends their answers, for all routes."""

    def __init__(
        self,
        engine: EngineClient,
        config: "ServeConfig",
        state: ServerState,
        parsers: Parsers,
        defaults: Mapping[str, float],
        excluded: Collection[str],
    ) -> None:
        self.engine, self.names, self.state, self.parsers = engine, config.models, state, parsers
        self.context_limit = engine.info.capacity.context_limit
        self.unknown = UnknownFields(config.strict_parameters)
        self.pools, self.encoder = ThreadPools(self.unknown), Encoder(engine.tokenizer, self.context_limit)
        self.metrics = Metrics(self.names[0])
        self._config, self._defaults, self._excluded = config, defaults, frozenset(excluded)
        self._max_open = engine.info.max_num_seqs + config.max_queue
        self._open = state.answers  # running or queued
        self._strings = TokenStrings(engine.tokenizer)

    def check_model(self, name: str) -> None:
        """Raises ApiError (404) for a name that is not served."""
        if name not in self.names:
            message = f"the model {name!r} does not exist; this server serves {self.names[0]!r}"
            raise ApiError(404, message, param="model", code="model_not_found")

    async def requests(
        self,
        body: GenerationRequest,
        prompts: Sequence[list[int]],
        param: str,
        request: Request,
        grammar: tuple[str, Grammar] | None,
    ) -> list[PreparedRequest]:
        """Prepares one engine request for each answer to each prompt; each has its own seed.

        Args:
            param: the body's parameter that holds the prompt.
            request: it ends the preparation when its client leaves.
            grammar: the parameter that sets a grammar, and the grammar.

        Raises:
            ApiError: (400) it cannot be decoded; (429) a queue is full; (503) its grammar has waited too long.
        """
        if self._open.total + len(prompts) * body.answers > self._max_open:
            message = f"{self._open.total} answers are running or waiting; try again later"
            raise ApiError(429, message, code="queue_full")
        if grammar and body.ignore_eos:
            message = (
                f"`ignore_eos` cannot be combined with `{grammar[0]}`: its answer ends with a stop token; omit one"
            )
            raise ApiError(400, message, param="ignore_eos")
        if body.priority and self._config.scheduling_policy != "priority":  # else every client could overtake others
            message = f"`priority` is {body.priority}, but the server was not started with --scheduling-policy priority"
            raise ApiError(400, message + "; omit it", param="priority", code="unsupported_parameter")
        limit, key = self.context_limit, request.state.key
        store = not self._config.adaptation.adapt_opt_in if body.store is None else body.store
        store = store and key not in self._excluded
        # the number of a key has no colon, so two keys never have the same salt
        salt = f"{key}:{body.cache_salt or ''}" if self._config.prefix_cache_per_key else body.cache_salt or ""
        origin = Origin(key=key, priority=body.priority or 0, cache_salt=salt, store=store)
        least = body.least(body.length(limit), grammar and grammar[0])
        params = body.sampling(limit, self._defaults, grammar[1] if grammar else None)
        scores = sum(map(len, prompts)) * body.answers * (1 + (params.prompt_logprobs or 0))
        if params.prompt_logprobs is not None and scores > MAX_PROMPT_LOGPROBS:
            message = f"{scores} log-probabilities of prompts are requested; request at most {MAX_PROMPT_LOGPROBS}"
            raise ApiError(400, message, param="echo" if body.prompt_logprobs is None else "prompt_logprobs")
        answers = len(prompts) * body.answers
        scores = answers * params.max_tokens * (1 + (params.logprobs or 0))
        if params.logprobs is not None and answers > 1 and not body.stream and scores > MAX_LOGPROBS_OF_ANSWERS:
            message = f"{answers} answers of up to {params.max_tokens} tokens have {scores} log-probabilities"
            message += f"; request at most {MAX_LOGPROBS_OF_ANSWERS}, or set `stream: true`"
            raise ApiError(400, message, param="max_tokens")
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
                first = self.engine.request(ids, params, **origin)
            except UserError as error:
                at_fault = {PromptError: param, BiasError: "logit_bias"}.get(type(error))
                raise ApiError(400, str(error), param=at_fault, code=getattr(error, "code", None)) from error
            seeds = ((params.seed + i + 2**63) % 2**64 - 2**63 for i in range(1, body.answers))  # wrapped to 64 bits
            found += [first, *map(first.with_seed, seeds)]
        if grammar and not await unless_disconnected(request.receive, self._compiled(params, key, grammar[0])):
            raise ApiError(CLIENT_CLOSED_REQUEST, "the client closed the connection")
        return found

    async def _compiled(self, params: SamplingParams, key: str, param: str) -> bool:
        try:
            await self.engine.compile(params, key)
        except GrammarError as error:
            raise ApiError(400, str(error), param=param, code="invalid_grammar") from error
        except CompileQueueError as error:
            status, code = (429, "grammar_queue_full") if error.full else (503, "grammar_queue_timeout")
            raise ApiError(status, str(error), code=code) from error
        return True

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
        everything = () if silent else tuple(special_tokens(self.engine.tokenizer).values())
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
            trace=self._config.per_request_spec_decode_metrics != "none" and len(requests) == 1,
            prompt_alone=body.prompt_alone,
        )
        each_echo = [echo for echo in echoes for _ in range(body.answers)]
        answers = [
            Answer(self.engine.tokenizer, len(one.prompt_ids), options, parser, echo)
            for one, parser, echo in zip_longest(requests, output_parsers, each_echo)
        ]
        pieces = self._pieces(requests, answers)
        if body.stream:
            return EventResponse(self._events(pieces, answers, replies, body.continuous_usage))
        whole = await unless_disconnected(request.receive, _join(pieces, len(answers)))
        if whole is None:
            return Response(status_code=CLIENT_CLOSED_REQUEST)

        def reply() -> Response:
            found = replies.whole(list(zip(whole, answers, strict=True)), usage(answers, body.answers))
            found |= self._metrics_field(answers, replies)
            for choice, answer, one in zip(found.get("choices", ()), answers, requests, strict=False):
                ids, scores = one.prompt_ids, answer.prompt_logprobs
                if body.prompt_logprobs is not None and scores is not None:
                    where = choice if replies.kind == "text" else found
                    where["prompt_logprobs"] = prompt_logprobs(self._strings, ids, scores, body.prompt_logprobs)
            return Response(msgspec.json.encode(found), media_type="application/json")

        # in a thread, so that other answers do not wait while many log-probabilities are encoded
        scored = replies.strings is not None or body.best_prompt_tokens() is not None
        return await asyncio.to_thread(reply) if scored else reply()

    async def _pieces(self, requests: list[PreparedRequest], answers: list[Answer]) -> AsyncGenerator[Batch]:
        """Yields the pieces of the answers as they arrive, and counts how each answer ends.

        The first batch is empty: the engine has the requests.
        """
        outcome = "disconnected"
        clocks = [self.metrics.clock(len(one.prompt_ids), one.key) for one in requests]
        prompts = set[int]()
        self.metrics.waiting.inc(len(answers))
        self._open.add(len(answers))
        late = None
        try:
            with self.engine.decode(requests) as responses:
                if (limit_s := self._config.request_timeout) is not None:
                    late = asyncio.get_running_loop().call_later(limit_s, responses.put, LateError())
                yield []
                waiting: dict[int, list[Piece]] = {}  # pieces that arrive while the client lags are sent as one
                async for index, progress in responses:
                    answer = answers[index]
                    if id(requests[index].prompt_ids) not in prompts:  # all answers to a prompt share its list
                        prompts.add(id(requests[index].prompt_ids))
                        self.metrics.prompt(clocks[index], answer.prompt_tokens, progress.cached_tokens)
                    before = answer.completion_tokens
                    waiting.setdefault(index, []).append(answer.add(progress))
                    self.metrics.progress(clocks[index], progress.step, answer.completion_tokens - before)
                    if answer.finish_reason is not None and progress.finish_reason is None:  # a stop string
                        responses.cancel(index)
                    if responses.ready:
                        continue
                    batch: Batch = []
                    for index, pieces in waiting.items():
                        if piece := pieces[0] if len(pieces) == 1 else Piece.joined(pieces):
                            batch.append((index, piece))
                        if answers[index].finish_reason is not None:
                            batch.append((index, None))
                    waiting.clear()
                    if batch:
                        yield batch
        except Exception:
            outcome = "error"
            raise
        finally:
            if late is not None:
                late.cancel()
            self._open.add(-len(answers))
            self.metrics.waiting.dec(len(answers))
            for answer, clock in zip(answers, clocks, strict=True):
                self.metrics.ended(clock, answer.finish_reason or outcome)

    async def _events(
        self, pieces: AsyncGenerator[Batch], answers: list[Answer], replies: ReplyForm, continuous_usage: bool
    ) -> AsyncGenerator[bytes]:
        """Yields the events of a stream. Events that are ready together are sent together."""

        def event(chunk: dict[str, Any], index: int) -> bytes:
            return replies.event(chunk | {"usage": usage([answers[index]], 1)} if continuous_usage else chunk)

        ready = [event(chunk, index) for index, chunk in enumerate(replies.opening(len(answers)))]
        try:
            async with aclosing(pieces):
                async for batch in pieces:
                    for index, piece in batch:
                        if piece is None:
                            chunks = replies.ended(index, answers[index])
                        else:
                            long = piece.echo is not None and piece.echo.logprobs is not None
                            make = functools.partial(replies.piece, index, piece)
                            chunks = await asyncio.to_thread(make) if long else make()
                        ready += [event(chunk, index) for chunk in chunks]
                    if any(answer.finish_reason is None for answer in answers):
                        yield b"".join(ready)
                        ready.clear()
            for chunk in replies.closing(usage(answers, replies.answers_per_prompt)):
                ready.append(replies.event(chunk | self._metrics_field(answers, replies)))
            yield b"".join([*ready, replies.end])
        except Exception as error:  # the status has been sent, so the error must be an event
            if not isinstance(error, EngineClosedError | LateError | RequestFailedError | UserError):
                log.exception("a streamed answer failed")
            yield b"".join([*ready, *map(replies.event, replies.failed(as_api_error(error)))])

    def _metrics_field(self, answers: list[Answer], replies: ReplyForm) -> dict[str, Any]:
        """Returns vLLM's `metrics` of a reply: only for chats and completions with one answer, as in vLLM."""
        level = self._config.per_request_spec_decode_metrics
        if level == "none" or len(answers) > 1 or not isinstance(replies, Replies):
            return {}
        longest, detailed = self.engine.info.block_size - 1, level == "detailed"
        return {"metrics": {"speculative_decoding": speculative_decoding(answers[0], longest, detailed)}}


class EventResponse(StreamingResponse):
    """A streaming response that closes its generator, and so ends the decoding, when it ends for any reason.

    The status is sent after the generator's first item, with which the engine has got the requests.
    """

    def __init__(self, events: AsyncGenerator[bytes]) -> None:
        # otherwise nginx buffers events
        super().__init__(events, media_type="text/event-stream", headers={"X-Accel-Buffering": "no"})
        self._events = events

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await unless_disconnected(receive, self.stream_response(send))
        finally:
            await self._events.aclose()  # a cancelled response leaves its generator suspended

    async def stream_response(self, send: Any) -> None:
        body: bytes | None = await anext(self._events)
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        while body is not None:
            await send({"type": "http.response.body", "body": body, "more_body": True})
            body = await anext(self._events, None)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _join(pieces: AsyncGenerator[Batch], answers: int) -> list[Piece]:
    """Collects each answer in one piece."""
    parts: list[list[Piece]] = [[] for _ in range(answers)]
    async with aclosing(pieces):
        async for batch in pieces:
            for index, piece in batch:
                if piece is not None:
                    parts[index].append(piece)
    return [Piece.joined(each) for each in parts]
