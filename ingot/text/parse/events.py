"""What comes out of a parsed answer: plain, frozen values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    text: str


@dataclass(frozen=True, slots=True)
class ContentDelta:
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallBegan:
    """Announces a call, once. Calls come one after another, numbered from 0. `in_thinking`: it was written there."""

    index: int
    id: str
    name: str
    in_thinking: bool = False


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """A piece of a call's arguments. The pieces of a complete call make up one JSON object."""

    index: int
    fragment: str


@dataclass(frozen=True, slots=True)
class ToolCallEnded:
    """Exactly one for each call that began.

    Not `complete`: the answer ended, or went on as something else, within the arguments. They are then the
    beginning of a JSON object, as far as it was certain; nothing was made up to close it.
    """

    index: int
    complete: bool = True


ParsedEvent = ReasoningDelta | ContentDelta | ToolCallBegan | ToolCallArguments | ToolCallEnded


@dataclass(frozen=True, slots=True)
class ToolSchema:
    """A tool as the parser needs it: its name, the JSON schema of its arguments, and whether every call of it keeps to
    that because a grammar sees to it."""

    name: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    strict: bool = False


@dataclass(frozen=True, slots=True)
class PastCall:
    """A past call, to be written again."""

    name: str
    arguments: Mapping[str, Any]
    id: str | None = None


def merged(events: Iterable[ParsedEvent]) -> list[ParsedEvent]:
    """The same events with neighbouring pieces of one text or one call joined.

    This is the normal form: however an answer was cut into pieces, its merged events are the same.
    """
    joined: list[ParsedEvent] = []
    run: list[str] = []
    for event in events:
        piece = _piece(event)
        if piece and joined and run and _continues(joined[-1], event):
            run.append(piece)
            continue
        _settle(joined, run)
        joined.append(event)
        run = [piece] if piece else []
    _settle(joined, run)
    return joined


def _piece(event: ParsedEvent) -> str:
    match event:
        case ReasoningDelta() | ContentDelta():
            return event.text
        case ToolCallArguments():
            return event.fragment
    return ""


def _continues(before: ParsedEvent, event: ParsedEvent) -> bool:
    if isinstance(before, ToolCallArguments) and isinstance(event, ToolCallArguments):
        return before.index == event.index
    return type(before) is type(event)


def _settle(joined: list[ParsedEvent], run: list[str]) -> None:
    if len(run) < 2:
        return
    match last := joined[-1]:
        case ReasoningDelta() | ContentDelta():
            joined[-1] = replace(last, text="".join(run))
        case ToolCallArguments():
            joined[-1] = replace(last, fragment="".join(run))
