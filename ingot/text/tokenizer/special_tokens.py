"""Control tokens, by which a prompt is framed, and what keeps them out of what clients and tools wrote.

A web page or a tool's output may hold the text of a token that ends a turn and opens another. Only the template may
write such tokens. So before it renders, what clients wrote is quoted: the first character of each control token in it
is replaced by a character that stands in for it, and that occurs nowhere else. In the rendered text the stand-ins say
where there is text that only looks like a token; there they become the characters that they stand for again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

from ingot.errors import BadRequest
from ingot.text.prompt import infill

_PRIVATE: Final = range(0xE100, 0xF8FF)  # code points that no standard gives a meaning
_FRAME: Final = re.compile(r"<[|｜].*>|<.*[|｜]>", re.DOTALL)
_PRIVATE_USE: Final = re.compile(r"[\ue000-\uf8ff]|\\u[ef][0-9a-f]{3}")
_BRACKET: Final = re.compile(r"[<>\[\]{}|｜]")
_SWITCH: Final = re.compile(r"/\w+")  # such as /nothink, which users are told to write


@dataclass(frozen=True, slots=True)
class Controls:
    """A vocabulary's control tokens.

    - `framing`: those that begin and end turns and texts. Nobody but the template may write them.
    - `tags`: those that a template sets around thoughts, calls and results, where the vocabulary does not call them
      special. Users and models may speak of them; tools may not, or a result could end before its end.
    """

    framing: frozenset[str] = frozenset()
    tags: frozenset[str] = frozenset()

    @classmethod
    def of(cls, added: Mapping[str, bool], source: str) -> Controls:
        """Those among a vocabulary's `added` tokens (whether each is special) with a template of this `source`."""
        named = {token: special for token, special in added.items() if token.strip() and not _SWITCH.fullmatch(token)}
        framing = {
            token for token, special in named.items() if special or _FRAME.fullmatch(token) or token in infill.NAMES
        }
        tags = {token for token in named if token not in framing and _BRACKET.search(token) and token in source}
        return cls(frozenset(framing), frozenset(tags))

    @property
    def all(self) -> frozenset[str]:
        return self.framing | self.tags


class Finder:
    """Where any of some tokens begin in a text, also within one another."""

    def __init__(self, tokens: Collection[str]) -> None:
        self.firsts = frozenset(token[0] for token in tokens)
        self._begun = frozenset(token[:size] for token in tokens for size in range(1, len(token)))
        self._longest = max(map(len, tokens), default=0)
        self.pattern = re.compile(alternatives(tokens)) if tokens else None
        firsts = "".join(map(re.escape, sorted(self.firsts)))
        self._beginning = re.compile(f"(?={alternatives(tokens)})[{firsts}]") if tokens else None

    def places(self, text: str) -> list[int]:
        if self._beginning is None or not any(first in text for first in self.firsts):
            return []
        return [found.start() for found in self._beginning.finditer(text)]

    def within(self, text: str) -> bool:
        """Whether any of them is there."""
        return self.pattern is not None and self.pattern.search(text) is not None

    def replace_firsts(self, text: str, stand_in: Callable[[str], str]) -> str:
        """The text with another character in place of each at which one of them begins."""
        if self._beginning is None or not any(first in text for first in self.firsts):
            return text
        return self._beginning.sub(lambda found: stand_in(found[0]), text)

    def begun(self, text: str) -> list[int]:
        """Where a token may begin whose rest comes with another text that a template puts behind this one."""
        end = len(text.rstrip())
        since = max(0, end - self._longest)
        return [at for at in range(since, end) if text[at] in self.firsts and text[at:end] in self._begun]


@lru_cache(maxsize=64)
def finder(tokens: frozenset[str]) -> Finder:
    return Finder(tokens)


def alternatives(words: Collection[str]) -> str:
    """A pattern for the longest of some words, which takes no longer for many words than for few."""
    branches: dict[str, list[str]] = {}
    for word in words:
        if word:
            branches.setdefault(word[0], []).append(word[1:])
    written = [re.escape(first) + alternatives(rests) for first, rests in sorted(branches.items())]
    if not written:
        return ""
    return f"(?:{'|'.join(written)})" + ("?" if "" in words else "")


class Quoting:
    """Of one conversation, of which `said` is everything that clients wrote, of whatever form.

    `exempt` are the tags of thinking, which an assistant's message may hold: templates look for them there.
    """

    def __init__(self, controls: Controls = Controls(), said: Any = (), exempt: Collection[str] = ()) -> None:
        self.trusting = not controls.all  # nothing is quoted: every control token is one, whoever wrote it
        self._spoken = finder(controls.framing)
        self._answered = finder(controls.framing - frozenset(exempt))
        self._told = finder(controls.all)
        self._said = said
        self._stand_ins: dict[str, str] = {}

    def strings(self) -> Iterator[str]:
        """All that clients wrote."""
        return _strings(self._said)

    def messages(self, messages: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        return [self._message(message) for message in messages]

    def told(self, value: Any) -> Any:
        """What describes tools or documents, with everything in it."""
        return self._value(value, self._told)

    def read(self, text: str) -> tuple[str, tuple[int, ...]]:
        """The text as it was meant, and the places in it where nothing but text begins."""
        if not self._stand_ins:
            return text, ()
        meant = {stand_in: char for char, stand_in in self._stand_ins.items()}
        # JSON without other than ASCII characters has them escaped.
        written = meant | {_escape(stand_in): char for stand_in, char in meant.items()}
        places: list[int] = []
        longer = 0  # by how much all before was longer than it was meant

        def char(found: re.Match[str]) -> str:
            nonlocal longer
            places.append(found.start() - longer)
            longer += len(found[0]) - 1
            return written[found[0]]

        return re.sub(alternatives(written), char, text), tuple(places)

    def _message(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        role = str(message.get("role"))
        words = self._spoken if role in ("system", "developer", "user") else self._told
        words = self._answered if role == "assistant" else words
        return {
            key: value if key == "role" else self._calls(value) if key == "tool_calls" else self._value(value, words)
            for key, value in message.items()
        }

    def _calls(self, calls: Any) -> Any:
        return [self._call(call) for call in calls] if isinstance(calls, list) else calls

    def _call(self, call: Any) -> Any:
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping):
            return self.told(call)
        arguments = self._arguments(function.get("arguments")) if "arguments" in function else None
        kept = {key: arguments if key == "arguments" else self.told(value) for key, value in function.items()}
        return {key: kept if key == "function" else self.told(value) for key, value in call.items()}

    def _arguments(self, arguments: Any) -> Any:
        """Arguments as JSON text may hide in escapes what shows once they are read."""
        if not isinstance(arguments, str):
            return self.told(arguments)
        try:
            read = json.loads(arguments)
        except (ValueError, RecursionError):
            return self.told(arguments)
        if any(self._told.within(text) for text in _strings(read)):
            return json.dumps(self.told(read), ensure_ascii=False)
        return arguments

    def _value(self, value: Any, words: Finder) -> Any:
        if isinstance(value, str):
            return self._text(value, words)
        if isinstance(value, Mapping):
            return {self._value(key, words): self._value(each, words) for key, each in value.items()}
        return [self._value(each, words) for each in value] if isinstance(value, (list, tuple)) else value

    def _text(self, text: str, words: Finder) -> str:
        quoted = words.replace_firsts(text, self._stand_in)
        for place in words.begun(text):
            quoted = quoted[:place] + self._stand_in(text[place]) + quoted[place + 1 :]
        return quoted

    def _stand_in(self, char: str) -> str:
        if not self._stand_ins:
            used = {each for text in _strings(self._said) for each in _PRIVATE_USE.findall(text)}
            free = (chr(code) for code in _PRIVATE if not used & {chr(code), _escape(chr(code))})
            self._stand_ins = dict(zip(sorted(self._told.firsts), free, strict=False))
            if len(self._stand_ins) < len(self._told.firsts):
                raise BadRequest("The messages hold every private character of Unicode; some have to be left over.")
        return self._stand_ins[char]


def _escape(char: str) -> str:
    return f"\\u{ord(char):04x}"


def _strings(value: Any) -> Iterator[str]:
    rest = [value]
    while rest:
        each = rest.pop()
        if isinstance(each, str):
            yield each
        elif isinstance(each, Mapping):
            rest += [*each.keys(), *each.values()]
        elif isinstance(each, (list, tuple)):
            rest += each
