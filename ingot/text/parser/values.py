"""Values as models write them, turned into JSON while they arrive.

`JsonTranscriber` is a pushdown machine that passes each character once. What it has written is always the beginning of
some valid JSON, so it can be sent on at once. `TextValue` is a parameter written as text, turned into JSON of the type
that its schema asks for. `transcribe_object` reads arguments that are one object.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import lru_cache
from typing import Literal, NamedTuple

from ingot.text.parser.arguments import JsonType, JsonTypes
from ingot.text.parser.events import FormMismatch
from ingot.text.parser.reader import Steps, TextReader
from ingot.text.tool_formats.format import JSON, PYTHON, Escapes, Notation

DEEPEST_VALUE = 256  # most readers of JSON recurse, and give up somewhere beyond this
LONGEST_NUMBER = 4000  # Python's own json refuses integers of a little more

_SPACE = re.compile(r"[ \t\r\n]*")
_TOKEN = re.compile(r"[A-Za-z0-9_+.\-]+")
_BARE_KEY = re.compile(r"[^\s\"'=:,(){}\[\]<>|]+")
_WRITTEN_KEY = re.compile(r"[\w.\-]+")  # of those, the ones that we write
_BARE_STRING = re.compile(r"[^,{}\[\]<>\"\r\n]+")
_BARE_IN_PARENTHESES = re.compile(r"[^,{}()\[\]<>\"\r\n]+")
_KEY_WITHIN = re.compile(r"\s[A-Za-z_][\w.\-]*[:=]")  # after which a comma may be missing
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")

# A whole escape, and one that more text could complete.
_ESCAPES: dict[Escapes, tuple[re.Pattern[str], re.Pattern[str]]] = {
    "json": (re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})'), re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?\Z")),
    "python": (
        re.compile(
            r"\\(?:[0-7]{3}|[0-7]{1,2}(?=[^0-7])|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|[^0-7xuUN])", re.DOTALL
        ),
        re.compile(r"\\(?:[0-7]{0,2}|x[0-9a-fA-F]?|u[0-9a-fA-F]{0,3}|U[0-9a-fA-F]{0,7})\Z"),
    ),
}
_PYTHON_CHARACTERS = {
    **{"\n": "", "\\": "\\", "'": "'", '"': '"', "a": "\a", "b": "\b"},
    **{"f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v"},
}

ValueState = Literal["going", "done", "failed"]


class _OpenContainer(NamedTuple):
    """An object or array that is open."""

    closes: str
    written: str  # as JSON closes it
    assigns: str  # between key and value; empty in an array
    bare_keys: bool


class JsonTranscriber:
    """Reads one value, writes JSON.

    `feed` reads the text from an offset on and returns the offset it read up to: what it leaves must be fed again, with
    more text. It stops where the value ends (`done`) or cannot go on (`failed`).
    """

    def __init__(self, notation: Notation, step: str) -> None:
        self.progress: ValueState = "going"
        self._notation = notation
        self._words = dict(notation.words)
        self._written: list[str] = []
        self._stack: list[_OpenContainer] = []
        self._token: list[str] = []
        self._spaces: list[str] = []  # behind a comma
        self._quote = ""
        self._escapes = notation.escapes  # of the string that is open
        self._quotes = (*((quote, notation.escapes) for quote in notation.quotes), *notation.also_quotes)
        self._closed = False  # the last value ended with a quote or bracket
        self._in_key = False
        self._step: Callable[[str, int], int] = self._arguments if step == "arguments" else self._value

    @classmethod
    def of_arguments(cls, notation: Notation) -> JsonTranscriber:
        """For the outermost object, in the notation's own brackets."""
        return cls(notation, "arguments")

    @classmethod
    def of_value(cls, notation: Notation) -> JsonTranscriber:
        return cls(notation, "value")

    def feed(self, text: str, at: int) -> int:
        while at < len(text) and self.progress == "going":
            reached = self._step(text, at)
            if reached == at:
                break
            at = reached
        return at

    def end(self) -> None:
        """The text has ended: only a word or number of its own is complete then."""
        if self._token and not self._stack:
            self._finish_token()

    def take(self) -> str:
        """The JSON written since the last call."""
        written = "".join(self._written)
        self._written.clear()
        return written

    @property
    def in_string(self) -> bool:
        return self.progress == "going" and self._step == self._in_string

    @property
    def unwritten(self) -> str:
        """What was read and not written, being half a word."""
        return "".join(self._token)

    # The steps. Each returns the offset it read up to; the one it began at means that it needs more text, or failed.

    def _arguments(self, text: str, at: int) -> int:
        notation = self._notation
        closes = dict(notation.brackets).get(text[at])
        if closes is None:
            return self._fail(at)
        bare = notation.bare_keys != "never"
        return self._open(_OpenContainer(closes, "}", notation.assigns, bare), "{", at)

    def _value(self, text: str, at: int) -> int:
        at = self._space(text, at)
        if at == len(text):
            return at
        if text[at] == "{":
            return self._open(_OpenContainer("}", "}", ":", self._notation.bare_keys == "always"), "{", at)
        if text[at] == "[":
            return self._open(_OpenContainer("]", "]", "", False), "[", at)
        if not self._notation.bare_strings and _TOKEN.match(text, at):
            self._step = self._in_token
            return self._in_token(text, at)
        self._in_key = False
        return self._open_string(text, at)

    def _first_item(self, text: str, at: int) -> int:
        at = self._space(text, at)
        if at < len(text) and text[at] == "]":
            return self._close(at)
        self._step = self._value
        return at if at == len(text) else self._value(text, at)

    def _first_key(self, text: str, at: int) -> int:
        at = self._space(text, at)
        if at < len(text) and text[at] == self._stack[-1].closes:
            return self._close(at)
        return at if at == len(text) else self._key(text, at)

    def _key(self, text: str, at: int) -> int:
        at = self._space(text, at)
        if at == len(text):
            return at
        if self._stack[-1].bare_keys and _BARE_KEY.match(text, at):
            self._step = self._in_bare_key
            return self._in_bare_key(text, at)
        self._in_key = True
        return self._open_string(text, at)

    def _in_bare_key(self, text: str, at: int) -> int:
        if (match := _BARE_KEY.match(text, at)) is not None:
            self._token.append(match.group())
            return match.end()
        self._written.append(json.dumps("".join(self._token), ensure_ascii=False))
        self._token.clear()
        self._step = self._assignment
        return self._assignment(text, at)

    def _assignment(self, text: str, at: int) -> int:
        at = self._space(text, at)
        if at == len(text):
            return at
        if text[at] not in self._stack[-1].assigns + self._notation.also_assigns:
            return self._fail(at)
        self._written.append(":")
        self._step = self._value
        return at + 1

    def _after_value(self, text: str, at: int) -> int:
        at = self._space(text, at)
        if at == len(text):
            return at
        if text[at] == self._stack[-1].closes:
            return self._close(at)
        left_out = self._may_leave_out_comma(text, at)
        if text[at] != "," and not left_out:
            return self._fail(at)
        self._step = self._after_comma
        return self._after_comma(text, at) if left_out else at + 1

    def _after_comma(self, text: str, at: int) -> int:
        """Writes the comma when something comes behind it: what models put before a closing bracket is left out."""
        match = _SPACE.match(text, at)
        assert match is not None
        self._spaces.append(match.group())
        at = match.end()
        if at == len(text):
            return at
        if text[at] == self._stack[-1].closes:
            self._spaces.clear()
            return self._close(at)
        self._written += [",", *self._spaces]
        self._spaces.clear()
        self._step = self._key if self._stack[-1].assigns else self._value
        return self._step(text, at)

    def _in_token(self, text: str, at: int) -> int:
        if (match := _TOKEN.match(text, at)) is not None:
            self._token.append(match.group())
            return match.end() if self._plausible() else self._fail(match.end())
        self._finish_token()
        if self.progress == "going":
            return self._step(text, at)
        return at

    def _in_bare_string(self, text: str, at: int) -> int:
        outermost = self._stack[0].closes
        if (match := (_BARE_IN_PARENTHESES if outermost == ")" else _BARE_STRING).match(text, at)) is not None:
            self._token.append(match.group())
            return match.end()
        quote = self._notation.quotes[0]
        if text.startswith(quote, at):
            return self._finish_bare(text, at + len(quote))  # only the opening quote was left out
        if quote.startswith(text[at:]):
            return at
        return self._finish_bare(text, at) if text[at] in f",]}}{outermost}" else self._fail(at)

    def _in_string(self, text: str, at: int) -> int:
        if (match := _string_run(self._quote[0], self._escapes).match(text, at)) is not None:
            self._written.append(escape_json_text(match.group()))
            return match.end()
        if text[at] == "\\" and self._escapes != "none":
            return self._escape(text, at)
        if text.startswith(self._quote, at):
            return self._close_string(at + len(self._quote))
        if self._quote.startswith(text[at:]):
            return at
        self._written.append(escape_json_text(text[at]))
        return at + 1

    def _escape(self, text: str, at: int) -> int:
        whole, partial = _ESCAPES[self._escapes]
        if (match := whole.match(text, at)) is None:
            return at if partial.match(text, at) else self._fail(at)
        sequence = match.group()
        self._written.append(sequence if self._escapes == "json" else escape_json_text(_python_escape(sequence[1:])))
        return match.end()

    # What the steps are made of.

    def _space(self, text: str, at: int) -> int:
        match = _SPACE.match(text, at)
        assert match is not None
        if match.end() > at:
            self._written.append(match.group())
        return match.end()

    def _open(self, frame: _OpenContainer, written: str, at: int) -> int:
        if len(self._stack) == DEEPEST_VALUE:
            return self._fail(at)
        self._stack.append(frame)
        self._written.append(written)
        self._step = self._first_key if frame.assigns else self._first_item
        return at + 1

    def _close(self, at: int) -> int:
        self._written.append(self._stack.pop().written)
        self._end_value(closed=True)
        return at + 1

    def _open_string(self, text: str, at: int) -> int:
        for quote, escapes in self._quotes:
            if text.startswith(quote, at):
                self._quote, self._escapes = quote, escapes
                self._written.append('"')
                self._step = self._in_string
                return at + len(quote)
            if quote.startswith(text[at:]):
                return at
        if self._notation.bare_strings and not self._in_key:
            self._step = self._in_bare_string
            return self._in_bare_string(text, at)
        return self._fail(at)

    def _close_string(self, at: int) -> int:
        self._written.append('"')
        if self._in_key:
            self._step = self._assignment
        else:
            self._end_value(closed=True)
        return at

    def _may_leave_out_comma(self, text: str, at: int) -> bool:
        if not (self._notation.commas_optional and self._closed and self._stack[-1].assigns):
            return False
        return _BARE_KEY.match(text, at) is not None

    def _finish_bare(self, whole: str, at: int) -> int:
        """A number, a word, or a string that has no quotes."""
        text = "".join(self._token).strip()
        word = text if _NUMBER.fullmatch(text) else self._words.get(text)
        if not text or (word == text and len(text) > LONGEST_NUMBER) or _KEY_WITHIN.search(text):
            return self._fail(at)
        self._token.clear()
        self._written.append(f'"{escape_json_text(text)}"' if word is None else word)
        self._end_value()
        return self._step(whole, at) if at < len(whole) else at

    def _plausible(self) -> bool:
        """Whether the token may become a number or a word: a long text that is none shows it early."""
        token = "".join(self._token)
        self._token = [token]
        if token[0] in "-0123456789":
            return len(token) <= LONGEST_NUMBER
        return any(word.startswith(token) for word in self._words)

    def _finish_token(self) -> None:
        token = "".join(self._token)
        word = token if _NUMBER.fullmatch(token) else self._words.get(token)
        if word is None:
            self.progress = "failed"
            return
        self._token.clear()
        self._written.append(word)
        self._end_value()

    def _end_value(self, *, closed: bool = False) -> None:
        self._closed = closed
        if self._stack:
            self._step = self._after_value
        else:
            self.progress = "done"

    def _fail(self, at: int) -> int:
        self.progress = "failed"
        return at


@lru_cache(maxsize=32)
def _string_run(stop: str, escapes: Escapes) -> re.Pattern[str]:
    """Text of a string up to what may be its end or an escape."""
    return re.compile(f"[^{re.escape(stop)}]+" if escapes == "none" else rf"[^{re.escape(stop)}\\]+")


def is_bare_key(name: str) -> bool:
    """Whether a member's name is written without quotes, where a notation does that."""
    return _WRITTEN_KEY.fullmatch(name) is not None


def escape_json_text(text: str) -> str:
    """Text as it stands within a JSON string. Lone surrogates, which cannot be sent as they are, get an escape."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(text)[1:-1]
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _python_escape(sequence: str) -> str:
    """The character of a Python escape, without its backslash."""
    if sequence[0] in "01234567":
        return chr(int(sequence, 8))
    if sequence[0] in "xuU":
        code = int(sequence[1:], 16)
        return chr(code) if code < 0x110000 else "\ufffd"
    return _PYTHON_CHARACTERS.get(sequence, "\\" + sequence)


_WHOLE_NUMBER = re.compile(r"(-?[0-9]+)(?:\.0+)?")
_TYPE_BY_FIRST: dict[str, JsonType] = {"{": "object", "[": "array", "t": "boolean", "f": "boolean", "n": "null"}


class TextValue:
    """One value, as it arrives.

    A string is emitted at once, character by character. Where other types are allowed, the text is held back for as
    long as it may be a value of one of them; otherwise it is a string after all. A value that is never closed has
    emitted what was certain of it.
    """

    def __init__(self, kinds: JsonTypes, frame: str, emit: Callable[[str], None]) -> None:
        self._kinds = kinds
        self._frame = frame
        self._emit = emit
        self._at_start = True
        self._framed = False  # the frame stands before the value, and so it may stand behind it
        self._line_end = ""  # a line break, held back until the value goes on or ends
        self._text: list[str] = []  # held back until the type is certain
        # Where a string is allowed, text in Python's spelling of something else is just a string.
        notations = (JSON,) if "string" in kinds else (JSON, PYTHON)
        self._readings = (
            [] if kinds == {"string"} else [_NotationReading(JsonTranscriber.of_value(each)) for each in notations]
        )
        self._is_string = False
        if not self._readings:
            self._become_string()

    def write(self, text: str) -> None:
        if not text:
            return
        self._take(self._unframed(text))

    def _take(self, text: str) -> None:
        if self._is_string:
            self._emit(escape_json_text(text))
            return
        self._text.append(text)
        self._readings = [reading for reading in self._readings if reading.takes(text, self._kinds)]
        if not self._readings:
            self._become_string()

    @property
    def in_json_string(self) -> bool:
        """Whether the value, which may not be a string itself, stands within one: nothing there can end it."""
        return "string" not in self._kinds and bool(self._readings) and self._readings[0].in_string

    @property
    def may_be_text(self) -> bool:
        return "string" in self._kinds

    def copy(self) -> TextValue:
        """A copy without effects, for looking ahead, of a value that may not be a string."""
        copy = TextValue(self._kinds, "", lambda text: None)
        copy.write("".join(self._text) + self._line_end)
        return copy

    def close(self, *, forgotten: bool = False) -> None:
        """The value is complete. `forgotten`: its closing tag is not there, which a line break then set off."""
        if self._line_end and not self._framed and not forgotten:
            self._take(self._line_end)
        if not self._is_string:
            found = next((value for reading in self._readings if (value := reading.value(self._kinds))), None)
            if found is not None:
                self._emit(found)
                return
            self._become_string()
        self._emit('"')

    def _unframed(self, text: str) -> str:
        if self._at_start:
            self._at_start = False
            self._framed = self._frame != "" and text.startswith(self._frame)
            text = text.removeprefix(self._frame)
        text = self._line_end + text
        self._line_end = "\n" if text.endswith("\n") else ""
        return text.removesuffix("\n")

    def _become_string(self) -> None:
        self._is_string = True
        self._emit('"' + escape_json_text("".join(self._text)))
        self._text.clear()


class _NotationReading:
    """The text read in one notation."""

    def __init__(self, transcriber: JsonTranscriber) -> None:
        self._transcriber = transcriber
        self._unread = ""
        self._written: list[str] = []
        self._kind_checked = False

    def takes(self, text: str, kinds: JsonTypes) -> bool:
        """Whether the text so far may be a value of one of the kinds, other than a string."""
        text = self._unread + text
        self._unread = text[self._transcriber.feed(text, 0) :]
        progress = self._transcriber.progress
        if progress == "failed" or (progress == "done" and self._unread.strip()):
            return False
        self._written.append(self._transcriber.take())
        return self._kind_checked or self._allowed(self._written[-1], kinds)

    @property
    def in_string(self) -> bool:
        # What is read and waits for more has opened one, with a quote that may become a longer one.
        return self._transcriber.in_string or (self._transcriber.progress == "going" and bool(self._unread.strip()))

    def value(self, kinds: JsonTypes) -> str | None:
        """The complete value as JSON, if it is one of the kinds."""
        self._transcriber.end()
        if self._transcriber.progress != "done":
            return None
        value = ("".join(self._written) + self._transcriber.take()).strip()
        if not self._allowed(value, kinds):
            return None
        if not _is_number(value) or "number" in kinds:
            return value
        whole = _WHOLE_NUMBER.fullmatch(value)
        return whole[1] if whole else None

    def _allowed(self, written: str, kinds: JsonTypes) -> bool:
        beginning = written.lstrip()[:1]
        if not beginning:
            return True
        self._kind_checked = True
        if _is_number(beginning):
            return bool(kinds & {"number", "integer"})
        return _TYPE_BY_FIRST.get(beginning) in kinds


def _is_number(written: str) -> bool:
    return written != "" and written[0] in "-0123456789"


def transcribe_object(reader: TextReader, notation: Notation, emit: Callable[[str], None]) -> Steps[None]:
    """Passes the object. Raises Mismatch where it breaks off; what is then in the record is text."""
    transcriber = JsonTranscriber.of_arguments(notation)
    while feed_transcriber(reader, transcriber):
        emit(transcriber.take())
        yield
    emit(transcriber.take())
    if transcriber.progress != "done":
        reader.record(transcriber.unwritten if transcriber.progress == "failed" else "")
        raise FormMismatch


def feed_transcriber(reader: TextReader, transcriber: JsonTranscriber) -> bool:
    """Feeds what there is."""
    reader.advance(transcriber.feed(reader.text, reader.at))
    return transcriber.progress == "going" and not reader.ended
