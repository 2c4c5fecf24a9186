"""Answers from any OpenAI-compatible server: /v1/completions with token ids, so that only we apply the template."""

import http.client
import json
import os
import queue
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Sequence
from email.utils import parsedate_to_datetime
from typing import Any

from dflash_toolkit.config import UserError
from dflash_toolkit.decode import SamplingParams

from .backends import Answer

LONGEST_PAUSE_S = 60.0
BROKEN_OFF = (None, "abort", "aborted", "cancelled", "error", "content_filter")  # finish_reason of half an answer
TRANSIENT = (408, 409, 425, 429, 500, 502, 503, 504)
REFUSED = (400, 422)
EXTRAS = ("return_token_ids", "top_k", "min_p", "repetition_penalty")  # which OpenAI's own API does not know


class _TryAgainError(Exception):
    """The server may answer later."""

    def __init__(self, reason: str, after_s: float = 0.0) -> None:
        super().__init__(reason)
        self.after_s = after_s


class _RefusedError(UserError):
    """The server takes offence at something in the request."""


class EndpointBackend:
    """Asks one or more servers of the same target, each question on its own, from so many threads.

    A server that returns token ids (`return_token_ids`: vLLM, SGLang, dflash-serve) is taken at its word. From any
    other the text is tokenised again, and counts only if that gives as many tokens as the server says it wrote. A
    server that refuses a request is asked without what only these know, unless the sampler needs it.

    Args:
        urls: with or without the closing /v1; questions go round.
        vocab_size: of the target; an answer with a token beyond it is another model's.
        model: the name to ask for; None takes the only one that a server has.
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
        concurrency: int = 64,
        timeout_s: float = 600.0,
        retries: int = 6,
        pause_s: float = 1.0,
    ) -> None:
        self.width = concurrency
        self._urls = [base_url(url) for url in urls]
        self._tokenizer, self._stop_ids = tokenizer, tuple(stop_ids)
        self._vocab_size = vocab_size
        self._timeout_s, self._retries, self._pause_s = timeout_s, retries, pause_s
        self._strict: set[str] = set()  # servers that know OpenAI's own fields only
        self._closed = threading.Event()
        self._asked: queue.SimpleQueue[tuple[int, dict[str, Any]] | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[Answer | Exception] = queue.SimpleQueue()
        self.models = find_models(urls, model, timeout_s)
        for i in range(concurrency):  # daemons: an interrupted run does not wait for answers
            threading.Thread(target=self._work, args=(i % len(self._urls),), name=f"ask-{i}", daemon=True).start()

    def ask(self, key: int, prompt: list[int], params: SamplingParams) -> None:
        body = {
            "prompt": prompt,
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
        self._asked.put((key, body))

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
        while (item := self._asked.get()) is not None and not self._closed.is_set():
            key, body = item
            try:
                reply = self._persist(self._urls[server], {"model": self.models[server], **body})
                self._answers.put(self._known(server, self._answer(key, reply, body["max_tokens"])))
            except UserError as error:
                self._answers.put(error)
            except Exception as error:
                broken = UserError(f"{self._urls[server]}: not the reply of /v1/completions ({error!r})")
                self._answers.put(broken)

    def _persist(self, url: str, body: dict[str, Any]) -> dict[str, Any]:
        for attempt in range(self._retries + 1):
            try:
                return _whole(self._complete(f"{url}/completions", body))
            except _TryAgainError as error:
                reason = str(error)
                pause = min(self._pause_s * 2**attempt, LONGEST_PAUSE_S)
                if attempt < self._retries and self._closed.wait(max(pause, min(error.after_s, LONGEST_PAUSE_S))):
                    break
        raise UserError(
            f"{url}: no answer after {self._retries + 1} attempts ({reason}); "
            f"what was answered is kept, run the same command again to go on"
        )

    def _complete(self, url: str, body: dict[str, Any]) -> dict[str, Any]:
        refused: UserError | None = None
        if url not in self._strict:
            try:
                return _request(url, self._timeout_s, body)
            except _RefusedError as error:
                if body["top_k"] > 0 or body["min_p"] > 0:
                    raise
                refused = error
        try:
            reply = _request(url, self._timeout_s, {key: value for key, value in body.items() if key not in EXTRAS})
        except _RefusedError as error:
            raise refused or error from None
        self._strict.add(url)
        return reply

    def _answer(self, key: int, reply: dict[str, Any], limit: int) -> Answer:
        choice = reply["choices"][0]
        reason = "length" if choice["finish_reason"] == "length" else "stop"
        tokens = choice.get("token_ids")
        if tokens is None:
            return Answer(key, self._tokenized(choice["text"], reason, (reply.get("usage") or {})), reason)
        tokens = [int(token) for token in tokens][:limit]
        if reason == "stop" and (not tokens or tokens[-1] not in self._stop_ids) and len(tokens) < limit:
            tokens += self._stop_ids[:1]  # left out by the server
        return Answer(key, tokens, reason)

    def _known(self, server: int, answer: Answer) -> Answer:
        """The answer, if all of its tokens are the target's."""
        strange = next((token for token in answer.tokens if not 0 <= token < self._vocab_size), None)
        if strange is not None:
            raise UserError(
                f"{self._urls[server]}: {self.models[server]} answered with token {strange}, outside the target's "
                f"vocabulary of {self._vocab_size}; serve the target itself"
            )
        return answer

    def _tokenized(self, text: str, reason: str, usage: dict[str, Any]) -> list[int]:
        """The tokens of a text, none if they cannot be those that the server wrote."""
        tokens = list(self._tokenizer(text, add_special_tokens=False).input_ids)
        ended = tokens + list(self._stop_ids[:1]) if reason == "stop" else tokens
        return ended if usage.get("completion_tokens") in (len(tokens), len(ended)) else []


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
        kind = _RefusedError if error.code in REFUSED else UserError
        raise kind(f"{url}: {reason}") from error
    except (urllib.error.URLError, OSError, http.client.HTTPException) as error:
        raise _TryAgainError(str(getattr(error, "reason", None) or error) or type(error).__name__) from error
    try:
        reply = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _TryAgainError(f"the reply is not JSON ({error})") from error
    if not isinstance(reply, dict):
        raise UserError(f"{url}: the reply is no JSON object")
    return reply


def _whole(reply: dict[str, Any]) -> dict[str, Any]:
    """A completion, unless it was broken off, which a server that is paused or stopped reports with status 200."""
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
    try:
        body = json.loads(text)
        text = str(body["error"]["message"] if isinstance(body.get("error"), dict) else body.get("message", text))
    except (ValueError, LookupError, AttributeError):
        pass
    return " ".join(text.split())[:300] or str(error.reason)


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
