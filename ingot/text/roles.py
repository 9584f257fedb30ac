"""Who speaks when, put in an order that a template can render without losing or moving anything.

Strict templates refuse what clients send every day: a system message amid the conversation, two user messages in a
row. Others take such a message and drop it, or move it to the front, where it changes every token that was computed.
What a template does is known from trying it (`traits`); a template that can render the messages gets them as they are.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from ingot.text.messages import plain_text
from ingot.text.traits import Traits
from ingot.text.witness import History


@dataclass(frozen=True, slots=True)
class Line:
    """A message as the template is to get it, and which of the client's it was made of."""

    message: dict[str, Any]
    sources: tuple[int, ...]
    folded: bool = False  # another role's words, in a place where only this role may speak

    @property
    def role(self) -> str:
        return str(self.message.get("role"))


def in_order(lines: Iterable[Line], traits: Traits, history: History) -> tuple[list[Line], tuple[str, ...]]:
    """The lines as the template can take them, and the names of what was done to them."""
    done: set[str] = set()
    placed: list[Line] = []
    for line in lines:
        if line.role == "developer" and not traits.developer:
            line = replace(line, message={**line.message, "role": "system"})
        if line.role == "system" and _misplaced(placed, traits, history):
            line = _as_user(line)
            done.add("system-folded")
        if placed and placed[-1].role == "tool" and line.role == "user" and not traits.user_after_results:
            placed.append(Line({"role": "assistant", "content": ""}, ()))
            done.add("empty-answer-inserted")
        if placed and _belong_together(placed[-1], line, traits):
            if not line.folded and not placed[-1].folded:
                done.add(f"{line.role}-merged")
            placed[-1] = _merged(placed[-1], line)
        else:
            placed.append(line)
    return placed, tuple(sorted(done))


def _misplaced(before: list[Line], traits: Traits, history: History) -> bool:
    if all(line.role == "system" for line in before):
        return not traits.system
    return traits.late_system == "lost" or (traits.late_system == "moved" and history == "stable")


def _as_user(line: Line) -> Line:
    """Tags keep the model from taking the words for the user's."""
    text = plain_text(line.message.get("content"))
    return replace(line, message={"role": "user", "content": f"<system>\n{text}\n</system>"}, folded=True)


def _belong_together(first: Line, second: Line, traits: Traits) -> bool:
    if first.role != second.role:
        return False
    if first.role == "user" and (first.folded or second.folded):
        return True
    return first.role in ("system", "user", "assistant") and first.role not in traits.repeats


def _merged(first: Line, second: Line) -> Line:
    message = {**first.message, "content": _joined(first.message.get("content"), second.message.get("content"))}
    if calls := [*(first.message.get("tool_calls") or ()), *(second.message.get("tool_calls") or ())]:
        message["tool_calls"] = calls
    if thought := [text for each in (first, second) if (text := each.message.get("reasoning_content"))]:
        message["reasoning_content"] = "\n\n".join(thought)
    return Line(message, first.sources + second.sources, first.folded and second.folded)


def _joined(first: Any, second: Any) -> Any:
    if not first or not second:
        return first or second
    if isinstance(first, str) and isinstance(second, str):
        return f"{first}\n\n{second}"
    return [*_parts(first), {"type": "text", "text": "\n\n"}, *_parts(second)]


def _parts(content: Any) -> list[Any]:
    return content if isinstance(content, list) else [{"type": "text", "text": content}]
