"""The chat page: its files, and the routes that hand them out.

The page is public (it asks for the key itself, and holds no secret), so its routes belong outside the guard's key
check; everything it then calls lies under `/v1` and is guarded. Files are read once, when the routes are made, and
only they have a route: no path can lead out of the folder.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

STATIC = Path(__file__).parent / "static"

CONTENT_SECURITY_POLICY = (
    "default-src 'self'; script-src 'self'; style-src 'self'; object-src 'none'; base-uri 'none'; "
    "frame-ancestors 'none'"
)

# Named here rather than guessed: the host's own table of types may be wrong, and `nosniff` makes that fatal.
MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}


def routes() -> list[Route]:
    """`/`, and `/static/<name>` for every other file of the page."""
    return [_route(_path(file), file) for file in sorted(STATIC.iterdir()) if file.suffix in MEDIA_TYPES]


def _path(file: Path) -> str:
    return "/" if file.name == "index.html" else f"/static/{file.name}"


def _route(path: str, file: Path) -> Route:
    body = file.read_bytes()
    tag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
    headers = _headers(MEDIA_TYPES[file.suffix], tag)

    async def serve(request: Request) -> Response:
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        return Response(body, headers=headers)

    return Route(path, serve, methods=["GET"], include_in_schema=False)


def _headers(media_type: str, tag: str) -> dict[str, str]:
    return {
        "Content-Type": media_type,
        "Content-Security-Policy": CONTENT_SECURITY_POLICY,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "X-DNS-Prefetch-Control": "off",
        "Cross-Origin-Opener-Policy": "same-origin",
        "Cross-Origin-Resource-Policy": "same-origin",
        "Cache-Control": "no-cache",  # asked for again each time, and 304 while the program stays the same
        "ETag": tag,
    }
