"""Maps errors to responses in OpenAI's form, or in Anthropic's."""

from typing import Any

from fastapi.responses import JSONResponse, Response

from dflash_toolkit.config import UserError
from dflash_toolkit.runtime import EngineClosedError, RequestFailedError

from .protocol import ApiError, clipped

RETRY_S = {
    "engine_restarting": 5,
    "server_shutting_down": 5,
    "grammar_queue_timeout": 5,
}  # seconds until a client should try again


class LateError(Exception):
    """Raised when an answer takes longer than the server allows."""


def as_api_error(error: Exception) -> ApiError:
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


MESSAGES = "/v1/messages"  # Anthropic's API; errors under this path have its form
MESSAGES_ERRORS = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def messages_error(error: ApiError) -> dict[str, Any]:
    """Returns an error in Anthropic's form."""
    kind = MESSAGES_ERRORS.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    message = clipped(error.message, 1000)
    if error.code == "context_length_exceeded":  # agents look for Anthropic's words, and then shorten the conversation
        message = f"prompt is too long: {message}"
    return {"type": "error", "error": {"type": kind, "message": message}}


def error_response(error: ApiError, path: str = "") -> Response:
    headers = {"WWW-Authenticate": "Bearer"} if error.status == 401 else {}
    if (pause := 1 if error.status == 429 else RETRY_S.get(error.code or "")) is not None:
        headers["Retry-After"] = str(pause)
    if error.code == "internal_error":  # starlette raises it again, and uvicorn then closes the connection
        headers["Connection"] = "close"
    body = messages_error(error) if path.startswith(MESSAGES) else error.body()
    return JSONResponse(body, error.status, headers)
