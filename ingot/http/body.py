"""Request bodies: received in bounded time, and decoded as JSON of bounded depth or as a form (RFC 7578) of bounded
parts."""

from __future__ import annotations

import re
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any, Final

import anyio
import msgspec
from starlette.datastructures import Headers
from starlette.types import Receive, Scope

from ingot.errors import BadRequest, RequestTooSlow, Unavailable, UnsupportedMedia
from ingot.http.edge import ClientGone
from ingot.shares import Shares

JSON_TYPE: Final = "application/json"
FORM_TYPE: Final = "multipart/form-data"
MEDIA_TYPE_NAMES: Final = {JSON_TYPE: "JSON", FORM_TYPE: "a form"}
BODY_SILENCE_S: Final = 30.0  # between two pieces of a body
SLOWEST_BYTES_A_SECOND: Final = 32 << 10  # on average, after the first BODY_SILENCE_S
LARGEST_TENANT_SHARE: Final = 0.75  # of the memory for all bodies, for one key
MOST_CONTAINERS: Final = 250_000  # each costs far more memory and time than its two bytes
BRACKETS: Final = bytes.maketrans(b"{}", b"[]")
NOT_STRUCTURE: Final = bytes(set(range(256)) - set(b'[]{}"'))
HIGH_SURROGATE, LOW_SURROGATE = rb"\\u[dD][89abAB][0-9a-fA-F]{2}", rb"\\u[dD][c-fC-F][0-9a-fA-F]{2}"
HALF_PAIR: Final = re.compile(
    rb"%b(?!%b)|(?<!%b)%b" % (HIGH_SURROGATE, LOW_SURROGATE, rb"\\u[dD][89abAB]..", LOW_SURROGATE)
)
body_clock: Final = time.monotonic


class RequestBody:
    """One request's body. Its reader releases it at once, as the rest of the request may take an hour."""

    def __init__(self, raw: bytes, release: Callable[[], None]) -> None:
        self.raw, self._let_go = raw, release

    def release(self, *, kept: bool = False) -> None:
        """`kept`: the request still uses files of the body, so that its bytes count until the request ends."""
        self.raw = b""
        if not kept:
            self._let_go()


class RequestBodies:
    """The bodies of all requests that are being received or parsed, in at most `most` bytes. A tenant may have only a
    share of that, unless it is one body."""

    def __init__(self, most: int) -> None:
        self._shares = Shares("bodies", most)

    @property
    def held(self) -> int:
        return self._shares.total

    @asynccontextmanager
    async def reading(self, scope: Scope, receive: Receive, wanted: str = JSON_TYPE) -> AsyncIterator[RequestBody]:
        """The whole body, which must be of the media type `wanted`; released at the end of the block at the latest. A
        body that was received before, to find its model, is reused."""
        if (received := scope.get("state", {}).get("body")) is not None:
            yield received
            return
        check_media_type(Headers(scope=scope), wanted)
        size, answer = 0, scope.get("state", {}).get("answer")
        tenant: str = answer.tenant if answer is not None else ""

        def release() -> None:
            nonlocal size
            self._shares.add(tenant, -size)
            size = 0

        async def counted() -> AsyncIterator[bytes]:
            nonlocal size
            async for piece in body_pieces(receive):
                self._take(tenant, len(piece), size)
                size += len(piece)
                yield piece

        try:
            # No reference to the bytes may stay here: their reader releases them.
            yield RequestBody(b"".join([piece async for piece in counted()]), release)
        finally:
            release()

    def _take(self, tenant: str, size: int, before: int) -> None:
        """Count `size` more bytes of a body that has `before` already."""
        most, used = self._shares.capacity, self._shares.held[tenant]
        beyond = tenant and used > before and used + size > most * LARGEST_TENANT_SHARE
        if beyond or self.held + size > most:
            raise Unavailable("The server is receiving as much as it can at once. Try again soon.", retry_after=1)
        self._shares.add(tenant, size)


async def body_pieces(receive: Receive) -> AsyncIterator[bytes]:
    """A body as it arrives. Raises RequestTooSlow where that takes too long."""
    began, size, more = body_clock(), 0, True
    while more:
        with anyio.move_on_after(BODY_SILENCE_S) as patience:
            message = await receive()
        if patience.cancelled_caught:
            raise RequestTooSlow(f"No part of the body arrived for {BODY_SILENCE_S:g} seconds.")
        if message["type"] == "http.disconnect":
            raise ClientGone
        piece, more = message.get("body", b""), message.get("more_body", False)
        size += len(piece)
        if more and is_too_slow(body_clock() - began, size):
            raise RequestTooSlow(
                f"The body arrives too slowly: send at least {SLOWEST_BYTES_A_SECOND >> 10} KiB a second."
            )
        yield piece


def is_too_slow(seconds: float, size: int) -> bool:
    """Whether `size` bytes, sent or received, are too few for that time."""
    return seconds > BODY_SILENCE_S + size / SLOWEST_BYTES_A_SECOND


def check_media_type(headers: Headers, wanted: str = JSON_TYPE) -> None:
    media, _, parameters = headers.get("content-type", "").partition(";")
    if media.strip().lower() != wanted:
        what = MEDIA_TYPE_NAMES.get(wanted, "the file")
        raise UnsupportedMedia(f"Send {what}, with the header 'content-type: {wanted}' (got '{media[:100]}').")
    charset = parameters.replace('"', "").strip().lower()
    if wanted == JSON_TYPE and charset not in ("", "charset=utf-8"):
        raise UnsupportedMedia("JSON is sent in UTF-8.")
    if headers.get("content-encoding", "identity").lower() != "identity":
        raise UnsupportedMedia("Compressed bodies are not supported: send it without content-encoding.")


def decode_json(raw: bytes, max_depth: int) -> Any:
    """The JSON value of `raw`. Where a key is repeated, the last one counts."""
    brackets = structural_brackets(raw)
    if brackets.count(b"[") > MOST_CONTAINERS:
        raise too_many_error()
    if nesting_depth(brackets, max_depth) > max_depth:
        raise too_deep_error(max_depth)
    try:
        return msgspec.json.decode(raw)
    except RecursionError:
        raise too_deep_error(max_depth) from None
    except UnicodeDecodeError:
        raise BadRequest("The body is not UTF-8.") from None
    except msgspec.DecodeError as error:
        raise BadRequest(f"The body is not valid JSON: {json_problem(raw, str(error))}.") from None


def json_problem(raw: bytes, message: str) -> str:
    """What is wrong with `raw`; `message` is the decoder's."""
    if HALF_PAIR.search(raw.replace(b"\\\\", b"")):
        return "a text holds half of a surrogate pair (\\ud800 to \\udfff), which is no character"
    if "truncated" in message:
        return "it ends too early"
    if "out of range" in message:
        return "a number is out of range"
    return message.removeprefix("JSON is malformed: ")


def too_deep_error(max_depth: int) -> BadRequest:
    return BadRequest(f"The body is nested deeper than {max_depth} levels.")


def too_many_error() -> BadRequest:
    return BadRequest(f"The body holds more than {MOST_CONTAINERS} lists and objects.")


def structural_brackets(raw: bytes) -> bytes:
    """The brackets of `raw` outside its strings, all of them as `[` and `]`.

    Works by passes over the whole buffer, as a loop over each byte would delay every stream: escaped quotes are removed
    first, then everything but quotes and brackets, then pairs of adjacent quotes, which change nothing for what
    follows.
    """
    unescaped = raw.replace(b"\\\\", b"").replace(b'\\"', b"")
    left = unescaped.translate(BRACKETS, NOT_STRUCTURE).replace(b'""', b"")
    while b'""' in left:
        left = left.replace(b'""', b"")
    if left.count(b'"') > 2 * MOST_CONTAINERS:
        raise too_many_error()
    return b"".join(left.split(b'"')[::2])


def nesting_depth(brackets: bytes, enough: int) -> int:
    """How deep they nest, counted to one past `enough`. The decoder refuses unmatched ones."""
    depth = 0
    while depth <= enough and b"[]" in brackets:
        brackets = brackets.replace(b"[]", b"")
        depth += 1
    return depth


MOST_FORM_PARTS: Final = 64
FORM_HEAD_BYTES: Final = 8 << 10  # of one part
FORM_FIELD_BYTES: Final = 256 << 10  # of a part that is no file
FORM_BOUNDARY: Final = re.compile(r'(?i)\bboundary=(?:"([^"]{1,70})"|([^\s;"]{1,70}))')
FORM_DISPOSITION: Final = re.compile(rb"(?i)(?:^|\r\n)content-disposition:\s*form-data\b([^\r\n]*)")
FORM_PARAMETER: Final = re.compile(rb'(?i);\s*(name|filename)="((?:[^"\\]|\\.)*)"')

FormValue = str | bytes
"""A field's text, or a file's bytes."""


def read_form(raw: bytes, content_type: str) -> dict[str, FormValue | list[FormValue]]:
    """The values by their names; those of a name that ends in [] are a list. Raises BadRequest."""
    form: dict[str, FormValue | list[FormValue]] = {}
    for name, value in form_parts(raw, form_boundary(content_type)):
        if name.endswith("[]"):
            listed = form.setdefault(name.removesuffix("[]"), [])
            if not isinstance(listed, list):
                raise BadRequest(f"The form has {name} both as a list and as one value.", param=name)
            listed.append(value)
        elif name in form:
            raise BadRequest(f"The form has {name[:100]} twice.", param=name[:100])
        else:
            form[name] = value
    return form


def form_boundary(content_type: str) -> bytes:
    found = FORM_BOUNDARY.search(content_type)
    if found is None:
        raise BadRequest("The content-type of a form must have a boundary.")
    return (found[1] or found[2]).encode("latin-1", "replace")


def form_parts(raw: bytes, boundary: bytes) -> Iterator[tuple[str, FormValue]]:
    between = b"\r\n--" + boundary
    first = raw.find(between[2:])
    if first < 0 or (first > 0 and not raw.startswith(between, first - 2)):
        raise broken_form_error()
    at = first + len(between) - 2
    for _ in range(MOST_FORM_PARTS):
        if raw.startswith(b"--", at):
            return
        begin = raw.find(b"\r\n", at)
        head_end = raw.find(b"\r\n\r\n", at, at + FORM_HEAD_BYTES)
        end = raw.find(between, head_end + 2) if head_end >= 0 else -1
        if begin < 0 or head_end < 0 or end < 0:
            raise broken_form_error()
        yield parse_form_part(raw[begin:head_end], raw[head_end + 4 : end])
        at = end + len(between)
    raise BadRequest(f"The form has more than {MOST_FORM_PARTS} parts.")


def parse_form_part(head: bytes, content: bytes) -> tuple[str, FormValue]:
    disposition = FORM_DISPOSITION.search(head)
    found = FORM_PARAMETER.findall(disposition[1]) if disposition is not None else []
    parameters = {key.lower(): value for key, value in found}
    if b"name" not in parameters:
        raise BadRequest("A part of the form has no name.")
    name = parameters[b"name"].decode("utf-8", "replace")
    if b"filename" in parameters:
        return name, content
    if len(content) > FORM_FIELD_BYTES:
        raise BadRequest(f"{name[:100]} has more than {FORM_FIELD_BYTES} bytes.", param=name[:100])
    try:
        return name, content.decode()
    except UnicodeDecodeError:
        raise BadRequest(f"{name[:100]} is not UTF-8.", param=name[:100]) from None


def broken_form_error() -> BadRequest:
    return BadRequest("The form is broken: a part of it does not begin or end at its boundary.")
