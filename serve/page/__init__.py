"""The page at `/`: chat with the model and see the drafter at work. Static files, and nothing from elsewhere."""

import functools
from collections.abc import Awaitable, Callable
from pathlib import Path

from fastapi import APIRouter, Request
from fastapi.responses import Response

FOLDER = Path(__file__).parent
FILES = {
    "/": ("page.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    "/page.js": ("page.js", "text/javascript"),
}
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def page() -> APIRouter:
    """The routes; nobody is asked for a key, as the page holds nothing of the model's."""
    routes = APIRouter()
    for path, (name, kind) in FILES.items():
        response = functools.partial(Response, (FOLDER / name).read_bytes(), media_type=kind, headers=HEADERS)
        routes.add_route(path, _sender(response), methods=["GET"], include_in_schema=False)
    return routes


def _sender(response: Callable[[], Response]) -> Callable[[Request], Awaitable[Response]]:
    async def send(request: Request) -> Response:
        return response()

    return send
