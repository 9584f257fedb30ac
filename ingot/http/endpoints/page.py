"""The pages, to chat and to watch the engine: their files, read once, served from memory.

A path is looked up among the files that were there at the start, so that no path can lead out of the folder. They
are public: they hold no secret, ask for the key themselves, and everything they then call is guarded.
"""

from __future__ import annotations

from hashlib import blake2b
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import PurePath
from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

PAGE_PATHS: Final = {"index.html": "/", "live.html": "/live"}
PAGE_HEADERS: Final = {
    "content-security-policy": (
        "default-src 'self'; script-src 'self'; style-src 'self'; object-src 'none'; base-uri 'none'; "
        "img-src 'self' data:; media-src 'self' data:; "  # what the user attaches, which is in the page itself
        "form-action 'none'; frame-ancestors 'none'"
    ),
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    # Asked about each time, and answered with 304 while it is the same: a new version shows at once.
    "cache-control": "no-cache",
}
# Named here rather than guessed: a host's own table of types may be wrong, and `nosniff` makes that fatal.
PAGE_MEDIA_TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".woff2": "font/woff2",
}


def page_routes(folder: Traversable | None = None) -> list[Route]:
    """A page's own address, or `/static/<name>`, for every file; any other name is nobody's route."""
    folder = folder if folder is not None else files("ingot.web") / "static"
    found = sorted(folder.iterdir(), key=lambda file: file.name) if folder.is_dir() else []
    return [page_file_route(file) for file in found if PurePath(file.name).suffix in PAGE_MEDIA_TYPES]


def page_file_route(file: Traversable) -> Route:
    content = file.read_bytes()
    etag = f'"{blake2b(content, digest_size=12).hexdigest()}"'
    headers = PAGE_HEADERS | {"content-type": PAGE_MEDIA_TYPES[PurePath(file.name).suffix], "etag": etag}

    async def serve(request: Request) -> Response:
        if request.headers.get("if-none-match") == etag:
            return Response(status_code=304, headers=headers)
        return Response(content, headers=headers)

    return Route(PAGE_PATHS.get(file.name, f"/static/{file.name}"), serve)
