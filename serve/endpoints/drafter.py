"""GET /v1/drafter, which describes the drafter and its training; with an admin key, rollback and save."""

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel

from ..body import Strict
from ..openapi import operation
from ..protocol import ApiError, validate
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
    busy_share: float  # share of the last minute in which the trainer worked
    error: str | None  # why it has ended


class Version(BaseModel):
    drafter_version: int
    steps: int
    tokens_per_step: float


class DrafterState(BaseModel):
    drafter_version: int
    target_version: int
    num_speculative_tokens: int
    versions: list[Version]  # the first and the newest that have decoded
    training: Training | None  # null without --adapt
    summary: str


class Changed(BaseModel):
    success: bool
    message: str


class SaveRequest(Strict):
    """The body of POST /v1/drafter/save."""

    path: str | None = None  # a directory on the server; the default is one of --adapt-output


def routes(service: Service) -> APIRouter:
    found = APIRouter()

    @found.get("/v1/drafter", openapi_extra=operation("The drafter and its training", DrafterState, (503,)))
    async def drafter() -> Response:
        stats = await service.engine.ping()
        target, version = stats.versions
        training = None
        if (state := stats.adaptation) is not None:
            training = {name: getattr(state, name) for name in Training.model_fields}
        reply: dict[str, Any] = {"drafter_version": version, "target_version": target, "training": training}
        reply["versions"] = versions = [
            {"drafter_version": number, "steps": steps, "tokens_per_step": tokens / steps}
            for number, (steps, tokens) in sorted(stats.by_version.items())
        ]
        taus = [f"{each['tokens_per_step']:.1f}" for each in (versions[:1] + versions[1:][-1:])]
        learnt = f", learnt from {state.learnt_from:,} requests" if state is not None else ""
        reply["summary"] = f"drafter version {version}{learnt}" + f", tokens per step {' -> '.join(taus)}" * bool(taus)
        return JSONResponse(reply | {"num_speculative_tokens": service.engine.info.block_size - 1})

    return found


def admin_routes(service: Service) -> APIRouter:
    found = APIRouter()

    @found.post("/v1/drafter/rollback", openapi_extra=operation("Serve the drafter before this one", Changed, (400,)))
    async def roll_back() -> Response:
        if (error := await service.engine.roll_back()) is not None:
            raise ApiError(400, error)
        return JSONResponse({"success": True, "message": "the version before this one is served as soon as it is sent"})

    @found.post(
        "/v1/drafter/save",
        openapi_extra=operation("Write the served drafter to a directory", Changed, (400,), body=SaveRequest),
    )
    async def save(request: Request) -> Response:
        path = validate(SaveRequest, await request.body() or b"{}").path
        if (error := await service.engine.save_drafter(path)) is not None:
            raise ApiError(400, error)
        return JSONResponse({"success": True, "message": f"the drafter is in {path or '--adapt-output'}"})

    return found
