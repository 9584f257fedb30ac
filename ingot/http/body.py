"""A request's body: read in bounded time, and decoded only where it is JSON of bounded depth."""

from __future__ import annotations

import re
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Final

import anyio
import msgspec
from starlette.datastructures import Headers
from starlette.types import Receive, Scope

from ingot.errors import BadRequest, TooSlow, Unavailable, UnsupportedMedia
from ingot.http.edge import ClientGone
from ingot.shares import Shares

JSON: Final = "application/json"
FORM: Final = "multipart/form-data"
NAMES: Final = {JSON: "JSON", FORM: "a form"}
SILENCE_S: Final = 30.0  # between two pieces of a body
SLOWEST: Final = 32 << 10  # bytes a second, on average, once a silence's worth of time has passed
LENT: Final = 0.75  # of what bodies may take in all, to one key
CONTAINERS: Final = 250_000  # each costs far more memory and time than the two bytes it takes to ask for it
BRACKETS: Final = bytes.maketrans(b"{}", b"[]")
NOT_STRUCTURE: Final = bytes(set(range(256)) - set(b'[]{}"'))
HIGH, LOW = rb"\\u[dD][89abAB][0-9a-fA-F]{2}", rb"\\u[dD][c-fC-F][0-9a-fA-F]{2}"
HALF_PAIR: Final = re.compile(rb"%b(?!%b)|(?<!%b)%b" % (HIGH, LOW, rb"\\u[dD][89abAB]..", LOW))
clock: Final = time.monotonic


class Body:
    """One request's, as it was sent. Whoever has read it lets go of it; what comes after may take an hour."""

    def __init__(self, raw: bytes, let_go: Callable[[], None]) -> None:
        self.raw, self._let_go = raw, let_go

    def let_go(self, *, kept: bool = False) -> None:
        """`kept`: the request holds files that came in it, so that its bytes count until that has ended."""
        self.raw = b""
        if not kept:
            self._let_go()


class Bodies:
    """The bodies of all requests that are coming in or being read, in no more bytes than `most`. What is held cannot be
    taken back, so a tenant has no more than a part of that, but for a body that is alone."""

    def __init__(self, most: int) -> None:
        self._shares = Shares("bodies", most)

    @property
    def held(self) -> int:
        return self._shares.total

    @asynccontextmanager
    async def reading(self, scope: Scope, receive: Receive, wanted: str = JSON) -> AsyncIterator[Body]:
        """The whole body, of a request that says it is of the media type `wanted`. It is let go of with the block, if
        not before. One that was read already, to know which model it names, is the same."""
        if (read := scope.get("state", {}).get("body")) is not None:
            yield read
            return
        check_media_type(Headers(scope=scope), wanted)
        size, answer = 0, scope.get("state", {}).get("answer")
        tenant: str = answer.tenant if answer is not None else ""

        def let_go() -> None:
            nonlocal size
            self._shares.add(tenant, -size)
            size = 0

        async def counted() -> AsyncIterator[bytes]:
            nonlocal size
            async for piece in pieces_of(receive):
                self._take(tenant, len(piece), size)
                size += len(piece)
                yield piece

        try:
            # Nothing here may keep the bytes: they belong to whoever reads them.
            yield Body(b"".join([piece async for piece in counted()]), let_go)
        finally:
            let_go()

    def _take(self, tenant: str, size: int, before: int) -> None:
        """So many bytes more of a body of which there are some already."""
        most, held = self._shares.capacity, self._shares.held[tenant]
        beyond = tenant and held > before and held + size > most * LENT
        if beyond or self.held + size > most:
            raise Unavailable("The server is reading as much as it can at once. Try again soon.", retry_after=1)
        self._shares.add(tenant, size)


async def pieces_of(receive: Receive) -> AsyncIterator[bytes]:
    """A body as it comes, at no less than the slowest pace."""
    began, size, more = clock(), 0, True
    while more:
        with anyio.move_on_after(SILENCE_S) as patience:
            message = await receive()
        if patience.cancelled_caught:
            raise TooSlow(f"Nothing of the body came for {SILENCE_S:g} seconds.")
        if message["type"] == "http.disconnect":
            raise ClientGone
        piece, more = message.get("body", b""), message.get("more_body", False)
        size += len(piece)
        if more and is_too_slow(clock() - began, size):
            raise TooSlow(f"The body comes too slowly: send at least {SLOWEST >> 10} KiB a second.")
        yield piece


def is_too_slow(seconds: float, size: int) -> bool:
    """Whether so many bytes were too few for that time, whichever way they went."""
    return seconds > SILENCE_S + size / SLOWEST


def check_media_type(headers: Headers, wanted: str = JSON) -> None:
    media, _, parameters = headers.get("content-type", "").partition(";")
    if media.strip().lower() != wanted:
        what = NAMES.get(wanted, "the file")
        raise UnsupportedMedia(f"Send {what}, with the header 'content-type: {wanted}' (got '{media[:100]}').")
    charset = parameters.replace('"', "").strip().lower()
    if wanted == JSON and charset not in ("", "charset=utf-8"):
        raise UnsupportedMedia("JSON is sent in UTF-8.")
    if headers.get("content-encoding", "identity").lower() != "identity":
        raise UnsupportedMedia("Compressed bodies are not taken: send it without content-encoding.")


def decode(raw: bytes, max_depth: int) -> Any:
    """The JSON value of `raw`. Of a key that comes twice the last counts."""
    brackets = brackets_of(raw)
    if brackets.count(b"[") > CONTAINERS:
        raise too_many()
    if depth_of(brackets, max_depth) > max_depth:
        raise too_deep(max_depth)
    try:
        return msgspec.json.decode(raw)
    except RecursionError:
        raise too_deep(max_depth) from None
    except UnicodeDecodeError:
        raise BadRequest("The body is not UTF-8.") from None
    except msgspec.DecodeError as error:
        raise BadRequest(f"The body is not valid JSON: {json_problem(raw, str(error))}.") from None


def json_problem(raw: bytes, said: str) -> str:
    """What is wrong with `raw`, of which the decoder says what it noticed first."""
    if HALF_PAIR.search(raw.replace(b"\\\\", b"")):
        return "a text holds half of a surrogate pair (\\ud800 to \\udfff), which is no character"
    if "truncated" in said:
        return "it ends too early"
    if "out of range" in said:
        return "a number is larger than any that is taken"
    return said.removeprefix("JSON is malformed: ")


def too_deep(max_depth: int) -> BadRequest:
    return BadRequest(f"The body is nested deeper than {max_depth} levels.")


def too_many() -> BadRequest:
    return BadRequest(f"The body holds more than {CONTAINERS} lists and objects.")


def brackets_of(raw: bytes) -> bytes:
    """The brackets of `raw` outside its strings, all of them written `[` and `]`.

    Works by passes over the whole buffer, as a walk over each byte would hold up every stream while it lasts: escaped
    quotes go first, then everything but quotes and brackets. Two quotes that have come to stand side by side go too:
    what follows them stays as much inside or outside a string as it was.
    """
    unescaped = raw.replace(b"\\\\", b"").replace(b'\\"', b"")
    left = unescaped.translate(BRACKETS, NOT_STRUCTURE).replace(b'""', b"")
    while b'""' in left:
        left = left.replace(b'""', b"")
    if left.count(b'"') > 2 * CONTAINERS:
        raise too_many()
    return b"".join(left.split(b'"')[::2])


def depth_of(brackets: bytes, enough: int) -> int:
    """How deep they nest, counted no further than one past `enough`. Unmatched ones are the decoder's to refuse."""
    depth = 0
    while depth <= enough and b"[]" in brackets:
        brackets = brackets.replace(b"[]", b"")
        depth += 1
    return depth
