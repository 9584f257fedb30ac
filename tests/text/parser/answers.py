"""Answers read in one go or in pieces, and their events in a short form."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Sequence
from typing import Any

from ingot.text.parser.events import (
    ContentDelta,
    ParsedEvent,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallBegan,
    ToolCallEnded,
    ToolSchema,
    call_id_maker,
    merge_events,
)
from ingot.text.parser.parser import Parser, ThinkingStart
from ingot.text.tool_formats.format import Format

TOOLS = (
    ToolSchema(
        "get_weather",
        {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer"},
                "scale": {"type": "number"},
                "metric": {"type": "boolean"},
                "tags": {"type": "array", "items": {"type": "string"}},
                "where": {"type": "object"},
                "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                "unit": {"enum": ["C", "F"]},
            },
        },
    ),
    ToolSchema(
        "write_file",
        {"type": "object", "properties": {"path": {"type": "string"}, "content": {"type": "string"}}},
    ),
    ToolSchema("ping"),
)


def new_parser(
    format: Format, tools: Sequence[ToolSchema] = TOOLS, thinking: ThinkingStart = ThinkingStart.UNOPENED
) -> Parser:
    numbers = itertools.count()
    ids = call_id_maker(format.ids, random=lambda size: f"{next(numbers):0{size}}")
    return Parser(format, tools=tools, thinking=thinking, ids=ids)


def parsed(
    format: Format,
    pieces: Iterable[str],
    tools: Sequence[ToolSchema] = TOOLS,
    thinking: ThinkingStart = ThinkingStart.UNOPENED,
) -> list[ParsedEvent]:
    parser = new_parser(format, tools, thinking)
    events = [event for piece in pieces for event in parser.push(piece)]
    return merge_events(events + parser.flush())


def cut(text: str, offsets: Iterable[int]) -> list[str]:
    bounds = [0, *sorted({offset for offset in offsets if 0 < offset < len(text)}), len(text)]
    return [text[start:stop] for start, stop in itertools.pairwise(bounds)]


def summary(events: Iterable[ParsedEvent]) -> list[tuple[Any, ...]]:
    """("thinks", text), ("says", text), ("calls", name, arguments), ("breaks", name, arguments as text)."""
    story: list[tuple[Any, ...]] = []
    name, fragments = "", []
    for event in events:
        match event:
            case ReasoningDelta():
                story.append(("thinks", event.text))
            case ContentDelta():
                story.append(("says", event.text))
            case ToolCallBegan():
                name, fragments = event.name, []
            case ToolCallArguments():
                fragments.append(event.fragment)
            case ToolCallEnded(complete=True):
                story.append(("calls", name, json.loads("".join(fragments))))
            case ToolCallEnded():
                story.append(("breaks", name, "".join(fragments)))
    return story


def check_order(events: Sequence[ParsedEvent]) -> None:
    """Calls are numbered from 0, announced once, ended once, and never interleaved; ids differ."""
    running: int | None = None
    ids: list[str] = []
    for event in events:
        match event:
            case ToolCallBegan():
                assert running is None and event.index == len(ids)
                running = event.index
                ids.append(event.id)
            case ToolCallArguments():
                assert event.index == running and event.fragment
            case ToolCallEnded():
                assert event.index == running
                running = None
            case _:
                assert running is None and event.text
    assert running is None and len(set(ids)) == len(ids)
