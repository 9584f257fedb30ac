"""Who speaks when, put in an order that a template can render without losing or moving anything.

Strict templates refuse what clients send every day: a system message amid the conversation, two user messages in a
row. Others take such a message and drop it, or move it to the front, where it changes every token that was computed.
What a template does is known from trying it (`traits`); a template that can render the messages gets them as they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ingot.text.chat_template.messages import plain_text
from ingot.text.chat_template.sandbox import TemplateHistory
from ingot.text.chat_template.traits import TemplateTraits


@dataclass(frozen=True, slots=True)
class TemplateMessage:
    """A message as the template is to get it, and which of the client's it was made of."""

    message: dict[str, Any]
    sources: tuple[int, ...]
    folded: bool = False  # another role's words, in a place where only this role may speak

    @property
    def role(self) -> str:
        return str(self.message.get("role"))


def in_order(
    lines: Iterable[TemplateMessage], traits: TemplateTraits, history: TemplateHistory
) -> tuple[list[TemplateMessage], tuple[str, ...]]:
    """The lines as the template can take them, and the names of what was done to them."""
    done: set[str] = set()
    groups: list[_Group] = []
    begun = False  # somebody but the system has spoken
    for line in lines:
        if line.role == "developer" and not traits.developer:
            line = replace(line, message={**line.message, "role": "system"})
        if line.role == "system" and _misplaced(begun, traits, history):
            line = _as_user(line)
            done.add("system-folded")
        begun = begun or line.role != "system"
        last = groups[-1] if groups else None
        if last is not None and last.role == "tool" and line.role == "user" and not traits.user_after_results:
            last = _Group([TemplateMessage({"role": "assistant", "content": ""}, ())])
            groups.append(last)
            done.add("empty-answer-inserted")
        if last is not None and _belong_together(last, line, traits):
            if not line.folded and not last.folded:
                done.add(f"{line.role}-merged")
            last.lines.append(line)
            last.folded = last.folded and line.folded
        else:
            groups.append(_Group([line], line.folded))
    return [_merged(group) for group in groups], tuple(sorted(done))


@dataclass(slots=True)
class _Group:
    """Lines of one role that make one message."""

    lines: list[TemplateMessage]
    folded: bool = False  # all of them are

    @property
    def role(self) -> str:
        return self.lines[0].role


def _misplaced(begun: bool, traits: TemplateTraits, history: TemplateHistory) -> bool:
    if not begun:
        return not traits.system
    return traits.late_system == "lost" or (traits.late_system == "moved" and history == "stable")


def _as_user(line: TemplateMessage) -> TemplateMessage:
    """Tags keep the model from taking the words for the user's."""
    text = plain_text(line.message.get("content"))
    return replace(line, message={"role": "user", "content": f"<system>\n{text}\n</system>"}, folded=True)


def _belong_together(first: _Group, second: TemplateMessage, traits: TemplateTraits) -> bool:
    if first.role != second.role:
        return False
    if first.role == "user" and (first.folded or second.folded):
        return True
    return first.role in ("system", "user", "assistant") and first.role not in traits.repeats


def _merged(group: _Group) -> TemplateMessage:
    if len(group.lines) == 1:
        return group.lines[0]
    messages = [line.message for line in group.lines]
    message = {**messages[0], "content": _joined([each.get("content") for each in messages])}
    if calls := [call for each in messages for call in each.get("tool_calls") or ()]:
        message["tool_calls"] = calls
    if thought := [text for each in messages if (text := each.get("reasoning_content"))]:
        message["reasoning_content"] = "\n\n".join(thought)
    return TemplateMessage(message, tuple(source for line in group.lines for source in line.sources), group.folded)


def _joined(contents: Sequence[Any]) -> Any:
    said = [content for content in contents if content]
    if len(said) < 2:
        return said[0] if said else contents[-1]
    if all(isinstance(content, str) for content in said):
        return "\n\n".join(said)
    first, *rest = map(_parts, said)
    return [*first, *(part for parts in rest for part in ({"type": "text", "text": "\n\n"}, *parts))]


def _parts(content: Any) -> list[Any]:
    return content if isinstance(content, list) else [{"type": "text", "text": content}]
