"""Serves the page at `/`: static files to chat with the model and see the drafter at work."""

import functools
from collections.abc import Awaitable, Callable
from pathlib import Path

from fastapi import APIRouter, Request
from fastapi.responses import Response

from ..openapi import operation

FOLDER = Path(__file__).parent
FILES = {
    "/": ("page.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    "/page.js": ("page.js", "text/javascript"),
    "/chat.js": ("chat.js", "text/javascript"),
    "/markdown.js": ("markdown.js", "text/javascript"),
    "/vendor/markdown-it.min.js": ("vendor/markdown-it.min.js", "text/javascript"),
    "/vendor/purify.min.js": ("vendor/purify.min.js", "text/javascript"),
}
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types dompurify",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def page() -> APIRouter:
    """Returns the routes. They ask for no key, as the files contain nothing about the model."""
    routes = APIRouter()
    for path, (name, kind) in FILES.items():
        response = functools.partial(Response, (FOLDER / name).read_bytes(), media_type=kind, headers=HEADERS)
        described = operation("The page", kind)
        routes.add_api_route(path, _sender(response), methods=["GET", "HEAD"], openapi_extra=described)
    return routes


def _sender(response: Callable[[], Response]) -> Callable[[Request], Awaitable[Response]]:
    async def send(request: Request) -> Response:
        return response()

    return send
