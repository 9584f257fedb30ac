"""A checkpoint's own `response_template` as a table: families without one of ours are known on the day they appear.

transformers reads such templates: fields (`thinking`, `content`, `tool_calls`) between delimiters, which are literals
or regular expressions, and for calls what stands between them and where in it the name and the arguments are. What a
table can say is made one; anything else is refused in words.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ingot.text.tool_formats.format import (
    JSON,
    Arguments,
    CallForm,
    Channels,
    Format,
    Gap,
    JsonCall,
    KeyClose,
    Maybe,
    MessageKind,
    Name,
    Part,
    TextParameters,
    ThinkingFormat,
    UpTo,
    unescaped_notation,
)
from ingot.text.tool_formats.shapes import array_form

RESPONSE_TEMPLATE_NAME: Final = "response_template"
MOST_WAYS: Final = 16
"""Ways to match a delimiter that are looked at."""

_THINKING_FIELDS: Final = ("thinking", "reasoning_content", "reasoning")
_SPACE_ESCAPES: Final = "strn"
_REPEATS: Final = ("*?", "+?", "??", "*", "+", "?")
_TAG: Final = re.compile(r"<([^\s<>=/\"]+)")
_PLACEHOLDER: Final = re.compile(r"\{(\w+(?:\.\w+)*)\}")


class UnsupportedResponseTemplate(Exception):
    """The template says what no table can."""


@dataclass(frozen=True, slots=True)
class _NamedGroup:
    """A named group."""

    name: str


class _Anything:
    """Characters of some class, as many as there are."""


class _AnswerStart:
    """The answer's beginning."""


_Node = str | Gap | Maybe | _NamedGroup | _Anything | _AnswerStart
_Way = tuple[_Node, ...]


def compile_response_template(spec: Any) -> Format:
    """Raises Uncompiled."""
    try:
        return _compile_spec(spec)
    except (AttributeError, IndexError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise UnsupportedResponseTemplate(f"it is malformed ({type(error).__name__})") from None


def _compile_spec(spec: Any) -> Format:
    fields = spec.get("fields") if isinstance(spec, Mapping) else None
    if not isinstance(fields, Mapping) or not all(isinstance(field, Mapping) for field in fields.values()):
        raise UnsupportedResponseTemplate("it has no fields")
    if spec.get("version", 1) != 1:
        raise UnsupportedResponseTemplate(f"its version is {spec['version']!r}")
    thinking = next((fields[name] for name in _THINKING_FIELDS if name in fields), None)
    content, calls = fields.get("content", {}), fields.get("tool_calls")
    if (channels := _channels(thinking, content, calls)) is not None:
        return channels
    strips: tuple[str, ...] = ()
    if _has_delimiter(content, "open"):
        # There is nothing but fields: what begins a message is none of them.
        strips = (
            *_delimiter_texts(content, "open"),
            *_delimiter_texts(content, "close"),
            *_delimiter_texts(spec, "start_anchor"),
        )
    return Format(
        name=RESPONSE_TEMPLATE_NAME,
        forms=() if calls is None else (_call_form(calls, _delimiter_ways(calls, "open")[0]),),
        thinking=None if thinking is None else _tags(thinking),
        strips=tuple(dict.fromkeys(strips)),
    )


def _tags(field: Mapping[str, Any]) -> ThinkingFormat:
    closes = _delimiter_texts(field, "close")
    if not closes:
        raise UnsupportedResponseTemplate("thinking has no end that is a text")
    ways = _delimiter_ways(field, "open") if _has_delimiter(field, "open") else []
    opens = [text for way in ways if (text := _way_text(way))] or [closes[0].replace("</", "<", 1)]
    implied = any(way and all(isinstance(node, _AnswerStart | Gap) for node in way) for way in ways)
    return ThinkingFormat(RESPONSE_TEMPLATE_NAME, opens[0], closes[0], implied=implied)


def _channels(thinking: Any, content: Mapping[str, Any], calls: Any) -> Format | None:
    """Where each field begins with a header, in which an author may be named: `start`, a name, the field's marker."""
    fields: list[tuple[MessageKind, Any]] = [("thinking", thinking), ("text", content), ("calls", calls)]
    ways = [_delimiter_ways(field, "open")[0] if field and _has_delimiter(field, "open") else () for _, field in fields]
    if any(len(way) != 3 or not isinstance(way[0], Maybe) or not isinstance(way[1], _Anything) for way in ways):
        return None
    (start, *others), markers = ({way[0] for way in ways}), [str(way[2]) for way in ways]
    if others or not isinstance(start, Maybe):
        return None
    form = _call_form(calls, (markers[2],))
    ends = tuple(dict.fromkeys(text for _, field in fields for text in _delimiter_texts(field, "close")))
    return Format(
        name=RESPONSE_TEMPLATE_NAME,
        forms=(CallForm(call=form.call),),
        channels=Channels(
            start=start.text,
            role="",
            bodies=tuple(markers),
            kinds=tuple((re.escape(marker), kind) for marker, (kind, _) in zip(markers, fields, strict=True)),
            ends=ends,
            call=(markers[2], *form.call),
            call_end=_delimiter_texts(calls, "close")[0],
            asides=(markers[0],),
            answer=markers[1],
        ),
    )


# Calls.


def _call_form(field: Mapping[str, Any], way: _Way) -> CallForm:
    name, arguments = _name_and_arguments(field.get("transform"))
    before, between = _around_name(way)
    closing = _closing(field)
    bare = not re.match(r"\W*[<\[|｜◁]", before[0]) if isinstance(before[0], str) else True
    content = field.get("content", "text")
    said: dict[str, Any] = {"bare": True} if bare else {}
    if field.get("transform_each"):
        if content != "json" or between is not None or "." in name + arguments:
            raise UnsupportedResponseTemplate(
                "tool_calls are a list of something else than objects with a name and arguments"
            )
        return array_form(*before, Gap(), call=(JsonCall(arguments, name),), after=closing, **said)
    if between is None:
        if content != "json":
            raise UnsupportedResponseTemplate(f"tool_calls without a name are {content!r}")
        return CallForm(opening=(*before, Gap()), call=(_json_call(name, arguments), Gap()), closing=closing, **said)
    if arguments != "content":
        raise UnsupportedResponseTemplate(
            "the arguments of tool_calls are only a part of what stands between their delimiters"
        )
    spaced = len(before) > 1 and isinstance(before[1], Gap)
    opening = (before[0], Gap("\n")) if spaced else before[:1]
    inside = (*before[2 if spaced else 1 :], Name(), *between)
    if content == "json":
        call = (*inside, Gap(), Arguments(_notation(field)), Gap())
        return CallForm(opening=opening, call=call, closing=closing, **said)
    if content != "xml-inline":
        raise UnsupportedResponseTemplate(f"the arguments of tool_calls are {content!r}")
    parameters, closing = _parameters(field, way, closing)
    return CallForm(opening=opening, call=(*inside, Gap("\n"), parameters), closing=closing, **said)


def _name_and_arguments(transform: Any) -> tuple[str, str]:
    """The places of the name and the arguments: names of groups, or keys of the object that the content is."""
    made = transform.get("function", transform) if isinstance(transform, Mapping) else transform
    if made is None or made == "{content}":
        return "content.name", "content.arguments"
    places = (made.get("name"), made.get("arguments")) if isinstance(made, Mapping) else (None, None)
    found = [_PLACEHOLDER.fullmatch(place) if isinstance(place, str) else None for place in places]
    if found[0] is None or found[1] is None:
        raise UnsupportedResponseTemplate("nothing says where tool_calls have their name and their arguments")
    return found[0][1], found[1][1]


def _json_call(name: str, arguments: str) -> JsonCall:
    keys = name.removeprefix("content."), arguments.removeprefix("content.")
    if "content." + keys[0] != name or "content." + keys[1] != arguments or "." in "".join(keys):
        raise UnsupportedResponseTemplate("tool_calls have their name or their arguments within other objects")
    return JsonCall(keys[1], keys[0])


def _around_name(way: _Way) -> tuple[tuple[Part, ...], tuple[Part, ...] | None]:
    """What stands before the name, and between it and the arguments; None where no group is the name."""
    while way and isinstance(way[0], Gap | Maybe | _Anything):
        way = way[1:]
    at = next((at for at, node in enumerate(way) if isinstance(node, _NamedGroup)), len(way))
    before = _form_parts(_join_literals(way[:at]))
    if not before or not isinstance(before[0], str):
        raise UnsupportedResponseTemplate("tool_calls have no beginning that is a text")
    return before, _form_parts(way[at + 1 :]) if at < len(way) else None


def _form_parts(nodes: Sequence[_Node]) -> tuple[Part, ...]:
    made: list[Part] = []
    skipping = False
    for node in nodes:
        match node:
            case _Anything():
                skipping = True
            case str():
                made.append(UpTo(node) if skipping else node)
                skipping = False
            case Gap() | Maybe():
                made.append(node)
            case _:
                raise UnsupportedResponseTemplate("a delimiter of tool_calls holds more than a name")
    return tuple(made)


def _join_literals(nodes: Sequence[_Node]) -> list[_Node]:
    """Literals with anything between them as one, with as little between them as can be: a space, between words."""
    made: list[_Node] = []
    for node in nodes:
        if isinstance(node, str) and len(made) > 1 and isinstance(made[-1], _Anything) and isinstance(made[-2], str):
            words = made[-2][-1:].isalnum() and node[:1].isalnum()
            made[-2:] = [f"{made[-2]}{' ' if words else ''}{node}"]
        elif isinstance(node, str) and made and isinstance(made[-1], str):
            made[-1] += node
        else:
            made.append(node)
    return made


def _closing(field: Mapping[str, Any]) -> tuple[Part, ...]:
    """What ends a call, in as many literals as it has markers: the last may be a token that ends the answer."""
    if not _has_delimiter(field, "close"):
        return ()
    parts: list[Part] = []
    for node in _join_literals(
        [node for node in _delimiter_ways(field, "close")[0] if not isinstance(node, _AnswerStart)]
    ):
        if isinstance(node, str):
            parts += [piece for piece in re.split(r"(?<=.)(?=<\|)", node.strip()) if piece]
        elif isinstance(node, Gap | Maybe):
            parts.append(node)
        else:
            raise UnsupportedResponseTemplate("the end of tool_calls is no text")
    while parts and isinstance(parts[-1], Gap | Maybe):
        parts.pop()
    return tuple(parts)


def _notation(field: Mapping[str, Any]) -> Any:
    arguments = field.get("content_args") or {}
    quotes = arguments.get("string_delims") or []
    if not quotes and not arguments.get("unquoted_keys"):
        return JSON
    if len(quotes) > 1 or any(opens != closes for opens, closes in quotes):
        raise UnsupportedResponseTemplate("strings in tool_calls begin and end differently")
    return unescaped_notation(quotes[0][0] if quotes else '"')


def _parameters(
    field: Mapping[str, Any], way: _Way, closing: tuple[Part, ...]
) -> tuple[TextParameters, tuple[Part, ...]]:
    """The arguments as tags, and what is left of the closing behind them."""
    pattern = (field.get("content_args") or {}).get("tag_pattern")
    nodes = _join_literals(_read_pattern(pattern)[0]) if isinstance(pattern, str) else []
    groups = [node.name for node in nodes if isinstance(node, _NamedGroup)]
    if groups != ["key", "value"]:
        raise UnsupportedResponseTemplate("tool_calls have no tag_pattern with a key and a value")
    key, value = nodes.index(_NamedGroup("key")), nodes.index(_NamedGroup("value"))
    opening, middle, end = nodes[:key], nodes[key + 1 : value], nodes[value + 1 :]
    literals = [[node for node in some if isinstance(node, str)] for some in (opening, middle, end)]
    if not (len(literals[0]) == len(literals[2]) == 1 and 1 <= len(literals[1]) <= 2):
        raise UnsupportedResponseTemplate("the tag_pattern of tool_calls is no row of tags")
    ends = _unsaid_ends(way, closing) + [part for part in closing if isinstance(part, str)]
    if not ends:
        raise UnsupportedResponseTemplate("tool_calls have no end")
    parameters = TextParameters(
        key_open=literals[0][0],
        key_closes=(KeyClose(literals[1][0]),),
        value_close=literals[2][0],
        end=ends[0],
        value_open=literals[1][1] if len(literals[1]) > 1 else "",
        frame="\n" if isinstance(middle[-1], Gap) else "",
    )
    return parameters, tuple(part for text in ends[1:] for part in (Gap("\n"), text))


def _unsaid_ends(way: _Way, closing: tuple[Part, ...]) -> list[str]:
    """The ends of tags that the delimiter opens and does not close: what stands between parameters is not said."""
    opened = [tag for node in way if isinstance(node, str) for tag in _TAG.findall(node)]
    ends = [f"</{tag}>" for tag in reversed(opened)]
    return ends[: ends.index(closing[0])] if closing and closing[0] in ends else []


# Delimiters.


def _has_delimiter(field: Mapping[str, Any], key: str) -> bool:
    return key in field or f"{key}_pattern" in field


def _delimiter_texts(field: Mapping[str, Any], key: str) -> tuple[str, ...]:
    """The literals that a delimiter may be, without the white space around them."""
    return tuple(
        text for way in (_delimiter_ways(field, key) if _has_delimiter(field, key) else ()) if (text := _way_text(way))
    )


def _way_text(way: _Way) -> str:
    plain = all(isinstance(node, str | Gap | Maybe | _AnswerStart) for node in way)
    return "".join(node for node in way if isinstance(node, str)).strip() if plain else ""


def _delimiter_ways(field: Mapping[str, Any], key: str) -> list[_Way]:
    if key not in field:
        return _read_pattern(field[f"{key}_pattern"])
    stated = [field[key]] if isinstance(field[key], str) else field[key]
    return [(str(text),) for text in stated]


def _read_pattern(pattern: str) -> list[_Way]:
    """The ways to match a regular expression."""
    try:
        re.compile(pattern)
    except re.error as error:
        raise UnsupportedResponseTemplate(f"{_shorten_pattern(pattern)} is no regular expression: {error}") from None
    reader = _PatternReader(pattern)
    ways = [tuple(way) for way in reader.ways() if way] or [()]
    if reader.at < len(pattern):
        raise UnsupportedResponseTemplate(
            f"{_shorten_pattern(pattern)} cannot be read beyond its character {reader.at}"
        )
    return ways


class _PatternReader:
    """Reads the regular expressions that delimiters are made of; what only looks around a match is passed over."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self.at = 0

    def ways(self) -> list[list[_Node]]:
        found = self._sequence()
        while self._takes("|"):
            found += self._sequence()
        if len(found) > MOST_WAYS:
            raise UnsupportedResponseTemplate(f"{_shorten_pattern(self._pattern)} can be matched in too many ways")
        return found

    def _sequence(self) -> list[list[_Node]]:
        found: list[list[_Node]] = [[]]
        while self.at < len(self._pattern) and self._pattern[self.at] not in "|)":
            ways = self._repeated(self._atom())
            found = [[*before, *way] for before in found for way in ways]
            if len(found) > MOST_WAYS:
                raise UnsupportedResponseTemplate(f"{_shorten_pattern(self._pattern)} can be matched in too many ways")
        return [_merge_neighbours(way) for way in found]

    def _atom(self) -> list[list[_Node]]:
        if self._takes("(?P<"):
            name = self._pattern[self.at : self._pattern.index(">", self.at)]
            self.at += len(name) + 1
            self._group()
            return [[_NamedGroup(name)]]
        if any(map(self._takes, ("(?=", "(?!", "(?<=", "(?<!"))):
            self._group()
            return [[]]
        if self._takes("(?:") or self._takes("("):
            return self._group()
        if self._takes("["):
            return [[self._class()]]
        character = self._pattern[self.at]
        self.at += 1
        if character == "\\":
            return [self._escape()]
        return [
            [_Anything()]
            if character == "."
            else [_AnswerStart()]
            if character == "^"
            else []
            if character == "$"
            else [character]
        ]

    def _group(self) -> list[list[_Node]]:
        ways = self.ways()
        if not self._takes(")"):
            raise UnsupportedResponseTemplate(
                f"{_shorten_pattern(self._pattern)} cannot be read beyond its character {self.at}"
            )
        return ways

    def _escape(self) -> list[_Node]:
        character = self._pattern[self.at]
        self.at += 1
        if character in _SPACE_ESCAPES:
            return [Gap("" if character == "s" else {"n": "\n", "r": "\n", "t": "\t"}[character])]
        if character in "bBAZ":
            return [_AnswerStart()] if character == "A" else []
        return [_Anything()] if character in "wWSdD" else [character]

    def _class(self) -> _Node:
        end = self.at + 1
        while self._pattern[end] != "]" or end == self.at:
            end += 2 if self._pattern[end] == "\\" else 1
        inside, self.at = self._pattern[self.at : end], end + 1
        return Gap() if re.fullmatch(r"(\\[strn]| )+", inside) else _Anything()

    def _repeated(self, ways: list[list[_Node]]) -> list[list[_Node]]:
        repeat = next((each for each in _REPEATS if self._takes(each)), "")
        if self._pattern.startswith("{", self.at) and re.match(r"\{\d*,?\d*\}", self._pattern[self.at :]):
            raise UnsupportedResponseTemplate(f"{_shorten_pattern(self._pattern)} counts")
        if not repeat:
            return ways
        [[*only], *others] = ways
        if not others and len(only) == 1 and isinstance(only[0], Gap | _Anything | _NamedGroup):
            return [[Gap(" " if repeat[0] == "+" else "") if isinstance(only[0], Gap) else only[0]]]
        if "?" in repeat[:1]:
            if not others and len(only) == 1 and isinstance(only[0], str):
                return [[Maybe(only[0])]]
            return [*ways, []]
        raise UnsupportedResponseTemplate(f"{_shorten_pattern(self._pattern)} repeats a text")

    def _takes(self, literal: str) -> bool:
        if not self._pattern.startswith(literal, self.at):
            return False
        self.at += len(literal)
        return True


def _merge_neighbours(way: Sequence[_Node]) -> list[_Node]:
    made: list[_Node] = []
    for node in way:
        if isinstance(node, str) and made and isinstance(made[-1], str):
            made[-1] += node
        elif not (isinstance(node, Gap) and made and isinstance(made[-1], Gap)):
            made.append(node)
    return made


def _shorten_pattern(pattern: str) -> str:
    return repr(pattern if len(pattern) <= 60 else f"{pattern[:60]}...")
