from __future__ import annotations

import contextlib
import itertools
import json
import socket
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingot.cli.client import EventLines, ServerClient, ServerError, chunk_delta
from ingot.errors import ConfigError
from tests.cli.scripted import Answer, Script, scripted_server
from tests.waiting import WAIT_S

BODY = {"stream": True, "messages": []}


def texts(client: ServerClient) -> list[str]:
    return [text for chunk in client.stream("chat/completions", BODY) if (text := chunk_delta(chunk.data)[1])]


def test_a_stream_arrives_chunk_by_chunk_with_growing_times() -> None:
    with scripted_server(Script()) as script:
        before = time.perf_counter()
        chunks = list(ServerClient(script.url).stream("chat/completions", BODY))
    times = [before, *(chunk.at for chunk in chunks), time.perf_counter()]
    assert [chunk_delta(chunk.data)[1] for chunk in chunks] == ["Hello", " there", ""]
    assert times == sorted(times)


def test_the_base_path_is_used_as_given_and_v1_is_added_to_a_bare_address() -> None:
    with scripted_server(Script()) as script:
        for url in (script.url, f"{script.url}/", f"{script.url}/v1", f"{script.url}/v1/"):
            assert ServerClient(url).get("models")["data"][0]["id"] == "scripted"
        with pytest.raises(ServerError, match=r"no such path: /other/models \(HTTP 404\)"):
            ServerClient(f"{script.url}/other").get("models")


def test_the_key_is_sent_as_a_bearer_token() -> None:
    with scripted_server(Script()) as script:
        ServerClient(script.url, "sesame").get("models")
        ServerClient(script.url).get("models")
    assert [headers.get("authorization") for headers in script.headers] == ["Bearer sesame", None]


def test_leaving_a_stream_closes_its_connection() -> None:
    with scripted_server(Script(answer=lambda _: Answer(hangs=True))) as script:
        with contextlib.closing(ServerClient(script.url).stream("chat/completions", BODY)) as chunks:
            next(chunks)
        assert script.left.wait(WAIT_S)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (Answer(status=429, body=b'{"error": {"message": "too many"}}'), r"too many \(HTTP 429\)"),
        (Answer(status=502, body=b"<html>bad gateway"), r"<html>bad gateway \(HTTP 502\)"),
        (Answer(status=503), r"Service Unavailable \(HTTP 503\)"),
        (Answer(error="the engine broke"), "the engine broke"),
        (Answer(breaks_off=True), "closed|failed"),
    ],
)
def test_what_goes_wrong_is_one_readable_error(answer: Answer, message: str) -> None:
    with scripted_server(Script(answer=lambda _: answer)) as script, pytest.raises(ServerError, match=message):
        texts(ServerClient(script.url))


def test_a_server_that_is_not_there_is_said_so() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(ServerError, match=f"no server answers at http://127.0.0.1:{port}"):
        ServerClient(f"http://127.0.0.1:{port}").get("models")


def test_a_silent_server_is_given_up_on() -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        url = f"http://127.0.0.1:{mute.getsockname()[1]}"
        with pytest.raises(ServerError, match=r"did not answer for 0\.05 s"):
            ServerClient(url, timeout=0.05).get("models")


@pytest.mark.parametrize("url", ["ftp://x", "http://", "x:1", "http://u:p@x", "http://x:99999", "http://x/?q=1"])
def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ConfigError):
        ServerClient(url)


@given(
    events=st.lists(st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=2), max_size=6),
    ends=st.sampled_from([b"\n", b"\r\n"]),
    cuts=st.lists(st.integers(0, 400)),
)
def test_events_are_the_same_however_the_bytes_are_cut(
    events: list[dict[str, str]], ends: bytes, cuts: list[int]
) -> None:
    wire = b"".join(b": note" + ends + b"data: " + json.dumps(e).encode() + ends + ends for e in events)
    places = sorted({0, len(wire), *(cut for cut in cuts if cut < len(wire))})
    lines = EventLines()
    pieces = [wire[a:b] for a, b in itertools.pairwise(places)]
    assert [json.loads(data) for piece in pieces for data in lines.feed(piece)] == events
