"""What may follow the `?` in the addresses of `/v1/responses/{id}`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from ingot.protocol.responses.answers import InputItemList
from ingot.protocol.responses.body import INCLUDABLE
from ingot.protocol.schema import bounds
from ingot.protocol.schema.fields import BodyReading, Bool, Int, ListOf, OneOf, Text
from ingot.protocol.schema.objects import ObjectOf, accepts, refuses
from ingot.protocol.schema.rules import Given, Is, Never, Not

INCLUDE = ListOf(OneOf(INCLUDABLE), most=len(INCLUDABLE))
ABOUT_INCLUDE: Final = "Has no effect: a stored response is given as it was answered."
LISTS: Final = frozenset({"include"})


@dataclass(frozen=True, slots=True)
class ResponseQuery:
    include: tuple[str, ...] = accepts(INCLUDE, ABOUT_INCLUDE, default=())
    stream: bool = accepts(
        Bool(), "Send the events of a response in the background, those to come as they come.", default=False
    )
    starting_after: int | None = accepts(
        Int((0, 10**9 - 1)), "Leave out the events up to this one's sequence_number; needs stream."
    )
    include_obfuscation: None = refuses("is not supported: events are never padded.", False)


@dataclass(frozen=True, slots=True)
class ItemsQuery:
    limit: int = accepts(Int(bounds.PAGE), "Most items to list.", default=20)
    order: str = accepts(OneOf(("asc", "desc")), "Oldest or newest first.", default="desc")
    after: str | None = accepts(Text(bounds.IDENTIFIER_CHARS), "The last item of the page before.")
    include: tuple[str, ...] = accepts(INCLUDE, ABOUT_INCLUDE, default=())


RESPONSE_QUERY = ObjectOf(
    ResponseQuery,
    (
        Never(
            (Given("starting_after"), Not(Is("stream", True))),
            "starting_after leaves out events, and needs stream to be true.",
            param="starting_after",
        ),
    ),
)
ITEMS_QUERY = ObjectOf(ItemsQuery)


def query_of(pairs: Iterable[tuple[str, str]], record: ObjectOf, reading: BodyReading) -> Any:
    """The query that `pairs` spell, as the record describes it."""
    value: dict[str, Any] = {}
    for name, text in pairs:
        name = name.removesuffix("[]")
        if name in LISTS:
            value.setdefault(name, []).append(text)
        else:
            value[name] = plain(text)
    return record.parse(value, "", reading)


def plain(text: str) -> str | int | bool:
    if text in ("true", "false"):
        return text == "true"
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else text


def listed(items: list[dict[str, Any]], query: ItemsQuery) -> InputItemList:
    """A page of the items."""
    ordered = items if query.order == "asc" else items[::-1]
    places = [at for at, item in enumerate(ordered) if item["id"] == query.after]
    begin = places[0] + 1 if places else 0
    page = ordered[begin : begin + query.limit]
    first, last = (page[0]["id"], page[-1]["id"]) if page else ("", "")
    return InputItemList(page, first, last, begin + query.limit < len(ordered))
