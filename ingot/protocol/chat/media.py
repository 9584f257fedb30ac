"""Pictures, clips, sounds and files in messages.

A model that sees is shown them, in whichever message they stand. One that reads text alone is not: in a question they
are refused, as an answer would be to something else. But what tools gave back, and what was said before the last
answer, is in every request that follows, and to refuse it would end the conversation for good. There a few words stand
in their place, and the receipt says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ingot.errors import Unsupported
from ingot.media.medium import ClipMedium, Medium, PdfMedium, PictureMedium
from ingot.protocol.chat.media_files import Base64Picture
from ingot.protocol.schema.bounds import PARTS
from ingot.protocol.schema.fields import BodyReading, Delegate, Kind, ListOf, Schema, Text
from ingot.protocol.schema.unheeded import note
from ingot.protocol.terms import Terms

TEXT_ONLY: Final = "input is not supported: the served model is run on text alone."


def not_taken(terms: Terms) -> str:
    """Why the served model is not shown something, and what to do; ends the sentence "… (image)"."""
    name = terms.models[0] if terms.models else "the served model"
    if terms.media.withheld:
        return f"input is not supported: {name} is run on text alone. Start the server without --text-only."
    if terms.media.kinds:
        return f"input is not supported here: {name} takes text, pictures and clips, of the user and of tools."
    return f"input is not supported: {name} is run on text alone. Send text, or serve a model that takes pictures."


def not_heard(terms: Terms) -> str:
    """The same of sounds."""
    name = terms.models[0] if terms.models else "the served model"
    heard = "" if terms.hearing.models else " to a server that was started with --audio-model, which writes it down"
    return f"input is not supported: {name} does not hear. Send an input_audio part in a user's message{heard}."


@dataclass(frozen=True, slots=True)
class MediaTag:
    """What a part of some tag holds, and the record that reads it where the served model may be shown it."""

    what: str
    record: Kind | None = None

    def parse(self, value: dict[str, Any], tag: str, path: str, reading: BodyReading) -> Any:
        if self.record is not None and self._is_taken(reading.terms):
            return self.record.parse(value, path, reading)
        held, where = value[tag], f"{path}.{tag}"
        if not reading.past:
            why = not_heard(reading.terms) if self.what == "audio" else not_taken(reading.terms)
            fetched = " Addresses of sounds are not fetched." if held == "audio_url" else ""
            raise Unsupported(f"{where}: '{held}' ({self.what}) {why}{fetched}", param=where)
        note(f"{path}.{held}", reading)
        return Unseen(self.what, taken=bool(reading.terms.media.kinds))

    def schema(self, tag: str, name: str, terms: Terms) -> Schema:
        if self.record is not None and self._is_taken(terms):
            return self.record.schema(terms)
        return unseen_schema(tag, name)

    def _is_taken(self, terms: Terms) -> bool:
        """Sounds are, where there is a model that writes them down."""
        return bool(terms.hearing.models if self.what == "audio" else terms.media.kinds)


@dataclass(frozen=True, slots=True)
class Unseen:
    """What stands in the place of something that the model cannot see."""

    what: str
    cache_control: None = None
    taken: bool = False  # elsewhere, by this model

    @property
    def text(self) -> str:
        return f"[{self.what} left out{'' if self.taken else ': this model reads text alone'}]"


def content_of(said: Sequence[str | Medium]) -> str | list[dict[str, Any]]:
    """Texts and media as a message's content. A single text is itself; else parts stay parts: whether and how they
    are joined is the template's affair."""
    if len(said) == 1 and isinstance(said[0], str):
        return said[0]
    return [part_of(each) for each in said] or ""


def part_of(said: str | Medium) -> dict[str, Any]:
    match said:
        case str():
            return {"type": "text", "text": said}
        case PictureMedium() | PdfMedium():
            return {"type": "image", "medium": said}
        case ClipMedium():
            return {"type": "video", "medium": said}


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

    def parse(self, value: object, path: str, reading: BodyReading) -> tuple[Unseen | PictureMedium, ...]:
        given = self.kind(reading.terms).parse(value, path, reading)
        if reading.terms.media.kinds:
            return tuple(PictureMedium(picture) for picture in given)
        if given and not reading.past:
            raise Unsupported(f"{path} (image) {not_taken(reading.terms)}", param=path)
        if given:
            note(path, reading)
        return tuple(Unseen("image") for _ in given)

    def kind(self, terms: Terms) -> ListOf:
        return ListOf(Base64Picture() if terms.media.kinds else Text(), PARTS)


@dataclass(frozen=True, slots=True)
class OfMedia(Delegate):
    """A field that says how pictures or clips are shown. To a model that takes none it is a hint about nothing."""

    of: Kind

    def parse(self, value: object, path: str, reading: BodyReading) -> Any:
        said = self.of.parse(value, path, reading)
        if reading.terms.media.kinds:
            return said
        note(path, reading)
        return None

    def kind(self, terms: Terms) -> Kind:
        return self.of

    def schema(self, terms: Terms) -> Schema:
        return self.of.schema(terms) if terms.media.kinds or not terms.strict else {"enum": [None]}


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
