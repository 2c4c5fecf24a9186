"""HTTP client for OpenAI-compatible servers: addresses, the API key, JSON and streamed replies, classes of failures.

It is built on urllib: at 8 to 512 concurrent requests httpx needs three to seven times its CPU time per request.
"""

import base64
import contextlib
import http.client
import json
import os
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from email.utils import parsedate_to_datetime
from typing import Any

from .config import UserError

TRANSIENT = (408, 409, 425, 429, 500, 502, 503, 504, *range(520, 531))  # 520 to 530 come from proxies
REFUSED = (400, 422)
MISSING = (404, 405, 501)


class TryAgainError(Exception):
    """A failure that may pass.

    Args:
        after_s: seconds that the server wants the client to wait.
    """

    def __init__(self, reason: str, after_s: float = 0.0) -> None:
        super().__init__(reason)
        self.after_s = after_s


class RefusedError(UserError):
    """The server rejects a field of the request."""


class MissingError(UserError):
    """The server does not have this API."""


def find_models(urls: Sequence[str], wanted: str | None, timeout_s: float) -> list[str]:
    """Returns the model name to send to each server, see `find_model`."""
    return [find_model(url, wanted, timeout_s)["id"] for url in urls]


def find_model(url: str, wanted: str | None, timeout_s: float, option: str = "server.model=NAME") -> dict[str, Any]:
    """Returns the entry of /v1/models for `wanted`, or for the only model of the server if that is None.

    If the server does not list its models, or lists patterns (a proxy's `*`), the entry is `wanted` alone.

    Args:
        option: how a user chooses the model, for errors.

    Raises:
        UserError: the server does not answer, or does not have the model.
    """
    url = base_url(url)
    shown = without_login(url)
    try:
        cards = {str(card["id"]): card for card in request_json(f"{url}/models", timeout_s)["data"]}
    except TryAgainError as error:
        raise UserError(f"endpoint {shown} does not answer ({error})") from error
    except MissingError as error:
        if wanted is None:
            raise UserError(f"{error}; name the model as {option}") from error
        return {"id": wanted}
    except (LookupError, TypeError) as error:
        raise UserError(f"endpoint {shown}: not the reply of /v1/models ({error!r})") from error
    if wanted is None and len(cards) == 1 and "*" not in next(iter(cards)):
        (wanted,) = cards
    if wanted is None or not (wanted in cards or any("*" in name for name in cards)):
        raise UserError(f"endpoint {shown} has {', '.join(cards) or 'no model'}; name one as {option}")
    return {**cards.get(wanted, {}), "id": wanted}


def request_json(url: str, timeout_s: float, body: dict[str, Any] | None = None) -> dict[str, Any]:
    """Returns the JSON object at a URL; posts `body` if there is one.

    Raises:
        TryAgainError: no reply, a reply that is not JSON, or a status of `TRANSIENT`.
        RefusedError, MissingError: a status of `REFUSED` or `MISSING`.
        UserError: any other failure.
    """
    with open_reply(url, timeout_s, body) as response:
        text = response.read()
    try:
        reply = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TryAgainError(f"the reply is not JSON ({error})") from error
    if not isinstance(reply, dict):
        raise UserError(f"{without_login(url)}: the reply is no JSON object")
    return reply


def stream_json(url: str, timeout_s: float, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Posts `body` and yields the JSON object of each server-sent event. Raises as `request_json` does."""
    with open_reply(url, timeout_s, body) as response:
        for line in response:
            if not line.startswith(b"data:") or (data := line[5:].strip()) == b"[DONE]":
                continue
            try:
                event = json.loads(data)
            except (ValueError, RecursionError) as error:
                raise UserError(f"{without_login(url)}: an event of the stream is not JSON ({error})") from error
            if not isinstance(event, dict):
                raise UserError(f"{without_login(url)}: an event of the stream is no JSON object")
            yield event


@contextlib.contextmanager
def open_reply(url: str, timeout_s: float, body: dict[str, Any] | None = None) -> Iterator[http.client.HTTPResponse]:
    """Sends a request, with OPENAI_API_KEY or the login in the URL, and yields the reply to read.

    Raises as `request_json` does, also for failures while the reply is read.
    """
    parts = urllib.parse.urlsplit(url)
    login, _, host = parts.netloc.rpartition("@")
    headers = {"Content-Type": "application/json"}
    key = os.environ.get("OPENAI_API_KEY", "").strip()
    if not (key.isascii() and key.isprintable()):  # the error of http.client would show it
        raise UserError("OPENAI_API_KEY cannot be sent, it holds a character that no header may")
    if login:
        headers["Authorization"] = f"Basic {base64.b64encode(urllib.parse.unquote(login).encode()).decode()}"
    elif key:
        headers["Authorization"] = f"Bearer {key}"
    data = None if body is None else json.dumps(body).encode()
    try:
        request = urllib.request.Request(parts._replace(netloc=host).geturl(), data, headers)
        with urllib.request.urlopen(request, timeout=timeout_s) as response:
            yield response
    except urllib.error.HTTPError as error:
        reason = f"HTTP {error.code}: {_error_of(error)}"
        if error.code in TRANSIENT:
            raise TryAgainError(reason, seconds(error.headers.get("Retry-After"))) from error
        kinds = dict.fromkeys(REFUSED, RefusedError) | dict.fromkeys(MISSING, MissingError)
        raise kinds.get(error.code, UserError)(f"{without_login(url)}: {reason}") from error
    except UnicodeError as error:  # a host name that cannot be encoded for DNS
        raise UserError(f"endpoint {without_login(url)!r} is not an address ({error})") from error
    except (urllib.error.URLError, OSError, http.client.HTTPException) as error:
        raise TryAgainError(str(getattr(error, "reason", None) or error) or type(error).__name__) from error


def base_url(url: str) -> str:
    """Returns the URL to which /completions and /models are appended. Raises UserError."""
    try:
        parts = urllib.parse.urlsplit(url if "//" in url else f"http://{url}")
        valid = parts.scheme in ("http", "https") and parts.hostname and (parts.port or True)
    except ValueError as error:
        raise UserError(f"endpoint {url!r} is not an address ({error})") from error
    if not valid:
        raise UserError(f"endpoint {url!r} is not an address; expected something like http://localhost:8000")
    path = parts.path.rstrip("/")
    return f"{parts.scheme}://{parts.netloc}{path if path.endswith('/v1') else path + '/v1'}"


def without_login(url: str) -> str:
    """Returns a URL as errors and reports may show it."""
    parts = urllib.parse.urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


def _error_of(error: urllib.error.HTTPError) -> str:
    """Returns the message in the body of an error, on one line."""
    try:
        text = error.read().decode(errors="replace")
    except (OSError, http.client.HTTPException):
        return str(error.reason)
    with contextlib.suppress(ValueError, RecursionError):
        text = error_message(json.loads(text)) or text
    return " ".join(text.split())[:300] or str(error.reason)


def error_message(body: Any) -> str | None:
    """Returns the message of an error's body: {"error": {"message": ...}}, or with only one of the two keys."""
    for key in ("error", "message"):
        body = body.get(key, body) if isinstance(body, dict) else body
    return body if isinstance(body, str) else None


def seconds(retry_after: str | None) -> float:
    """Returns the delay of a Retry-After header, which holds seconds or a date (RFC 9110, section 10.2.3)."""
    try:
        return max(0.0, float(retry_after or 0))
    except ValueError:
        pass  # it may be a date
    try:
        return max(0.0, parsedate_to_datetime(retry_after or "").timestamp() - time.time())
    except (ValueError, OverflowError):
        return 0.0
