"""What a body says of its model, whatever else is in it."""

from __future__ import annotations

import json
from math import inf
from typing import Any

import pytest

from ingot.http.fleet.wanted import Wanted


@pytest.mark.parametrize(
    ("said", "seconds"),
    [
        ({}, None),
        ({"keep_alive": "5m"}, 300.0),
        ({"keep_alive": "1h30m"}, 5400.0),
        ({"keep_alive": "250ms"}, 0.25),
        ({"keep_alive": 0}, 0.0),
        ({"keep_alive": "0"}, 0.0),
        ({"keep_alive": -1}, inf),
        ({"keep_alive": "-1m"}, inf),
        ({"keep_alive": "soon"}, None),
        ({"keep_alive": True}, None),
        ({"keep_alive": [1]}, None),
        ({"ttl": 60}, 60.0),
        ({"ttl": "60"}, None),
    ],
)
def test_how_long_a_model_is_to_stay(said: dict[str, Any], seconds: float | None) -> None:
    assert Wanted.of(json.dumps(said).encode()).kept_s == seconds


@pytest.mark.parametrize(
    ("said", "seconds"),
    [({}, None), ({"timeout": 2}, 2.0), ({"timeout": 0}, None), ({"timeout": "soon"}, None), ({"timeout": True}, None)],
)
def test_how_long_a_request_may_take(said: dict[str, Any], seconds: float | None) -> None:
    assert Wanted.of(json.dumps(said).encode()).within_s == seconds


@pytest.mark.parametrize(
    ("raw", "name"),
    [
        (b'{"messages": [{"model": "inner"}], "model": "outer"}', "outer"),
        (b'{"name": "older:latest"}', "older"),
        (b'{"model": 5}', None),
        (b"[]", None),
        (b'{"model": "cut', None),
        (b"\xff", None),
        (b'{"a":' * 100_000, None),
    ],
)
def test_which_model_it_names(raw: bytes, name: str | None) -> None:
    assert Wanted.of(raw).named == name
