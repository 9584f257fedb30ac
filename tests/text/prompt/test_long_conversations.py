"""A conversation takes work in proportion to its length, however many messages it has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from ingot.text.chat_template.messages import TemplateMessage, order_messages
from ingot.text.chat_template.sandbox import TextRun
from ingot.text.chat_template.traits import TemplateTraits
from ingot.text.prompt.conversation import check_calls_shown, count_message_pieces
from ingot.text.prompt.tool_prompt import teach_tools
from ingot.text.tool_formats.registry import format_by_name
from tests.text.work import steps, work

FEW, TIMES = 60, 8
MOST = 2 * TIMES  # work in proportion to the square would be 8 times 8
STRICT = TemplateTraits(late_system="lost", repeats=frozenset(), results=False)


def messages_of(role: str, count: int) -> list[TemplateMessage]:
    return [TemplateMessage({"role": role, "content": "a" * 50}, (at,)) for at in range(count)]


def calling(count: int) -> tuple[list[TemplateMessage], list[TextRun]]:
    """Each calls another function, which has to be looked for."""
    calls = [[{"function": {"name": f"function-{at}", "arguments": "{}"}}] for at in range(count)]
    lines = [TemplateMessage({"role": "assistant", "tool_calls": each}, (at,)) for at, each in enumerate(calls)]
    return lines, [TextRun(at, f"{'a' * 50}<function-{at}>") for at in range(count)]


def merged(count: int) -> Callable[[], Any]:
    lines = messages_of("user", count)
    return lambda: order_messages(lines, STRICT, "stable")


def instructed(count: int) -> Callable[[], Any]:
    lines = messages_of("system", count)
    return lambda: order_messages(lines, TemplateTraits(late_system="lost"), "stable")


def taught(count: int) -> Callable[[], Any]:
    lines, format = messages_of("tool", count), format_by_name("hermes")
    return lambda: teach_tools(lines, (), STRICT, format)


def shown(count: int) -> Callable[[], Any]:
    lines, pieces = calling(count)
    return lambda: check_calls_shown(lines, pieces, {})


def placed(count: int) -> Callable[[], Any]:
    pieces: Sequence[TextRun] = [TextRun(at, "a") for at in range(count)]
    return lambda: count_message_pieces(pieces)


@pytest.mark.parametrize("made", [merged, instructed, taught, shown, placed])
def test_work_grows_no_faster_than_messages_do(made: Callable[[int], Callable[[], Any]]) -> None:
    for count in (steps, work):
        assert count(made(FEW * TIMES)) < MOST * count(made(FEW))
