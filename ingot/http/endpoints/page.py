"""The pages, to chat and to watch the engine: their files, read once, served from memory.

A path is looked up among the files that were there at the start, so that no path can lead out of the folder. They
are public: they hold no secret, ask for the key themselves, and everything they then call is guarded.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from hashlib import blake2b
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import PurePath
from typing import Final

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

PAGE_PATHS: Final = {
    "index.html": "/",
    "live.html": "/live",
    # A service worker controls what is below its own address, and an app is what is below its manifest's.
    "worker.js": "/worker.js",
    "manifest.webmanifest": "/manifest.webmanifest",
}
PAGE_HEADERS: Final = {
    "content-security-policy": (
        "default-src 'self'; script-src 'self'; style-src 'self'; object-src 'none'; base-uri 'none'; "
        "img-src 'self' data: blob:; media-src 'self' data: blob:; "  # files that the user attaches
        "form-action 'none'; frame-ancestors 'none'"
    ),
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}
CHECKED_FILE: Final = "no-cache"
"""Asked about each time, and answered with 304 while it is the same: a new version shows at once."""
LASTING_FILE: Final = "public, max-age=31536000, immutable"
# Named here rather than guessed: a host's own table of types may be wrong, and `nosniff` makes that fatal.
PAGE_MEDIA_TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".json": "application/json",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".woff2": "font/woff2",
    ".webmanifest": "application/manifest+json",
    ".txt": "text/plain; charset=utf-8",
}


def page_routes() -> list[Route]:
    """The pages' own addresses, and `/static/<path>` for every file. Pages refer to their files as
    `/static/<version>/<path>`, which browsers hold on to; the version changes with any file."""
    contents = {path: file.read_bytes() for path, file in sorted(page_files(files("ingot.web") / "static"))}
    digest = blake2b(digest_size=8)
    for path, content in contents.items():
        digest.update(b"%s %d\n%s" % (path.encode(), len(content), content))
    version = digest.hexdigest()
    for path in contents:
        if path.endswith((".html", ".webmanifest")):
            contents[path] = contents[path].replace(b'"static/', b'"static/%s/' % version.encode())
    served = {path: page_file(path, content) for path, content in contents.items()}

    async def serve(request: Request) -> Response:
        prefix, _, path = request.path_params["path"].partition("/")
        if prefix == version and path in served:
            return served[path](request, LASTING_FILE)
        if (own := served.get(request.path_params["path"])) is None:
            raise HTTPException(404)
        return own(request, CHECKED_FILE)

    pages = [Route(PAGE_PATHS[path], page_endpoint(file)) for path, file in served.items() if path in PAGE_PATHS]
    return [*pages, Route("/static/{path:path}", serve)]


def page_files(folder: Traversable, under: str = "") -> Iterator[tuple[str, Traversable]]:
    """The files of a folder and of those in it, by their paths."""
    for file in folder.iterdir() if folder.is_dir() else ():
        if file.is_dir():
            yield from page_files(file, f"{under}{file.name}/")
        elif PurePath(file.name).suffix in PAGE_MEDIA_TYPES:
            yield f"{under}{file.name}", file


ServeFile = Callable[[Request, str], Response]
"""Takes what is said of caching."""


def page_file(path: str, content: bytes) -> ServeFile:
    etag = f'"{blake2b(content, digest_size=12).hexdigest()}"'
    headers = PAGE_HEADERS | {"content-type": PAGE_MEDIA_TYPES[PurePath(path).suffix], "etag": etag}

    def serve(request: Request, caching: str) -> Response:
        own = headers | {"cache-control": caching}
        if request.headers.get("if-none-match") == etag:
            return Response(status_code=304, headers=own)
        return Response(content, headers=own)

    return serve


def page_endpoint(file: ServeFile) -> Callable[[Request], Awaitable[Response]]:
    async def serve(request: Request) -> Response:
        return file(request, CHECKED_FILE)

    return serve
