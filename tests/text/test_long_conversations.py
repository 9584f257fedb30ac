"""A conversation takes work in proportion to its length, however many messages it has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from ingot.text.conversation import check_calls_shown, places_of
from ingot.text.formats.registry import format_named
from ingot.text.roles import Line, in_order
from ingot.text.taught import taught
from ingot.text.traits import Traits
from ingot.text.witness import Piece
from tests.text.work import spent

FEW, TIMES = 3000, 8
MOST = 3 * TIMES  # work in proportion to the square would be 8 times 8
STRICT = Traits(late_system="lost", repeats=frozenset(), results=False)


def spoken(role: str, count: int) -> list[Line]:
    return [Line({"role": role, "content": "a" * 50}, (at,)) for at in range(count)]


def calling(count: int) -> tuple[list[Line], list[Piece]]:
    """Each calls another function, which has to be looked for."""
    calls = [[{"function": {"name": f"function-{at}", "arguments": "{}"}}] for at in range(count)]
    lines = [Line({"role": "assistant", "tool_calls": each}, (at,)) for at, each in enumerate(calls)]
    return lines, [Piece(at, f"{'a' * 50}<function-{at}>") for at in range(count)]


def merged(count: int) -> Callable[[], Any]:
    lines = spoken("user", count)
    return lambda: in_order(lines, STRICT, "stable")


def instructed(count: int) -> Callable[[], Any]:
    lines = spoken("system", count)
    return lambda: in_order(lines, Traits(late_system="lost"), "stable")


def told(count: int) -> Callable[[], Any]:
    lines, format = spoken("tool", count), format_named("hermes")
    return lambda: taught(lines, (), STRICT, format)


def shown(count: int) -> Callable[[], Any]:
    lines, pieces = calling(count)
    return lambda: check_calls_shown(lines, pieces, {})


def placed(count: int) -> Callable[[], Any]:
    pieces: Sequence[Piece] = [Piece(at, "a") for at in range(count)]
    return lambda: places_of(pieces)


@pytest.mark.parametrize("made", [merged, instructed, told, shown, placed])
def test_work_grows_no_faster_than_messages_do(made: Callable[[int], Callable[[], Any]]) -> None:
    few, many = made(FEW), made(FEW * TIMES)
    assert spent(many) < MOST * spent(few)
