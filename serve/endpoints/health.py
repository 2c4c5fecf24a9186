"""GET /health, /ping, /ready and /version, which ask for no API key."""

from fastapi import APIRouter
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel

from dflash_toolkit.runtime import EngineClosedError
from dflash_toolkit.version import __version__

from ..errors import as_api_error, error_response
from ..openapi import operation
from ..service import Service

ENGINE_TIMEOUT_S = 30.0  # an engine that does not answer for this long counts as failed


class Version(BaseModel):
    version: str


def routes(service: Service) -> APIRouter:
    found = APIRouter()

    # /ping is SageMaker's name, as in vLLM
    @found.api_route("/ping", methods=["GET", "POST"], openapi_extra=operation("As /health", errors=(503,)))
    @found.get("/health", openapi_extra=operation("Whether the engine serves", errors=(503,)))
    async def health() -> Response:
        try:
            await service.engine.check(ENGINE_TIMEOUT_S)
        except EngineClosedError as error:
            if error.code != "server_shutting_down":
                return error_response(as_api_error(error))
        return Response()

    @found.get("/ready", openapi_extra=operation("Whether new answers begin", errors=(503,)))
    async def ready() -> Response:
        if service.state.draining:
            return error_response(as_api_error(EngineClosedError()))
        return await health()

    @found.get("/version", openapi_extra=operation("The server's release", Version))
    async def version() -> Response:
        return JSONResponse({"version": __version__})

    return found
