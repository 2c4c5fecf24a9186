"""Answers from any OpenAI-compatible server: /v1/completions with token ids, so that only we apply the template.

A server without that, or whose prompts are text, is asked through /v1/chat/completions (`chat_endpoint.py`).
"""

import contextlib
import http.client
import json
import os
import queue
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any

from dflash_toolkit.config import UserError
from dflash_toolkit.decode import SamplingParams

from .backends import Answer, Chat
from .chat_endpoint import chat_fields, check_prompt, plain_text, rendered_message

LONGEST_PAUSE_S = 60.0
BROKEN_OFF = (None, "abort", "aborted", "cancelled", "error", "content_filter")  # finish_reason of half an answer
TRANSIENT = (408, 409, 425, 429, 500, 502, 503, 504, *range(520, 531))  # the last of proxies
REFUSED = (400, 422)
MISSING = (404, 405, 501)
APIS = ("auto", "completions", "chat")
PATHS = {"completions": "completions", "chat": "chat/completions"}  # behind /v1/
EXTRAS: dict[str, Any] = {  # which OpenAI's own API does not know -> the value that can be left out
    "return_token_ids": True, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "chat_template_kwargs": None,
}  # fmt: skip
RENAMED = 2  # of `_forms`, the one with max_completion_tokens
KNOBS = {"top_k": "sampler.top_k", "min_p": "sampler.min_p", "chat_template_kwargs": "sampler.thinking"}
LOST = "\ufffd"  # stands for bytes that are no character: which they were is not known


class _TryAgainError(Exception):
    """The server may answer later."""

    def __init__(self, reason: str, after_s: float = 0.0) -> None:
        super().__init__(reason)
        self.after_s = after_s


class _RefusedError(UserError):
    """The server takes offence at something in the request."""


class _MissingError(UserError):
    """The server has no such API."""


@dataclass(frozen=True, slots=True)
class _Question:
    """What `EndpointBackend.ask` was given."""

    key: int
    prompt: list[int]
    params: SamplingParams
    chat: Chat | None


class EndpointBackend:
    """Asks one or more servers of the same target, each question on its own, from so many threads.

    A server that returns token ids (`return_token_ids`: vLLM, SGLang, dflash-serve) is taken at its word. From any
    other the text is tokenised again, and counts only if that gives as many tokens as the server says it wrote. A
    server that refuses a request is asked without what only these know, unless the sampler or the thinking mode needs
    it. One that refuses the first through /v1/completions, or has no such thing, is asked through
    /v1/chat/completions from then on, where reasoning and tool calls become text by the target's own template.

    Args:
        urls: with or without the closing /v1; questions go round.
        vocab_size: of the target; an answer with a token beyond it is another model's.
        model: the name to ask for; None takes the only one that a server has.
        api: one of `APIS`; auto tries, once for each server, and says what it found.
        thinking: the mode that prompts were rendered in, for servers that render them too.
        concurrency: questions asked at a time, over all servers.
        timeout_s: for one answer.
        retries: how often a question is asked again after an error that may pass, with growing pauses.
        pause_s: before the first of them.

    Attributes:
        models: the name that each server is asked for.

    Raises:
        UserError: a server does not answer, or has no such model.
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
        self._urls = [base_url(url) for url in urls]
        self._tokenizer, self._stop_ids = tokenizer, tuple(stop_ids)
        self._vocab_size, self._thinking = vocab_size, thinking
        self._timeout_s, self._retries, self._pause_s = timeout_s, retries, pause_s
        self._apis = {} if api == "auto" else dict.fromkeys(self._urls, api)  # by server, once it is known
        self._known_form: dict[str, int] = {}  # by address, the first of `_forms` that was not refused
        self._settling = threading.Lock()
        self._closed = threading.Event()
        self._asked: queue.SimpleQueue[_Question | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[Answer | Exception] = queue.SimpleQueue()
        self.models = find_models(urls, model, timeout_s)
        for i in range(concurrency):  # daemons: an interrupted run does not wait for answers
            threading.Thread(target=self._work, args=(i % len(self._urls),), name=f"ask-{i}", daemon=True).start()

    def ask(self, key: int, prompt: list[int], params: SamplingParams, chat: Chat | None = None) -> None:
        self._asked.put(_Question(key, prompt, params, chat))

    def wait(self) -> Answer:
        answer = self._answers.get()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close(self) -> None:
        self._closed.set()
        for _ in range(self.width):
            self._asked.put(None)

    # ---- in the threads ----------------------------------------------------------------------------------

    def _work(self, server: int) -> None:
        url = self._urls[server]
        while (question := self._asked.get()) is not None and not self._closed.is_set():
            try:
                self._answers.put(self._known(server, self._answer(url, question, self._persist(server, question))))
            except UserError as error:
                self._answers.put(error)
            except Exception as error:
                path = PATHS[self._apis.get(url, "completions")]
                self._answers.put(UserError(f"{url}: not the reply of /v1/{path} ({error!r})"))

    def _persist(self, server: int, question: _Question) -> dict[str, Any]:
        for attempt in range(self._retries + 1):
            try:
                return _whole(self._reply(server, question))
            except _TryAgainError as error:
                reason = str(error)
                pause = min(self._pause_s * 2**attempt, LONGEST_PAUSE_S)
                if attempt < self._retries and self._closed.wait(max(pause, min(error.after_s, LONGEST_PAUSE_S))):
                    break
        raise UserError(
            f"{self._urls[server]}: no answer after {self._retries + 1} attempts ({reason}); "
            f"what was answered is kept, run the same command again to go on"
        )

    def _reply(self, server: int, question: _Question) -> dict[str, Any]:
        """What the server says, through the API that it has."""
        url = self._urls[server]
        api = self._apis.get(url) or ("completions" if question.chat is None else None)
        if api is not None:
            return self._post(server, api, question)
        try:
            reply = self._post(server, "completions", question)
        except (_RefusedError, _MissingError) as error:
            try:
                reply = self._post(server, "chat", question)
            except (_RefusedError, _MissingError) as other:
                raise UserError(f"{error}; {other}") from error
            self._settle(url, "chat", f", for {error}")
        else:
            self._settle(url, "completions")
        return reply

    def _settle(self, url: str, api: str, why: str = "") -> None:
        with self._settling:  # several threads find out at once
            if url not in self._apis:
                self._apis[url] = api
                print(f"asking {url}/{PATHS[api]}{why}", file=sys.stderr)

    def _post(self, server: int, api: str, question: _Question) -> dict[str, Any]:
        url = f"{self._urls[server]}/{PATHS[api]}"
        forms = _forms({"model": self.models[server], **self._body(api, question)})
        refused: _RefusedError | None = None
        known = self._known_form.get(url)
        # what refuses one question later is no reason to ask all others with less: their answers would be other ones
        for number in range(len(forms)) if known is None else (known,):
            try:
                reply = _request(url, self._timeout_s, forms[number])
            except _RefusedError as error:
                if refused is None or number < RENAMED:  # an older server's word on the newer name tells nothing
                    refused = error
            else:
                self._known_form.setdefault(url, number)
                return reply
        needed = ", ".join(f"{name} ({knob} needs it)" for name, knob in KNOBS.items() if name in forms[-1])
        raise _RefusedError(f"{refused}; not tried without {needed}" if needed else str(refused))

    def _body(self, api: str, question: _Question) -> dict[str, Any]:
        params = question.params
        if api == "chat":
            assert question.chat is not None, "asked without a chat"
            prompt = chat_fields(question.chat, self._thinking)
        else:
            prompt = {"prompt": question.prompt}
        return prompt | {
            "max_tokens": params.max_new_tokens,
            "temperature": params.temperature,
            "seed": params.seed,
            "stream": False,
            "return_token_ids": True,
            # said even where they ask for nothing: some servers fill in the checkpoint's generation_config
            "top_p": params.top_p,
            "top_k": params.top_k or -1,
            "min_p": params.min_p,
            "repetition_penalty": 1.0,
        }

    def _answer(self, url: str, question: _Question, reply: dict[str, Any]) -> Answer:
        choice, usage = reply["choices"][0], reply.get("usage") or {}
        reason = "length" if choice["finish_reason"] == "length" else "stop"
        if "message" in choice:
            check_prompt(url, usage.get("prompt_tokens"), len(question.prompt))
        tokens, limit = choice.get("token_ids"), question.params.max_new_tokens
        if tokens is None:
            spellings = self._spellings(question, choice)
            counted = (self._counted(spelling, reason, usage.get("completion_tokens")) for spelling in spellings)
            tokens = next(filter(None, counted), [])
        else:
            tokens = [int(token) for token in tokens]
            if reason == "stop" and (not tokens or tokens[-1] not in self._stop_ids):
                tokens += self._stop_ids[:1]  # left out by the server
        if len(tokens) > limit:  # the server does not heed the limit, or knows it by another name
            tokens, reason = tokens[:limit], "length"
        return Answer(question.key, tokens, reason)

    def _known(self, server: int, answer: Answer) -> Answer:
        """The answer, if all of its tokens are the target's."""
        strange = next((token for token in answer.tokens if not 0 <= token < self._vocab_size), None)
        if strange is not None:
            raise UserError(
                f"{self._urls[server]}: {self.models[server]} answered with token {strange}, outside the target's "
                f"vocabulary of {self._vocab_size}; serve the target itself"
            )
        return answer

    def _spellings(self, question: _Question, choice: dict[str, Any]) -> Iterator[list[int]]:
        """The tokens that a text may have been, likeliest first, with a stop token or without."""
        message = choice.get("message")
        text = choice["text"] if message is None else plain_text(message)
        if text is not None:
            yield list(self._tokenizer(text, add_special_tokens=False).input_ids)
        if message is not None and question.chat is not None:
            rendered = rendered_message(
                message, question.prompt, question.chat, self._tokenizer, self._stop_ids, self._thinking
            )
            if rendered is not None:
                yield rendered

    def _counted(self, tokens: list[int], reason: str, count: int | None) -> list[int]:
        """The tokens of an answer, none if they cannot be the `count` that the server wrote."""
        end = tokens[-1:] if tokens and tokens[-1] in self._stop_ids else []
        spoken = tokens[: len(tokens) - len(end)]
        ended = spoken + (end or list(self._stop_ids[:1])) if reason == "stop" else spoken
        known = count in (len(spoken), len(ended)) and LOST not in self._tokenizer.decode(spoken)
        return ended if known else []


def find_models(urls: Sequence[str], wanted: str | None, timeout_s: float) -> list[str]:
    """The name that each server is asked for: `wanted`, or the only one that it has.

    Raises:
        UserError: a server does not answer, or has no such model.
    """
    return [_find_model(base_url(url), wanted, timeout_s) for url in urls]


def _find_model(url: str, wanted: str | None, timeout_s: float) -> str:
    try:
        cards = _request(f"{url}/models", timeout_s)["data"]
        names = [str(card["id"]) for card in cards]
    except _TryAgainError as error:
        raise UserError(f"endpoint {url} does not answer ({error})") from error
    except (LookupError, TypeError) as error:
        raise UserError(f"endpoint {url}: not the reply of /v1/models ({error!r})") from error
    if wanted is None and len(names) == 1:
        return names[0]
    if wanted not in names:
        raise UserError(f"endpoint {url} has {', '.join(names) or 'no model'}; name one as server.model=NAME")
    return str(wanted)


def _request(url: str, timeout_s: float, body: dict[str, Any] | None = None) -> dict[str, Any]:
    headers = {"Content-Type": "application/json"}
    key = os.environ.get("OPENAI_API_KEY", "").strip()
    if not (key.isascii() and key.isprintable()):  # the error of http.client would show it
        raise UserError("OPENAI_API_KEY cannot be sent, it holds a character that no header may")
    if key:
        headers["Authorization"] = f"Bearer {key}"
    data = None if body is None else json.dumps(body).encode()
    try:
        request = urllib.request.Request(url, data, headers)
        with urllib.request.urlopen(request, timeout=timeout_s) as response:
            text = response.read()
    except urllib.error.HTTPError as error:
        reason = f"HTTP {error.code}: {_message(error)}"
        if error.code in TRANSIENT:
            raise _TryAgainError(reason, _seconds(error.headers.get("Retry-After"))) from error
        kinds = dict.fromkeys(REFUSED, _RefusedError) | dict.fromkeys(MISSING, _MissingError)
        raise kinds.get(error.code, UserError)(f"{url}: {reason}") from error
    except UnicodeError as error:  # a host that no name server knows how to ask for
        raise UserError(f"endpoint {url!r} is no address ({error})") from error
    except (urllib.error.URLError, OSError, http.client.HTTPException) as error:
        raise _TryAgainError(str(getattr(error, "reason", None) or error) or type(error).__name__) from error
    try:
        reply = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _TryAgainError(f"the reply is not JSON ({error})") from error
    if not isinstance(reply, dict):
        raise UserError(f"{url}: the reply is no JSON object")
    return reply


def _forms(body: dict[str, Any]) -> list[dict[str, Any]]:
    """A request, what is left of it for servers that know OpenAI's own fields only, and for the newest of these."""
    lean = {name: value for name, value in body.items() if name not in EXTRAS or value != EXTRAS[name]}
    if "messages" not in body:
        return [body, lean]
    renamed = {"max_completion_tokens" if name == "max_tokens" else name: value for name, value in lean.items()}
    return [body, lean, renamed]


def _whole(reply: dict[str, Any]) -> dict[str, Any]:
    """A completion, unless it failed or was broken off, which proxies and servers that stop report with status 200."""
    if not reply.get("choices") and (said := _said(reply)):
        raise _TryAgainError(said)
    reason = reply["choices"][0]["finish_reason"]
    if reason in BROKEN_OFF:
        raise _TryAgainError(f"the answer was broken off, finish_reason is {reason!r}")
    return reply


def base_url(url: str) -> str:
    """The address that /completions and /models follow. Raises UserError."""
    try:
        parts = urllib.parse.urlsplit(url if "//" in url else f"http://{url}")
    except ValueError as error:
        raise UserError(f"endpoint {url!r} is no address ({error})") from error
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise UserError(f"endpoint {url!r} is no address; expected something like http://localhost:8000")
    path = parts.path.rstrip("/")
    return f"{parts.scheme}://{parts.netloc}{path if path.endswith('/v1') else path + '/v1'}"


def _message(error: urllib.error.HTTPError) -> str:
    """What an error's body says, on one line."""
    try:
        text = error.read().decode(errors="replace")
    except (OSError, http.client.HTTPException):
        return str(error.reason)
    with contextlib.suppress(ValueError, RecursionError):
        text = _said(json.loads(text)) or text
    return " ".join(text.split())[:300] or str(error.reason)


def _said(body: Any) -> str | None:
    """The message of an error's body, {"error": {"message": ...}} or with one of the two alone."""
    for key in ("error", "message"):
        body = body.get(key, body) if isinstance(body, dict) else body
    return body if isinstance(body, str) else None


def _seconds(retry_after: str | None) -> float:
    """What a Retry-After header asks for, as seconds or as a date (RFC 9110, section 10.2.3)."""
    try:
        return max(0.0, float(retry_after or 0))
    except ValueError:
        pass  # a date, then
    try:
        return max(0.0, parsedate_to_datetime(retry_after or "").timestamp() - time.time())
    except (ValueError, OverflowError):  # neither: the pauses are our own
        return 0.0
