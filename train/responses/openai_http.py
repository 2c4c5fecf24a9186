"""JSON over HTTP with OpenAI-compatible servers, its failures sorted by whether to ask again, and their models.

On the standard library: thousands of requests are under way at once, and AsyncOpenAI takes several times the processor
time for each.
"""

import contextlib
import http.client
import json
import os
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Sequence
from email.utils import parsedate_to_datetime
from typing import Any

from dflash_toolkit.config import UserError

TRANSIENT = (408, 409, 425, 429, 500, 502, 503, 504, *range(520, 531))  # the last of proxies
REFUSED = (400, 422)
MISSING = (404, 405, 501)


class TryAgainError(Exception):
    """The server may answer later."""

    def __init__(self, reason: str, after_s: float = 0.0) -> None:
        super().__init__(reason)
        self.after_s = after_s


class RefusedError(UserError):
    """The server takes offence at something in the request."""


class MissingError(UserError):
    """The server has no such API."""


def find_models(urls: Sequence[str], wanted: str | None, timeout_s: float) -> list[str]:
    """The name that each server is asked for: `wanted`, or the only one that it has.

    A server that keeps no list, or has patterns of names in it (a proxy's `*`), is believed to have `wanted`.

    Raises:
        UserError: a server does not answer, or has no such model.
    """
    return [_find_model(base_url(url), wanted, timeout_s) for url in urls]


def _find_model(url: str, wanted: str | None, timeout_s: float) -> str:
    try:
        cards = request_json(f"{url}/models", timeout_s)["data"]
        names = [str(card["id"]) for card in cards]
    except TryAgainError as error:
        raise UserError(f"endpoint {url} does not answer ({error})") from error
    except MissingError as error:
        if wanted is None:
            raise UserError(f"{error}; name the model as server.model=NAME") from error
        return wanted
    except (LookupError, TypeError) as error:
        raise UserError(f"endpoint {url}: not the reply of /v1/models ({error!r})") from error
    if wanted is None and len(names) == 1 and "*" not in names[0]:
        return names[0]
    if wanted is None or not (wanted in names or any("*" in name for name in names)):
        raise UserError(f"endpoint {url} has {', '.join(names) or 'no model'}; name one as server.model=NAME")
    return wanted


def request_json(url: str, timeout_s: float, body: dict[str, Any] | None = None) -> dict[str, Any]:
    """The JSON object at an address, to which `body` is posted if there is one. OPENAI_API_KEY goes along.

    Raises:
        TryAgainError: no reply, none that is JSON, or a status of `TRANSIENT`.
        RefusedError, MissingError: a status of `REFUSED` or `MISSING`.
        UserError: any other failure.
    """
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
        reason = f"HTTP {error.code}: {_error_of(error)}"
        if error.code in TRANSIENT:
            raise TryAgainError(reason, seconds(error.headers.get("Retry-After"))) from error
        kinds = dict.fromkeys(REFUSED, RefusedError) | dict.fromkeys(MISSING, MissingError)
        raise kinds.get(error.code, UserError)(f"{url}: {reason}") from error
    except UnicodeError as error:  # a host that no name server knows how to ask for
        raise UserError(f"endpoint {url!r} is no address ({error})") from error
    except (urllib.error.URLError, OSError, http.client.HTTPException) as error:
        raise TryAgainError(str(getattr(error, "reason", None) or error) or type(error).__name__) from error
    try:
        reply = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TryAgainError(f"the reply is not JSON ({error})") from error
    if not isinstance(reply, dict):
        raise UserError(f"{url}: the reply is no JSON object")
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


def _error_of(error: urllib.error.HTTPError) -> str:
    """What an error's body says, on one line."""
    try:
        text = error.read().decode(errors="replace")
    except (OSError, http.client.HTTPException):
        return str(error.reason)
    with contextlib.suppress(ValueError, RecursionError):
        text = error_message(json.loads(text)) or text
    return " ".join(text.split())[:300] or str(error.reason)


def error_message(body: Any) -> str | None:
    """The message of an error's body, {"error": {"message": ...}} or with one of the two alone."""
    for key in ("error", "message"):
        body = body.get(key, body) if isinstance(body, dict) else body
    return body if isinstance(body, str) else None


def seconds(retry_after: str | None) -> float:
    """What a Retry-After header asks for, as seconds or as a date (RFC 9110, section 10.2.3)."""
    try:
        return max(0.0, float(retry_after or 0))
    except ValueError:
        pass  # a date, then
    try:
        return max(0.0, parsedate_to_datetime(retry_after or "").timestamp() - time.time())
    except (ValueError, OverflowError):  # neither: the pauses are our own
        return 0.0
