"""Responses from any OpenAI-compatible server: /v1/completions with token ids, so that only we apply the template.

A server without that API, or with text prompts only, gets /v1/chat/completions (`chat_endpoint.py`).
"""

import queue
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from dflash_toolkit.config import UserError
from dflash_toolkit.evaluation.measure.decoders import Chat, Response
from dflash_toolkit.generation import FinishReason, Generation
from dflash_toolkit.models.restrictions import server_bias
from dflash_toolkit.openai_http import (
    MissingError,
    RefusedError,
    TryAgainError,
    base_url,
    error_message,
    find_models,
    request_json,
)
from dflash_toolkit.sampling import SamplingParams

from .chat_endpoint import chat_fields, is_our_prompt, plain_text, rendered_message

LONGEST_PAUSE_S = 60.0
BROKEN_OFF = (None, "abort", "aborted", "cancelled", "error")  # finish_reason of an incomplete response
PATHS = {"completions": "completions", "chat": "chat/completions"}  # after /v1/
EXTRAS: dict[str, Any] = {  # unknown to OpenAI's own API -> the value that can be omitted
    "return_token_ids": True, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "chat_template_kwargs": None,
}  # fmt: skip
OPTIONS = {"top_k": "top_k", "min_p": "min_p", "chat_template_kwargs": "thinking", "top_p": "top_p"}
RENAMED = "max_completion_tokens"  # name of max_tokens in the newest servers
LOST = "\ufffd"  # replaces undecodable bytes, which are lost


@dataclass(frozen=True, slots=True)
class _Request:
    """Arguments of `EndpointBackend.ask`."""

    key: int
    prompt: list[int]
    params: SamplingParams
    chat: Chat | None


@dataclass(slots=True)
class _Server:
    """A server, and what its replies have shown."""

    url: str
    model: str
    api: str | None  # a key of `PATHS`, None if not known yet
    forms: dict[str, int] = field(default_factory=dict)  # by API, the first of `_forms` that was accepted
    counts: bool = False  # whether replies have token ids or counts
    ends: Counter[bool] = field(
        default_factory=Counter
    )  # responses by whether the server's count includes their stop token
    agrees: bool = False  # whether it rendered a chat to our prompt


class EndpointBackend:
    """Sends each request separately, from many threads, to one or more servers of the same target.

    Token ids of a server that returns them (`return_token_ids`: vLLM, SGLang, dflash-serve) are trusted. For other
    servers the text is tokenised again, and counts only if it has as many tokens as the server reports. If a server
    refuses its first request, optional fields are dropped as far as the sampler and the thinking mode allow. If it
    refuses the first request to /v1/completions, or lacks that API, /v1/chat/completions is used from then on, where
    the target's own template turns reasoning and tool calls into text.

    Args:
        urls: with or without a trailing /v1; requests rotate over them.
        vocab_size: of the target; a larger token id shows another model.
        model: name of the model on the server; None is the only one.
        stop_ids: of the target; the first is used if a server does not report the stop token.
        api: auto, completions or chat; auto tries once per server and prints its choice.
        thinking: the mode in which prompts were rendered, for servers that render them too.
        concurrency: concurrent requests over all servers.
        timeout_s: for one response.
        retries: attempts after a temporary error, with growing pauses.
        pause_s: pause before the first retry.

    Attributes:
        models: the model's name on each server.

    Raises:
        UserError: a server does not respond, or has no such model.
    """

    def __init__(
        self,
        urls: Sequence[str],
        tokenizer: Any,
        stop_ids: Sequence[int],
        *,
        vocab_size: int,
        model: str | None = None,
        api: str = "auto",
        thinking: bool | None = None,
        concurrency: int = 64,
        timeout_s: float = 600.0,
        retries: int = 6,
        pause_s: float = 1.0,
    ) -> None:
        self.width = concurrency
        self._tokenizer, self._stop_ids = tokenizer, tuple(stop_ids)
        self._vocab_size, self._thinking = vocab_size, thinking
        self._timeout_s, self._retries, self._pause_s = timeout_s, retries, pause_s
        self.models = find_models(urls, model, timeout_s)
        known = None if api == "auto" else api
        self._servers = [_Server(base_url(url), name, known) for url, name in zip(urls, self.models, strict=True)]
        self._settling = threading.Lock()
        self._closed = threading.Event()
        self._submitted: queue.SimpleQueue[_Request | None] = queue.SimpleQueue()
        self._responses: queue.SimpleQueue[Response | Exception] = queue.SimpleQueue()
        for i in range(concurrency):  # daemons: an interrupted run does not wait for responses
            server = self._servers[i % len(urls)]
            threading.Thread(target=self._work, args=(server,), name=f"ask-{i}", daemon=True).start()

    def submit(self, key: int, prompt: list[int], params: SamplingParams, chat: Chat | None = None) -> None:
        self._submitted.put(_Request(key, prompt, params, chat))

    def wait(self) -> Response:
        answer = self._responses.get()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close(self) -> None:
        self._closed.set()
        for _ in range(self.width):
            self._submitted.put(None)

    # ---- in the threads: requests ------------------------------------------------------------------------

    def _work(self, server: _Server) -> None:
        while (request := self._submitted.get()) is not None and not self._closed.is_set():
            try:
                self._responses.put(self._response(server, request, self._persist(server, request)))
            except UserError as error:
                self._responses.put(error)
            except Exception as error:
                path = PATHS[server.api or "completions"]
                self._responses.put(UserError(f"{server.url}: not the reply of /v1/{path} ({error!r})"))

    def _persist(self, server: _Server, request: _Request) -> dict[str, Any]:
        for attempt in range(self._retries + 1):
            try:
                return self._reply(server, request)
            except TryAgainError as error:
                reason = str(error)
                pause = min(self._pause_s * 2**attempt, LONGEST_PAUSE_S)
                if attempt < self._retries and self._closed.wait(max(pause, min(error.after_s, LONGEST_PAUSE_S))):
                    break
        untried = request.chat is not None and server.api is None
        raise UserError(
            f"{server.url}: no response after {self._retries + 1} attempts ({reason}); earlier responses are kept, run "
            f"the same command again to resume" + (", with server.api=chat if it only has that API" if untried else "")
        )

    def _reply(self, server: _Server, request: _Request) -> dict[str, Any]:
        """Returns the server's reply through the API that it has."""
        api = server.api or ("completions" if request.chat is None else None)
        if api is not None:
            return self._post(server, api, request)
        try:
            reply = self._post(server, "completions", request)
        except (RefusedError, MissingError) as error:
            try:
                reply = self._post(server, "chat", request)
            except (RefusedError, MissingError) as other:
                raise UserError(f"{error}; {other}") from error
            self._choose_api(server, "chat", f", for {error}")
        else:
            self._choose_api(server, "completions")
        return reply

    def _choose_api(self, server: _Server, api: str, why: str = "") -> None:
        with self._settling:  # several threads find out at once
            if server.api is None:
                server.api = api
                print(f"asking {server.url}/{PATHS[api]}{why}", file=sys.stderr)

    def _post(self, server: _Server, api: str, request: _Request) -> dict[str, Any]:
        url = f"{server.url}/{PATHS[api]}"
        forms = _forms({"model": server.model, **self._body(api, request)})
        refused: RefusedError | None = None
        known = server.forms.get(api)
        # a later refusal of one request must not change the form of all others: their responses would differ
        for number in range(len(forms)) if known is None else (known,):
            try:
                reply = _whole(request_json(url, self._timeout_s, forms[number]))
            except RefusedError as error:
                if (
                    refused is None or RENAMED not in forms[number]
                ):  # an older server's refusal of that name shows nothing
                    refused = error
            except (LookupError, TypeError, AttributeError) as error:
                raise UserError(f"{server.url}: not the reply of /v1/{PATHS[api]} ({error!r})") from error
            else:
                with self._settling:
                    if api not in server.forms and number:
                        less = ", ".join(name for name in forms[0] if name not in {*forms[number], "max_tokens"})
                        print(f"asking {url} without {less}, for {refused}", file=sys.stderr)
                    server.forms.setdefault(api, number)
                return reply
        needed = ", ".join(f"{name} ({option} needs it)" for name, option in OPTIONS.items() if name in forms[-1])
        raise RefusedError(f"{refused}; not tried without {needed}" if needed else str(refused))

    def _body(self, api: str, request: _Request) -> dict[str, Any]:
        params = request.params
        if api == "chat":
            assert request.chat is not None, "request without a chat"
            prompt = chat_fields(request.chat, self._thinking)
        else:
            prompt = {"prompt": request.prompt}
        return prompt | {
            "max_tokens": params.max_tokens,
            "temperature": params.temperature,
            "seed": params.seed,
            "stream": False,
            "return_token_ids": True,
            # sent even at their defaults: some servers fill in the checkpoint's generation_config
            "top_p": params.top_p,
            "top_k": params.top_k or -1,
            "min_p": params.min_p,
            "repetition_penalty": 1.0,
            **({"logit_bias": bias} if (bias := server_bias(params)) else {}),
        }

    # ---- in the threads: replies -------------------------------------------------------------------------

    def _response(self, server: _Server, request: _Request, reply: dict[str, Any]) -> Response:
        choice, usage = reply["choices"][0], reply.get("usage") or {}
        if choice["finish_reason"] == "content_filter":  # a retry would give the same
            return Response(request.key, Generation(finish_reason="stop"), "stopped by a content filter")
        reason: FinishReason = "length" if choice["finish_reason"] == "length" else "stop"
        if "message" in choice:
            theirs = choice.get("prompt_token_ids") or reply.get("prompt_token_ids") or usage.get("prompt_tokens")
            if theirs and is_our_prompt(server.url, theirs, request.prompt, agreed=server.agrees):
                server.agrees = True
            elif theirs:
                return Response(request.key, Generation(finish_reason=reason), "to another prompt")
        tokens, count = choice.get("token_ids"), usage.get("completion_tokens")
        server.counts |= tokens is not None or count is not None
        if not server.counts:
            raise UserError(
                f"{server.url}: the reply has neither token_ids nor usage.completion_tokens, so its text cannot be "
                f"checked; use a server that returns one of them"
            )
        if tokens is None:
            tokenizations = self._tokenizations(request, choice)
            counted = (self._counted(server, each, reason, count) for each in tokenizations)
            tokens = next(filter(None, counted), [])
        else:
            tokens = self._known(server, [int(token) for token in tokens])
            if reason == "stop" and (not tokens or tokens[-1] not in self._stop_ids):
                tokens += self._stop_ids[:1]  # the server omits it
        limit = request.params.max_tokens
        if len(tokens) > limit:  # the server ignores the limit, or names it differently
            tokens, reason = tokens[:limit], "length"
        return Response(request.key, Generation(tokens, finish_reason=reason))

    def _known(self, server: _Server, tokens: list[int]) -> list[int]:
        """Returns the tokens if all are the target's."""
        strange = next((token for token in tokens if not 0 <= token < self._vocab_size), None)
        if strange is not None:
            raise UserError(
                f"{server.url}: {server.model} answered with token {strange}, outside the target's vocabulary of "
                f"{self._vocab_size}; serve the target itself"
            )
        return tokens

    def _tokenizations(self, request: _Request, choice: dict[str, Any]) -> Iterator[list[int]]:
        """Yields the token sequences that a text may have had, likeliest first, with and without a stop token."""
        message = choice.get("message")
        text = choice["text"] if message is None else plain_text(message)
        if text is not None:
            yield list(self._tokenizer(text, add_special_tokens=False).input_ids)
        if message is not None and request.chat is not None:
            rendered = rendered_message(
                message, request.prompt, request.chat, self._tokenizer, self._stop_ids, self._thinking
            )
            if rendered is not None:
                yield rendered

    def _counted(self, server: _Server, tokens: list[int], reason: str, count: int | None) -> list[int]:
        """Returns the tokens of a response; none if they cannot be the `count` that the server wrote."""
        end = tokens[-1:] if tokens and tokens[-1] in self._stop_ids else []
        spoken = tokens[: len(tokens) - len(end)]
        if LOST in self._tokenizer.decode(spoken):
            return []
        if reason != "stop":
            return spoken if count == len(spoken) else []
        ended = spoken + (end or list(self._stop_ids[:1]))
        if count not in (len(spoken), len(ended)):
            return []
        # some servers count the stop token; one token more or less than this server's habit is another text
        with_end = count == len(ended)
        server.ends[with_end] += 1
        return ended if server.ends[with_end] >= server.ends[not with_end] else []


def _forms(body: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns a request in forms with fewer and fewer fields or values, for servers that know fewer than vLLM does."""
    unnamed = {name: value for name, value in body.items() if name != "return_token_ids"}
    openai = {name: value for name, value in body.items() if name not in EXTRAS or value != EXTRAS[name]}
    bare = {name: value for name, value in openai.items() if (name, value) != ("top_p", 1.0) and name != "seed"}
    if "messages" not in body:
        return [body, unnamed, openai, bare]
    newer, newer_bare = (
        {RENAMED if name == "max_tokens" else name: value for name, value in form.items()} for form in (openai, bare)
    )
    return [body, unnamed, openai, newer, bare, newer_bare]


def _whole(reply: dict[str, Any]) -> dict[str, Any]:
    """Returns a completion unless it failed or broke off, which proxies and stopping servers report with status 200."""
    if not reply.get("choices") and (said := error_message(reply)):
        raise TryAgainError(said)
    reason = reply["choices"][0]["finish_reason"]
    if reason in BROKEN_OFF:
        raise TryAgainError(f"the response broke off, finish_reason is {reason!r}")
    return reply
