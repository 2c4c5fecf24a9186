"""GET /v1/drafter, which describes the drafter and its training, and POST /v1/drafter/rollback with an admin key."""

from fastapi import APIRouter
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel

from ..openapi import operation
from ..protocol import ApiError
from ..service import Service


class Training(BaseModel):
    """The state of a trainer (--adapt)."""

    steps: int
    requests: int  # in its memory
    bytes: int
    learnt_from: int  # requests until the served version
    held_out_acceptance_length: float | None
    live_acceptance_length: float | None
    promotions: int
    rollbacks: int
    error: str | None  # why it has ended


class DrafterState(BaseModel):
    drafter_version: int
    target_version: int
    num_speculative_tokens: int
    training: Training | None  # null without --adapt


class RolledBack(BaseModel):
    success: bool
    message: str


def routes(service: Service) -> APIRouter:
    found = APIRouter()

    @found.get("/v1/drafter", openapi_extra=operation("The drafter and its training", DrafterState, (503,)))
    async def drafter() -> Response:
        stats = await service.engine.ping()
        target, version = stats.versions
        training = None
        if (state := stats.adaptation) is not None:
            training = {name: getattr(state, name) for name in Training.model_fields}
        reply = {"drafter_version": version, "target_version": target, "training": training}
        return JSONResponse(reply | {"num_speculative_tokens": service.engine.info.block_size - 1})

    return found


def admin_routes(service: Service) -> APIRouter:
    found = APIRouter()

    @found.post(
        "/v1/drafter/rollback", openapi_extra=operation("Serve the drafter before this one", RolledBack, (400,))
    )
    async def roll_back() -> Response:
        if (error := await service.engine.roll_back()) is not None:
            raise ApiError(400, error)
        return JSONResponse({"success": True, "message": "the version before this one is served as soon as it is sent"})

    return found
