"""The web page: its files, read once, served from memory.

A path is looked up among the files that were there at the start, so that no path can lead out of the folder.
"""

from __future__ import annotations

import mimetypes
from dataclasses import dataclass
from hashlib import blake2b
from importlib.resources import files
from importlib.resources.abc import Traversable

from starlette.requests import Request
from starlette.responses import Response

from ingot.errors import NotFound

INDEX = "index.html"
HEADERS = {
    "content-security-policy": (
        "default-src 'self'; script-src 'self'; object-src 'none'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    # Always asked about again, and answered with 304 while it is the same: a new version shows at once.
    "cache-control": "no-cache",
}


@dataclass(frozen=True, slots=True)
class PageFile:
    content: bytes
    media_type: str
    etag: str

    @classmethod
    def read(cls, file: Traversable) -> PageFile:
        content = file.read_bytes()
        media_type = mimetypes.guess_type(file.name)[0] or "application/octet-stream"
        return cls(content, media_type, f'"{blake2b(content, digest_size=12).hexdigest()}"')


class Page:
    def __init__(self, folder: Traversable | None = None) -> None:
        folder = folder if folder is not None else files("ingot.web") / "static"
        found = [file for file in folder.iterdir() if file.is_file()] if folder.is_dir() else []
        self._files = {file.name: PageFile.read(file) for file in found}

    async def index(self, request: Request) -> Response:
        return self._serve(INDEX, request)

    async def file(self, request: Request) -> Response:
        return self._serve(request.path_params["name"], request)

    def _serve(self, name: str, request: Request) -> Response:
        file = self._files.get(name)
        if file is None:
            raise NotFound("There is no such file of the page.")
        headers = HEADERS | {"etag": file.etag}
        if request.headers.get("if-none-match") == file.etag:
            return Response(status_code=304, headers=headers)
        return Response(file.content, headers=headers, media_type=file.media_type)
