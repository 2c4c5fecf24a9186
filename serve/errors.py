"""Maps errors to responses in OpenAI's form."""

from fastapi.responses import JSONResponse, Response

from dflash_toolkit.config import UserError
from dflash_toolkit.runtime import EngineClosedError, RequestFailedError

from .protocol import ApiError


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


def error_response(error: ApiError) -> Response:
    headers = {"WWW-Authenticate": "Bearer"} if error.status == 401 else {}
    if error.status == 429:
        headers["Retry-After"] = "1"
    if error.code == "internal_error":  # starlette raises it again, and uvicorn then closes the connection
        headers["Connection"] = "close"
    return JSONResponse(error.body(), error.status, headers)
