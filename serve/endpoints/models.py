"""GET /v1/models, and the model's /metrics and /load."""

import asyncio
import contextlib
import time
from typing import Any, Literal

from fastapi import APIRouter
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel

from dflash_toolkit.runtime import EngineClosedError

from ..metrics import CONTENT_TYPE, fetch_counts
from ..openapi import operation
from ..service import Service

STATS_S = 5.0


class ModelCard(BaseModel):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: None
    permission: list[dict[str, Any]]
    max_model_len: int
    num_speculative_tokens: int
    draft_sample_method: Literal["greedy", "probabilistic"]
    kv_cache_dtype: Literal["auto", "fp8"]


class Load(BaseModel):
    server_load: int


class ModelList(BaseModel):
    object: Literal["list"]
    data: list[ModelCard]


def routes(service: Service) -> APIRouter:
    found, info = APIRouter(), service.engine.info
    card = {
        "id": service.names[0],
        "object": "model",
        "created": int(time.time()),
        "owned_by": "dflash-toolkit",
        "root": service.names[0],
        "parent": None,  # set for an adapter
        "permission": [],
        "max_model_len": service.context_limit,
        "num_speculative_tokens": info.block_size - 1,  # the longest draft
        "draft_sample_method": info.draft_sample_method,
        "kv_cache_dtype": info.kv_cache_dtype,
    }

    @found.get("/metrics", openapi_extra=operation("Metrics in Prometheus's text format", CONTENT_TYPE))
    async def render_metrics() -> Response:
        stats = None  # if the engine does not answer, the last statistics are shown
        with contextlib.suppress(EngineClosedError, TimeoutError):
            stats = await asyncio.wait_for(service.engine.ping(), STATS_S)
        counts = [asyncio.wait_for(fetch_counts(path), STATS_S) for path in service.state.others]
        others = await asyncio.gather(*counts, return_exceptions=True)
        rendered = service.metrics.render(stats, [one for one in others if isinstance(one, bytes) and one])
        return Response(rendered, media_type=CONTENT_TYPE)

    @found.get("/load", openapi_extra=operation("Number of running and waiting answers", Load))
    async def load() -> Response:
        return JSONResponse({"server_load": service.state.answers.total})

    @found.get("/v1/models", openapi_extra=operation("The served model", ModelList))
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [card | {"id": name} for name in service.names]})

    # names like `Qwen/Qwen3-8B`
    @found.get("/v1/models/{name:path}", openapi_extra=operation("The served model", ModelCard, (404,)))
    async def one_model(name: str) -> Response:
        service.check_model(name)
        return JSONResponse(card | {"id": name})

    return found
