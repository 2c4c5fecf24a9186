"""POST /update_weights_from_disk, with SGLang's body and reply; it asks for an admin key."""

from typing import Literal

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel

from ..body import Strict
from ..openapi import operation
from ..protocol import validate
from ..service import Service


class UpdateWeightsRequest(Strict):
    """The body of POST /update_weights_from_disk."""

    model_path: str  # a directory on the server
    model: Literal["target", "drafter"] = "target"


class UpdatedWeights(BaseModel):
    success: bool
    message: str
    num_paused_requests: int
    target_version: int
    drafter_version: int


def routes(service: Service) -> APIRouter:
    found = APIRouter()
    described = operation(
        "Replace the weights by those of a directory", UpdatedWeights, (400, 503), body=UpdateWeightsRequest
    )

    @found.post("/update_weights_from_disk", openapi_extra=described)
    async def update_weights(request: Request) -> Response:
        body = validate(UpdateWeightsRequest, await request.body())
        replaced = await service.engine.update_weights(body.model_path, body.model)
        done, (target, drafter) = replaced.error is None, replaced.versions
        message = replaced.error or f"the {body.model} has the weights of {body.model_path}"
        reply = {"success": done, "message": message, "num_paused_requests": 0}
        return JSONResponse(reply | {"target_version": target, "drafter_version": drafter}, 200 if done else 400)

    return found
