"""A row that lacks something would be a route that nobody answers, or an answer that nobody described."""

from __future__ import annotations

from collections import Counter
from importlib import import_module
from typing import get_args

import msgspec
import pytest

from ingot.config import KINDS
from ingot.errors import Unavailable
from ingot.http.app import SHARED_WORKS
from ingot.http.streaming import FRAMINGS, framing_of
from ingot.protocol.errors import error_body, error_event
from ingot.protocol.operations import OPERATIONS, WIRES, FramingName, Operation, Wire, Work, load, operation_at, wire_at

rows = pytest.mark.parametrize("row", [pytest.param(each, id=each.name) for each in OPERATIONS])


@rows
def test_a_row_says_who_answers_and_what_goes_in_and_out(row: Operation) -> None:
    assert row.kind in {*KINDS, "any", "server"}
    assert row.work in SHARED_WORKS or row.work == "own"
    assert (row.reader is not None) == (row.work != "own")
    assert (row.shape.body is not None) == (row.takes in ("json", "form"))
    assert row.shape.answer is not None or row.shape.media or row.shape.texts
    assert row.summary.endswith(".") and row.path.startswith("/")
    assert row.runs == bool(row.span), "what an engine works on is counted under a name"


@rows
def test_what_a_row_names_is_there(row: Operation) -> None:
    shape = row.shape
    texts = shape.texts if isinstance(shape.texts, str) else None
    for named in (row.reader, shape.body, shape.answer, shape.chunk, shape.events, shape.query, texts):
        if named is not None:
            assert load(named)


@rows
def test_a_stream_is_framed_as_its_protocol_frames_streams(row: Operation) -> None:
    streams = row.shape.chunk is not None or row.shape.events is not None
    assert (row.shape.events is not None) == (streams and row.framing == "named events")
    assert streams or row.begins is None, "what never streams begins no stream"
    assert framing_of(row).media_type == FRAMINGS[row.framing].media_type


def test_endpoints_that_operations_share_are_there() -> None:
    for module, name in SHARED_WORKS.values():
        assert callable(getattr(import_module(f"ingot.http.endpoints.{module}"), name))


def test_no_two_rows_are_alike() -> None:
    assert max(Counter(row.name for row in OPERATIONS).values()) == 1
    assert max(Counter((row.method, row.path) for row in OPERATIONS).values()) == 1
    prefixes = [row.id_prefix for row in OPERATIONS if row.id_prefix != "req-"]
    assert len(prefixes) == len(set(prefixes))


def test_every_way_of_work_and_of_framing_is_known_and_used() -> None:
    assert {row.work for row in OPERATIONS} == {*SHARED_WORKS, "own"} == set(get_args(Work))
    assert {row.framing for row in OPERATIONS} == FRAMINGS.keys() == set(get_args(FramingName))


@pytest.mark.parametrize("wire", WIRES)
def test_every_protocol_has_rows_and_words_for_errors(wire: Wire) -> None:
    paths = [row.path for row in OPERATIONS if row.wire is wire]
    assert paths and wire_at(f"{wire.prefix}/nowhere") is wire
    for result in (error_body, error_event):
        body = result(Unavailable("Too much to do."), paths[0], "req-1")
        assert b"Too much to do." in msgspec.json.encode(body)


def test_an_address_is_that_of_the_protocol_which_it_begins_with() -> None:
    message = {
        path: wire_at(path).error for path in ("/v1/messages", "/v1/messages/count_tokens", "/api/nothing", "/v1/x")
    }
    assert [name.partition(":")[2] for name in message.values()] == [
        *("AnthropicError", "AnthropicError", "OllamaError", "ErrorBody"),
    ]
    assert wire_at("/v1/messagesandmore").error == wire_at("/v1/x").error
    assert operation_at("/v1/chat/completions") is OPERATIONS[0] and operation_at("/nowhere") is None
