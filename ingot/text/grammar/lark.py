"""A Lark grammar in the making, in the dialect of llguidance.

An *expression* is a piece of such a grammar, as text, that can stand anywhere on the right of a rule. No white space is
implied anywhere. `SchemaRules` makes each schema's rule once, also where a schema leads back to itself.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

JSON_SPACE = r"[ \t]{1,2}|\r?\n[ \t]{0,40}"
"""White space within JSON. Bounded: a small model that has nothing to say fills pages with it otherwise."""
EMPTY_RULE = '""'

PLAIN_ESCAPES = 'nrbtf\\"'

_ANY_LARK_TEXT = "/(?s:.*)/"


class LarkRules:
    """`special` are the vocabulary's special tokens: in what a model writes, their names stand for them."""

    def __init__(self, special: Mapping[str, int]) -> None:
        self._special = special
        self._pattern = re.compile("|".join(map(re.escape, sorted(special, key=len, reverse=True))) or "(?!)")
        self._bodies: dict[str, str] = {}
        self._names: dict[str, str] = {}  # by body, so that nothing is compiled twice
        self._reserved = 0

    def literal(self, text: str) -> str:
        """Exactly this, with special tokens where it names them."""
        at = 0
        pieces = []
        for match in self._pattern.finditer(text):
            pieces += [quote_lark_text(text[at : match.start()]), f"<[{self._special[match.group()]}]>"]
            at = match.end()
        return lark_sequence([*pieces, quote_lark_text(text[at:])])

    def json(self, schema: Mapping[str, Any] | bool, *, lenient: bool = False) -> str:
        """A value of this schema. `lenient`: keywords that cannot be enforced are left out."""
        return f"%json {json.dumps(schema_with_options(schema, lenient=lenient))}"

    def rule(self, body: str) -> str:
        """A name for an expression."""
        return self._named(body, "r")

    def terminal(self, body: str) -> str:
        """A name for a regular expression made of literals, `/patterns/`, other terminals, and `&` and `~`."""
        return self._named(body, "T")

    def reserve(self) -> str:
        """A name whose rule is defined later: it may refer to itself."""
        self._reserved += 1
        return f"s{self._reserved}"

    def define(self, name: str, body: str) -> None:
        self._bodies[name] = body

    def text(self, without: Iterable[str] = (), also: Iterable[str] = ()) -> str:
        """A terminal: any text that does not begin with one of the patterns `without`, and matches all of `also`."""
        terms = [_ANY_LARK_TEXT, *also]
        if without := "|".join(without):
            terms.append(f"~/({lark_regex(without)})(?s:.*)/")
        return self.terminal(" & ".join(terms))

    def text_until(self, closing: str, without: Iterable[str]) -> str:
        """Such a text, and `closing` behind it."""
        return self.until(closing, self.text(without), empty=True)

    def until(self, closing: str, body: str, *, empty: bool) -> str:
        """What a terminal or literal `body` matches, which `empty` text may be too, and `closing` behind it."""
        special = self._pattern.search(closing)
        plain = closing[: special.start()] if special else closing
        if not plain:
            return lark_sequence([lark_optional(body) if empty else body, self.literal(closing)])
        # One terminal, as only the end of the closing separates it from the text.
        return lark_sequence([self.terminal(f"{body} {quote_lark_text(plain)}"), self.literal(closing[len(plain) :])])

    def source(self, start: str) -> str:
        lines = [f"start: {start}", *(f"{name}: {body}" for name, body in self._bodies.items())]
        return "\n".join(lines)

    def _named(self, body: str, letter: str) -> str:
        key = f"{letter} {body}"
        if key not in self._names:
            self._names[key] = f"{letter}{len(self._names)}"
            self._bodies[self._names[key]] = body
        return self._names[key]


def schema_with_options(schema: Mapping[str, Any] | bool, *, lenient: bool = False) -> Mapping[str, Any]:
    """The schema with the library's options in it: ours, whatever it had itself.

    The library takes `\\uXXXX` for control characters only. A model that began to write a letter so would have to end
    with one of those, so that escape is not allowed where nothing in the schema needs it."""
    options: dict[str, Any] = {"whitespace_pattern": JSON_SPACE, "lenient": lenient, "coerce_one_of": lenient}
    if lenient and "\\u" not in json.dumps(schema, ensure_ascii=False):
        options["json_allowed_escapes"] = PLAIN_ESCAPES
    return {**({"allOf": [schema]} if isinstance(schema, bool) else schema), "x-guidance": options}


def quote_lark_text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def lark_regex(pattern: str) -> str:
    """A regular expression as it stands between slashes."""
    return re.sub(r"(?<!\\)((?:\\\\)*)/", r"\1\\/", pattern)


def exact_pattern(text: str) -> str:
    """The pattern that matches this text alone."""
    return re.sub(r"[\\.+*?()|\[\]{}^$#&\-~]", r"\\\g<0>", text).replace("\n", "\\n")


def pattern_anywhere(pattern: str) -> str:
    """A text that holds what the pattern matches, up to its end."""
    return f"(?s:.*)({pattern})"


def pattern_at_line_start(pattern: str) -> str:
    """The same, with nothing but white space before it in its line."""
    return f"((?s:.*)\\n)?[ \\t\\r]*({pattern})"


def lark_sequence(expressions: Iterable[str]) -> str:
    return " ".join(one for one in expressions if one != EMPTY_RULE) or EMPTY_RULE


def lark_choice(expressions: Sequence[str]) -> str:
    return expressions[0] if len(expressions) == 1 else f"({' | '.join(expressions)})"


def lark_optional(expression: str) -> str:
    return f"({expression})?"


class SchemaRules:
    def __init__(self, rules: LarkRules) -> None:
        self._rules = rules
        self._names: dict[tuple[Hashable, ...], str] = {}
        self._in_progress: set[str] = set()
        self._recursive: set[str] = set()
        self._schemas: list[Any] = []  # those whose ids are keys, which nothing else may then have

    def rule(self, schema: Any, context: tuple[Hashable, ...], write: Callable[[], str]) -> str:
        """The rule of this very schema in this context, which `write` makes, perhaps recursively."""
        key = (id(schema), *context)
        if key not in self._names:
            self._schemas.append(schema)
            self._names[key] = self._write_rule(key, write)
        name = self._names[key]
        if name in self._in_progress:
            self._recursive.add(name)
        return name

    def _write_rule(self, key: tuple[Hashable, ...], write: Callable[[], str]) -> str:
        name = self._names[key] = self._rules.reserve()
        self._in_progress.add(name)
        body = write()
        self._in_progress.remove(name)
        if name not in self._recursive:
            return self._rules.rule(body)
        self._rules.define(name, body)
        return name
