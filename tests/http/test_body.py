"""Forms with files: what is read, and what is refused."""

from __future__ import annotations

import asyncio
import contextlib
import json
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.types import Message

from ingot.errors import BadRequest, ConfigError, RequestTooSlow
from ingot.http import body as bodies
from ingot.http.body import (
    FORM_FIELD_BYTES,
    MOST_FORM_PARTS,
    body_pieces,
    decode_json,
    nesting_depth,
    read_form,
    structural_brackets,
)
from tests.http.asgi import Call, call
from tests.http.scripted import ScriptedEngine, build_app, settings

texts = st.text(st.sampled_from('[]{}"\\a,:'), max_size=6)
values = st.recursive(
    st.one_of(st.none(), st.integers(), texts),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(texts, inner, max_size=3)),
)


def true_depth(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + max(map(true_depth, value.values()), default=0)
    return 1 + max(map(true_depth, value), default=0) if isinstance(value, list) else 0


@given(values)
def test_depth_is_that_of_the_value_whatever_its_strings_hold(value: Any) -> None:
    assert nesting_depth(structural_brackets(json.dumps(value).encode()), 100) == true_depth(value)


@given(values, st.integers(1, 5))
def test_what_is_not_too_deep_is_decoded(value: Any, limit: int) -> None:
    raw = json.dumps(value).encode()
    if true_depth(value) > limit:
        with pytest.raises(BadRequest, match="nested"):
            decode_json(raw, limit)
    else:
        assert decode_json(raw, limit) == value


@given(st.binary(max_size=40) | st.text(st.sampled_from('[]{}"\\1,:'), max_size=40).map(str.encode))
def test_any_bytes_are_decoded_or_refused(raw: bytes) -> None:
    with contextlib.suppress(BadRequest):
        decode_json(raw, 8)


@pytest.mark.parametrize(
    "raw",
    [
        b"[" * 4_000_000,
        b"[],[" * 1_000_000,
        b'"[",' * 1_000_000,
        b'"' * 4_000_001,
        b"\\" * 4_000_000,
        b"[" + b"[]," * 1_000_000 + b"0]",
        b"[" + b"{}," * 1_000_000 + b"0]",
    ],
    ids=lambda raw: raw[:5].decode(),
)
def test_a_large_body_of_nothing_but_structure_is_refused_before_it_is_built(raw: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(BadRequest):
            decode_json(raw, 64)
        assert tracemalloc.get_traced_memory()[1] < 60_000_000
    finally:
        tracemalloc.stop()


def test_a_large_text_full_of_brackets_is_taken() -> None:
    value = {"messages": [{"content": 'if (a[0] == "{x}") { return [\\"]; } ' * 50_000}]}
    assert decode_json(json.dumps(value).encode(), 64) == value


@pytest.mark.anyio
@pytest.mark.parametrize(
    "headers",
    [
        {"content-type": "text/plain"},
        {"content-type": ""},
        {"content-type": "application/x-www-form-urlencoded"},
        {"content-type": "application/json; charset=latin-1"},
        {"content-encoding": "gzip"},
    ],
)
async def test_only_json_is_taken(headers: dict[str, str]) -> None:
    app = build_app(ScriptedEngine(), settings())  # type: ignore[arg-type]
    assert (await call(app, path="/v1/tokenize", body={"prompt": "x"}, headers=headers)).status == 415


@pytest.mark.anyio
@pytest.mark.parametrize(
    "media", ["application/json", "Application/JSON; charset=UTF-8", 'application/json;charset="utf-8"']
)
async def test_json_may_say_that_it_is_utf8(media: str) -> None:
    app = build_app(ScriptedEngine(), settings())  # type: ignore[arg-type]
    made = await call(app, path="/v1/tokenize", body={"prompt": "x"}, headers={"content-type": media})
    assert made.status == 200


@pytest.mark.anyio
async def test_a_client_that_stops_in_mid_body_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "BODY_SILENCE_S", 0.01)
    made = Call(build_app(ScriptedEngine(), settings()))  # type: ignore[arg-type]
    made._incoming.get_nowait()
    made._incoming.put_nowait({"type": "http.request", "body": b"{", "more_body": True})
    async with made:
        await made.done()
    assert (made.status, made.json()["error"]["code"]) == (408, "request_timeout")


@pytest.mark.anyio
async def test_a_client_that_leaves_in_mid_body_gets_no_answer() -> None:
    made = Call(build_app(ScriptedEngine(), settings()))  # type: ignore[arg-type]
    made._incoming.get_nowait()
    made.leave()
    async with made:
        await made.done()
    assert made.status == 0


async def slowly(
    monkeypatch: pytest.MonkeyPatch, sizes: list[int], pause_s: float
) -> tuple[list[int], type[BaseException] | None]:
    """Which pieces of a body are taken of a client that pauses before each, by a clock of our own."""
    now = 0.0
    monkeypatch.setattr(bodies, "body_clock", lambda: now)
    left = list(sizes)

    async def receive() -> Message:
        nonlocal now
        now += pause_s
        piece = left.pop(0)
        return {"type": "http.request", "body": b"x" * piece, "more_body": bool(left)}

    accepted: list[int] = []
    try:
        async for piece in body_pieces(receive):
            accepted.append(len(piece))
    except RequestTooSlow:
        return accepted, RequestTooSlow
    return accepted, None


@pytest.mark.anyio
async def test_a_body_that_trickles_in_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    accepted, ended = await slowly(monkeypatch, [1] * 1000, 19.0)
    assert ended is RequestTooSlow
    assert len(accepted) < 3


@pytest.mark.anyio
async def test_a_body_that_comes_at_a_modest_pace_is_taken_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = [bodies.SLOWEST_BYTES_A_SECOND] * 600
    assert await slowly(monkeypatch, sizes, 1.0) == (sizes, None)


def held_app(**changes: Any) -> Any:
    return build_app(ScriptedEngine(None), settings(**changes))  # type: ignore[arg-type]


def padded(size: int) -> bytes:
    return b'{"messages": [{"role": "user", "content": "Hi"}]}'.ljust(size)


@pytest.mark.anyio
async def test_bodies_over_what_is_held_at_once_are_refused_until_others_are_read() -> None:
    app = held_app(max_body_bytes=1000, max_held_bytes=1500)
    half = Call(app, body=padded(900))
    half._incoming.get_nowait()
    half._incoming.put_nowait({"type": "http.request", "body": padded(900), "more_body": True})
    async with half:
        await until(lambda: app.state.service.shared_state.bodies.held == 900)
        refused = await call(app, path="/v1/tokenize", body=padded(900))
        assert refused.status == 503
        assert refused.headers["retry-after"]
        assert (await call(app, path="/v1/tokenize", body=b'{"prompt": "Hi"}')).status == 200
        half.leave()
        await half.done()
    assert app.state.service.shared_state.bodies.held == 0
    assert (await call(app, path="/v1/tokenize", body=b'{"prompt": "Hi"}'.ljust(900))).status == 200


@pytest.mark.anyio
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
async def test_a_body_is_held_no_longer_than_it_takes_to_read_it(path: str) -> None:
    app = held_app()
    body = {"messages": [{"role": "user", "content": "Hi"}]} if "chat" in path else {"input": "Hi"}
    async with Call(app, path=path, body=body) as running:
        await until(lambda: bool(next(app.state.service.services()).engine.streams))
        assert app.state.service.shared_state.bodies.held == 0
        running.leave()


def test_less_than_a_body_may_have_cannot_be_held() -> None:
    with pytest.raises(ConfigError, match="max_held_bytes"):
        settings(max_body_bytes=1000, max_held_bytes=999)


async def until(happened: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not happened():
            await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b'{"a": "\\ud800"}', "half of a surrogate pair"),
        (b'{"a": "\\udc00 x"}', "half of a surrogate pair"),
        (b'{"a": "\\ud83d\\ud83d\\ude00"}', "half of a surrogate pair"),
        (b'{"a": "x', "it ends too early"),
        (b'{"a": "\\ud83d\\ude00', "it ends too early"),
        (b'{"a": "\\\\ud800', "it ends too early"),
        (b'{"a": 1e999}', "a number is out of range"),
        (b'{"a" 1}', "expected ':' (byte 5)"),
    ],
)
def test_what_is_wrong_with_json_is_said_in_plain_words(raw: bytes, words: str) -> None:
    with pytest.raises(BadRequest) as caught:
        decode_json(raw, 8)
    assert caught.value.message.startswith("The body is not valid JSON: ") and words in caught.value.message


TYPE = "multipart/form-data; boundary=XyZ"


def form(*parts: tuple[str, bytes], preamble: bytes = b"", end: bytes = b"--\r\n") -> bytes:
    body = b"".join(
        b"--XyZ\r\nContent-Disposition: form-data; " + head.encode() + b"\r\n\r\n" + content + b"\r\n"
        for head, content in parts
    )
    return preamble + body + b"--XyZ" + end


def test_fields_are_texts_and_files_are_bytes() -> None:
    raw = form(('name="model"', "höre".encode()), ('name="file"; filename="a.wav"', b"\x00\r\n--Xy\xff"))
    assert read_form(raw, TYPE) == {"model": "höre", "file": b"\x00\r\n--Xy\xff"}


def test_a_name_with_brackets_is_a_list() -> None:
    raw = form(('name="include[]"', b"a"), ('name="include[]"', b"b"))
    assert read_form(raw, TYPE) == {"include": ["a", "b"]}


def test_further_headers_a_quoted_boundary_and_a_preamble_are_taken() -> None:
    head = 'name="file"; filename="a \\"b\\".wav"\r\nContent-Type: audio/wav'
    raw = form((head, b"x"), preamble=b"to whom it may concern\r\n")
    assert read_form(raw, 'multipart/form-data; charset=utf-8; boundary="XyZ"') == {"file": b"x"}


@given(st.binary(max_size=300))
def test_a_file_of_any_bytes_comes_out_as_it_went_in(content: bytes) -> None:
    assert read_form(form(('name="file"; filename="a"', content)), TYPE) == {"file": content}


@given(st.binary(max_size=200))
def test_a_body_of_any_bytes_is_read_or_refused(raw: bytes) -> None:
    with suppress(BadRequest):
        read_form(raw.replace(b"q", b"--XyZ\r\n"), TYPE)


@pytest.mark.parametrize(
    ("raw", "type", "says"),
    [
        (form(('name="a"', b"1")), "multipart/form-data", "must have a boundary"),
        (b"", TYPE, "broken"),
        (b"no form", TYPE, "broken"),
        (form(('name="a"', b"1"))[:-9], TYPE, "broken"),
        (form(('name="a"', b"1"), ('name="a"', b"2")), TYPE, "twice"),
        (form(('name="a"', b"1"), ('name="a[]"', b"2")), TYPE, "both as a list"),
        (form(("nothing", b"1")), TYPE, "no name"),
        (form(('name="a"', b"\xff")), TYPE, "not UTF-8"),
        (form(('name="a"', b"x" * (FORM_FIELD_BYTES + 1))), TYPE, "more than"),
        (form(*((f'name="a{n}"', b"1") for n in range(MOST_FORM_PARTS + 1))), TYPE, "more than 64 parts"),
        (form(('name="a"' + "x" * 9000, b"1")), TYPE, "broken"),
    ],
)
def test_what_is_broken_or_too_much_is_refused(raw: bytes, type: str, says: str) -> None:
    with pytest.raises(BadRequest, match=says):
        read_form(raw, type)
