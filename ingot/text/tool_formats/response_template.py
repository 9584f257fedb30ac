"""A checkpoint's own `response_template` as a table, for families that have none of ours yet.

transformers reads such templates: fields (`thinking`, `content`, `tool_calls`) between delimiters, which are literals
or regular expressions, and for calls what stands between them and where in it the name and the arguments are. What a
table cannot express is refused with a reason.
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
MOST_BRANCHES: Final = 16  # most alternatives of a delimiter

_THINKING_FIELDS: Final = ("thinking", "reasoning_content", "reasoning")
_ATOM: Final = re.compile(
    r"(?P<group>\((?:\?P<(?P<name>\w+)>|(?P<look>\?<?[=!])|\?:)?)|\[(?P<class>\^?\]?(?:\\.|[^\]\\])*)\]|\\?.", re.DOTALL
)
_REPEAT: Final = re.compile(r"[*+?]\??|\{\d*,?\d*\}")
_SPACES: Final = {r"\s": "", r"\t": "\t", r"\r": "\n", r"\n": "\n"}  # and how they are written
_TAG: Final = re.compile(r"<([^\s<>=/\"]+)")
_PLACEHOLDER: Final = re.compile(r"\{(\w+(?:\.\w+)*)\}")


class UnsupportedResponseTemplate(Exception):
    """The template has what no table can express."""


@dataclass(frozen=True, slots=True)
class _NamedGroup:
    """A named group."""

    name: str


class _Anything:
    """Characters of some class, as many as there are."""


class _AnswerStart:
    """The answer's beginning."""


_Node = str | Gap | Maybe | _NamedGroup | _Anything | _AnswerStart
_Branch = tuple[_Node, ...]


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
        forms=() if calls is None else (_call_form(calls, _delimiter_branches(calls, "open")[0]),),
        thinking=None if thinking is None else _tags(thinking),
        strips=tuple(dict.fromkeys(strips)),
    )


def _tags(field: Mapping[str, Any]) -> ThinkingFormat:
    closes = _delimiter_texts(field, "close")
    if not closes:
        raise UnsupportedResponseTemplate("thinking has no end that is a text")
    branches = _delimiter_branches(field, "open") if _has_delimiter(field, "open") else []
    opens = [text for branch in branches if (text := _branch_text(branch))] or [closes[0].replace("</", "<", 1)]
    implied = any(branch and all(isinstance(node, _AnswerStart | Gap) for node in branch) for branch in branches)
    return ThinkingFormat(RESPONSE_TEMPLATE_NAME, opens[0], closes[0], implied=implied)


def _channels(thinking: Any, content: Mapping[str, Any], calls: Any) -> Format | None:
    """Where each field begins with a header, in which an author may be named: `start`, a name, the field's marker."""
    fields: list[tuple[MessageKind, Any]] = [("thinking", thinking), ("text", content), ("calls", calls)]
    branches = [
        _delimiter_branches(field, "open")[0] if field and _has_delimiter(field, "open") else () for _, field in fields
    ]
    if any(
        len(branch) != 3 or not isinstance(branch[0], Maybe) or not isinstance(branch[1], _Anything)
        for branch in branches
    ):
        return None
    (start, *others), markers = ({branch[0] for branch in branches}), [str(branch[2]) for branch in branches]
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


def _call_form(field: Mapping[str, Any], branch: _Branch) -> CallForm:
    name, arguments = _name_and_arguments(field.get("transform"))
    before, between = _around_name(branch)
    closing = _closing(field)
    bare = not re.match(r"\W*[<\[|｜◁]", before[0]) if isinstance(before[0], str) else True
    content = field.get("content", "text")
    options: dict[str, Any] = {"bare": True} if bare else {}
    if field.get("transform_each"):
        if content != "json" or between is not None or "." in name + arguments:
            raise UnsupportedResponseTemplate(
                "tool_calls are a list of something else than objects with a name and arguments"
            )
        return array_form(*before, Gap(), call=(JsonCall(arguments, name),), after=closing, **options)
    if between is None:
        if content != "json":
            raise UnsupportedResponseTemplate(f"tool_calls without a name are {content!r}")
        return CallForm(opening=(*before, Gap()), call=(_json_call(name, arguments), Gap()), closing=closing, **options)
    if arguments != "content":
        raise UnsupportedResponseTemplate(
            "the arguments of tool_calls are only a part of what stands between their delimiters"
        )
    spaced = len(before) > 1 and isinstance(before[1], Gap)
    opening = (before[0], Gap("\n")) if spaced else before[:1]
    inside = (*before[2 if spaced else 1 :], Name(), *between)
    if content == "json":
        call = (*inside, Gap(), Arguments(_notation(field)), Gap())
        return CallForm(opening=opening, call=call, closing=closing, **options)
    if content != "xml-inline":
        raise UnsupportedResponseTemplate(f"the arguments of tool_calls are {content!r}")
    parameters, closing = _parameters(field, branch, closing)
    return CallForm(opening=opening, call=(*inside, Gap("\n"), parameters), closing=closing, **options)


def _name_and_arguments(transform: Any) -> tuple[str, str]:
    """Where the name and the arguments are: names of groups, or keys of the object that the content is."""
    parts = transform.get("function", transform) if isinstance(transform, Mapping) else transform
    if parts is None or parts == "{content}":
        return "content.name", "content.arguments"
    places = (parts.get("name"), parts.get("arguments")) if isinstance(parts, Mapping) else (None, None)
    found = [_PLACEHOLDER.fullmatch(place) if isinstance(place, str) else None for place in places]
    if found[0] is None or found[1] is None:
        raise UnsupportedResponseTemplate("nothing shows where tool_calls have their name and their arguments")
    return found[0][1], found[1][1]


def _json_call(name: str, arguments: str) -> JsonCall:
    keys = name.removeprefix("content."), arguments.removeprefix("content.")
    if "content." + keys[0] != name or "content." + keys[1] != arguments or "." in "".join(keys):
        raise UnsupportedResponseTemplate("tool_calls have their name or their arguments within other objects")
    return JsonCall(keys[1], keys[0])


def _around_name(branch: _Branch) -> tuple[tuple[Part, ...], tuple[Part, ...] | None]:
    """What stands before the name, and between it and the arguments; None where no group is the name."""
    while branch and isinstance(branch[0], Gap | Maybe | _Anything):
        branch = branch[1:]
    at = next((at for at, node in enumerate(branch) if isinstance(node, _NamedGroup)), len(branch))
    before = _form_parts(_join_literals(branch[:at]))
    if not before or not isinstance(before[0], str):
        raise UnsupportedResponseTemplate("tool_calls have no beginning that is a text")
    return before, _form_parts(branch[at + 1 :]) if at < len(branch) else None


def _form_parts(nodes: Sequence[_Node]) -> tuple[Part, ...]:
    parts: list[Part] = []
    skipping = False
    for node in nodes:
        match node:
            case _Anything():
                skipping = True
            case str():
                parts.append(UpTo(node) if skipping else node)
                skipping = False
            case Gap() | Maybe():
                parts.append(node)
            case _:
                raise UnsupportedResponseTemplate("a delimiter of tool_calls holds more than a name")
    return tuple(parts)


def _join_literals(nodes: Sequence[_Node]) -> list[_Node]:
    """Literals with anything between them as one, with as little between them as can be: a space, between words."""
    parts: list[_Node] = []
    for node in nodes:
        if isinstance(node, str) and len(parts) > 1 and isinstance(parts[-1], _Anything) and isinstance(parts[-2], str):
            words = parts[-2][-1:].isalnum() and node[:1].isalnum()
            parts[-2:] = [f"{parts[-2]}{' ' if words else ''}{node}"]
        elif isinstance(node, str) and parts and isinstance(parts[-1], str):
            parts[-1] += node
        else:
            parts.append(node)
    return parts


def _closing(field: Mapping[str, Any]) -> tuple[Part, ...]:
    """What ends a call, in as many literals as it has markers: the last may be a token that ends the answer."""
    if not _has_delimiter(field, "close"):
        return ()
    parts: list[Part] = []
    for node in _join_literals(
        [node for node in _delimiter_branches(field, "close")[0] if not isinstance(node, _AnswerStart)]
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
    field: Mapping[str, Any], branch: _Branch, closing: tuple[Part, ...]
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
    ends = _implied_ends(branch, closing) + [part for part in closing if isinstance(part, str)]
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


def _implied_ends(branch: _Branch, closing: tuple[Part, ...]) -> list[str]:
    """The ends of tags that the delimiter opens and does not close: what stands between parameters is not stated."""
    opened = [tag for node in branch if isinstance(node, str) for tag in _TAG.findall(node)]
    ends = [f"</{tag}>" for tag in reversed(opened)]
    return ends[: ends.index(closing[0])] if closing and closing[0] in ends else []


# Delimiters.


def _has_delimiter(field: Mapping[str, Any], key: str) -> bool:
    return key in field or f"{key}_pattern" in field


def _delimiter_texts(field: Mapping[str, Any], key: str) -> tuple[str, ...]:
    """The literals that a delimiter may be, without the white space around them."""
    return tuple(
        text
        for branch in (_delimiter_branches(field, key) if _has_delimiter(field, key) else ())
        if (text := _branch_text(branch))
    )


def _branch_text(branch: _Branch) -> str:
    plain = all(isinstance(node, str | Gap | Maybe | _AnswerStart) for node in branch)
    return "".join(node for node in branch if isinstance(node, str)).strip() if plain else ""


def _delimiter_branches(field: Mapping[str, Any], key: str) -> list[_Branch]:
    if key not in field:
        return _read_pattern(field[f"{key}_pattern"])
    stated = [field[key]] if isinstance(field[key], str) else field[key]
    return [(str(text),) for text in stated]


def _read_pattern(pattern: str) -> list[_Branch]:
    """The alternatives of a regular expression. Lookarounds and boundaries are passed over."""
    try:
        re.compile(pattern)
    except re.error as error:
        raise UnsupportedResponseTemplate(f"{_shorten_pattern(pattern)} is no regular expression: {error}") from None
    reader = _PatternReader(pattern)
    branches = [tuple(branch) for branch in reader.branches() if branch] or [()]
    if reader.at < len(pattern):
        raise reader.refuse(f"cannot be read beyond its character {reader.at}")
    return branches


class _PatternReader:
    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self.at = 0

    def refuse(self, why: str) -> UnsupportedResponseTemplate:
        return UnsupportedResponseTemplate(f"{_shorten_pattern(self._pattern)} {why}")

    def branches(self) -> list[list[_Node]]:
        found = self._sequence()
        while self._pattern.startswith("|", self.at):
            self.at += 1
            found += self._sequence()
        if len(found) > MOST_BRANCHES:
            raise self.refuse("has too many alternatives")
        return found

    def _sequence(self) -> list[list[_Node]]:
        found: list[list[_Node]] = [[]]
        while self.at < len(self._pattern) and self._pattern[self.at] not in "|)":
            branches = self._repeated(self._atom())
            found = [[*before, *branch] for before in found for branch in branches]
            if len(found) > MOST_BRANCHES:
                raise self.refuse("has too many alternatives")
        return [_merge_neighbours(branch) for branch in found]

    def _atom(self) -> list[list[_Node]]:
        atom = _ATOM.match(self._pattern, self.at)
        assert atom is not None, "any character is one"
        self.at = atom.end()
        if atom["group"]:
            branches = self.branches()
            if not self._pattern.startswith(")", self.at):
                raise self.refuse(f"cannot be read beyond its character {self.at}")
            self.at += 1
            if atom["name"]:
                return [[_NamedGroup(atom["name"])]]
            return [[]] if atom["look"] else branches
        if atom["class"]:
            return [[Gap() if re.fullmatch(r"(\\[strn]| )+", atom["class"]) else _Anything()]]
        text = atom[0]
        if text in _SPACES:
            return [[Gap(_SPACES[text])]]
        if text in (r"\A", "^"):
            return [[_AnswerStart()]]
        if text in (r"\b", r"\B", r"\Z", "$"):
            return [[]]
        return [[_Anything() if text in (".", r"\w", r"\W", r"\S", r"\d", r"\D") else text[-1]]]

    def _repeated(self, branches: list[list[_Node]]) -> list[list[_Node]]:
        repeat = _REPEAT.match(self._pattern, self.at)
        if repeat is None:
            return branches
        if repeat[0][0] == "{":
            raise self.refuse("counts")
        self.at = repeat.end()
        [[*only], *others] = branches
        single = only[0] if len(only) == 1 and not others else None
        if isinstance(single, Gap):
            return [[Gap(" " if repeat[0][0] == "+" else "")]]
        if isinstance(single, _Anything | _NamedGroup):
            return branches
        if repeat[0][0] == "?":
            return [[Maybe(single)]] if isinstance(single, str) else [*branches, []]
        raise self.refuse("repeats a text")


def _merge_neighbours(branch: Sequence[_Node]) -> list[_Node]:
    parts: list[_Node] = []
    for node in branch:
        if isinstance(node, str) and parts and isinstance(parts[-1], str):
            parts[-1] += node
        elif not (isinstance(node, Gap) and parts and isinstance(parts[-1], Gap)):
            parts.append(node)
    return parts


def _shorten_pattern(pattern: str) -> str:
    return repr(pattern if len(pattern) <= 60 else f"{pattern[:60]}...")
