"""Pictures, sounds and files, sent to a model that reads text alone.

In a question they are refused: an answer would be to something else. But what tools gave back, and what was said before
the last answer, is in every request that follows, and to refuse it would end the conversation for good. There a few
words stand in their place, and the receipt says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from ingot.errors import Unsupported
from ingot.protocol.schema.bounds import PARTS
from ingot.protocol.schema.fields import BodyReading, Delegate, Kind, ListOf, Schema, Text
from ingot.protocol.schema.terms import Terms
from ingot.protocol.schema.unheeded import note

TEXT_ONLY: Final = "input is not supported: the served model is run on text alone."


@dataclass(frozen=True, slots=True)
class Unseen:
    """What stands in the place of something that the model cannot see."""

    what: str
    cache_control: None = None

    @property
    def text(self) -> str:
        return f"[{self.what} left out: this model reads text alone]"


@dataclass(frozen=True, slots=True)
class MessageList(Delegate):
    """The messages of a conversation, or its items. Of each it is known whether it is past: before the last answer, or
    what a tool gave back. An answer that is to be continued is not the last one."""

    items: ListOf

    def kind(self, terms: Terms) -> Kind:
        return self.items

    def parse(self, value: object, path: str, reading: BodyReading) -> tuple[Any, ...]:
        if not isinstance(value, list) or not self.items.least <= len(value) <= self.items.most:
            raise self.refuse(value, path, reading)
        answered = max((at for at, item in enumerate(value[:-1]) if _is_answer(item)), default=-1)
        return tuple(
            InPast(self.items.item).parse(item, f"{path}.{at}", reading)
            if at <= answered or _is_result(item)
            else self.items.item.parse(item, f"{path}.{at}", reading)
            for at, item in enumerate(value)
        )


@dataclass(frozen=True, slots=True)
class InPast(Delegate):
    """What nobody is asked to answer to any more."""

    item: Kind

    def kind(self, terms: Terms) -> Kind:
        return self.item

    def parse(self, value: object, path: str, reading: BodyReading) -> Any:
        before, reading.past = reading.past, True
        try:
            return self.item.parse(value, path, reading)
        finally:
            reading.past = before


@dataclass(frozen=True, slots=True)
class Images(Delegate):
    """A message's pictures, as a list beside its text."""

    def parse(self, value: object, path: str, reading: BodyReading) -> tuple[Unseen, ...]:
        given = self.kind(reading.terms).parse(value, path, reading)
        if given and not reading.past:
            raise Unsupported(f"{path} (image) {TEXT_ONLY}", param=path)
        if given:
            note(path, reading)
        return tuple(Unseen("image") for _ in given)

    def kind(self, terms: Terms) -> ListOf:
        return ListOf(Text(), PARTS)


def unseen_schema(tag: str, name: str) -> Schema:
    return {"type": "object", "properties": {tag: {"const": name}}, "required": [tag]}


def _is_answer(item: Any) -> bool:
    if not isinstance(item, Mapping):
        return False
    return item.get("role") == "assistant" or item.get("type") in ("function_call", "custom_tool_call", "mcp_call")


def _is_result(item: Any) -> bool:
    if not isinstance(item, Mapping):
        return False
    return item.get("role") == "tool" or item.get("type") in ("function_call_output", "custom_tool_call_output")
