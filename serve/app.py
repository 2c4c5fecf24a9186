"""The HTTP application: the endpoints, API keys and errors."""

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse, Response
from fastapi.routing import APIRoute

from dflash_toolkit.config import UserError
from dflash_toolkit.runtime import EngineClient, EngineClosedError, RequestFailedError

from .access import Access
from .endpoints import ADMIN, KEYED, OPEN
from .errors import LateError, as_api_error, error_response
from .keys import matching
from .openapi import document, operation
from .page import page
from .parsing import Parsers
from .protocol import ApiError
from .service import Service
from .state import ServerState
from .unknown import HEADER

if TYPE_CHECKING:
    from .config import ServeConfig


def create_app(
    engine: EngineClient,
    config: "ServeConfig",
    *,
    api_keys: Sequence[str] = (),
    admin_keys: Sequence[str] = (),
    excluded: Collection[str] = (),
    defaults: Mapping[str, float] | None = None,
    state: ServerState | None = None,
) -> FastAPI:
    """Creates the application that serves an engine.

    Args:
        api_keys: accepted keys; empty: no key is required.
        admin_keys: keys that may replace the weights; empty: there is no such route.
        excluded: numbers of API keys with requests that a trainer may not learn from.
        defaults: sampling parameters for requests that omit them (`defaults.py`).
        state: shared with the server.
    """
    parsers = Parsers.choose(engine.tokenizer, config.tool_call_parser, config.reasoning_parser)
    service = Service(engine, config, state or ServerState(), parsers, defaults or {}, excluded)
    root_path = config.root_path

    def key_number(request: Request, keys: Sequence[str], kind: str) -> int | None:
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        key = key if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")  # Anthropic's clients
        number = matching(keys, key.strip())
        if keys and number is None:
            message = f"wrong or missing {kind} key; send one as `Authorization: Bearer KEY`"
            raise ApiError(401, message, code="invalid_api_key")
        return number

    async def authorise(request: Request) -> None:  # async: a thread would wait for the interpreter lock
        number = key_number(request, api_keys, "API")
        request.state.key = "" if number is None else str(number)

    async def authorise_admin(request: Request) -> None:
        key_number(request, admin_keys, "admin")

    description = APIRouter()

    @description.get("/openapi.json", openapi_extra=operation("This description", "application/json"))
    async def openapi() -> Response:
        return JSONResponse(described)

    routers = [(page(), False), *((make(service), False) for make in OPEN), *((make(service), True) for make in KEYED)]
    routers.append((description, True))
    administration = [make(service) for make in ADMIN] if admin_keys else []
    described = document(routers, service.names, bool(api_keys), root_path, config.strict_parameters, administration)

    async def refuse(request: Request, error: Any) -> Response:
        service.metrics.refused(error.status)
        return error_response(error, request.scope["path"].removeprefix(root_path))

    async def no_such_route(request: Request, error: Any) -> Response:
        message = f"this server has no {request.url.path}; /openapi.json lists its paths"
        return await refuse(request, ApiError(404, message, code="not_found"))

    async def wrong_method(request: Request, error: Any) -> Response:
        allowed = ", ".join(sorted(error.headers["Allow"].split(", ")))
        if request.method == "OPTIONS":
            return Response(status_code=204, headers={"Allow": f"{allowed}, OPTIONS"})
        message = f"{request.method} is not allowed for {request.url.path}; use {allowed}"
        response = await refuse(request, ApiError(405, message, code="method_not_allowed"))
        response.headers["Allow"] = allowed
        return response

    async def failed(request: Request, error: Exception) -> Response:
        return error_response(as_api_error(error), request.scope["path"].removeprefix(root_path))

    # without FastAPI's schema routes, every path that is not listed above is a 404 in OpenAI's form
    app = FastAPI(openapi_url=None, redirect_slashes=False)
    app.root_path = root_path  # uvicorn would add its own to every path, even if the proxy has kept it
    app.state.metrics = service.metrics
    for router in administration:
        app.include_router(router, dependencies=[Depends(authorise_admin)])
    for router, asks in routers:
        for route in router.routes:
            if isinstance(route, APIRoute) and route.methods and "GET" in route.methods:
                route.methods.add("HEAD")
        app.include_router(router, dependencies=[Depends(authorise)] if asks else [])
    app.add_exception_handler(ApiError, refuse)
    app.add_exception_handler(404, no_such_route)
    app.add_exception_handler(405, wrong_method)
    for known in (EngineClosedError, LateError, RequestFailedError):
        app.add_exception_handler(known, failed)
    app.add_exception_handler(UserError, failed)
    app.add_exception_handler(Exception, failed)  # starlette raises it again, so the traceback is logged
    if config.allowed_origins:
        shown = ["x-request-id", HEADER.decode()]
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.allowed_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=shown,
        )
    app.add_middleware(Access, state=service.state, responded=service.metrics.responded)
    return app
