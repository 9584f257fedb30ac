"""A parameter written as text, turned into JSON of the type that its schema asks for."""

from __future__ import annotations

import re
from collections.abc import Callable

from ingot.text.formats.notation import JSON, PYTHON
from ingot.text.parser.arguments import JsonType, JsonTypes
from ingot.text.parser.values import Transcriber, escaped

_WHOLE = re.compile(r"(-?[0-9]+)(?:\.0+)?")
_FIRST: dict[str, JsonType] = {"{": "object", "[": "array", "t": "boolean", "f": "boolean", "n": "null"}


class TextValue:
    """One value, as it arrives.

    A string goes out at once, character by character as it was written. Where other types are allowed, the text is
    held for as long as it may be a value of one of them; if it turns out to be none, it is a string after all. A
    value that is never closed has written what was certain of it.
    """

    def __init__(self, kinds: JsonTypes, frame: str, emit: Callable[[str], None]) -> None:
        self._kinds = kinds
        self._frame = frame
        self._emit = emit
        self._at_start = True
        self._framed = False  # the frame stands before the value, and so it may stand behind it
        self._line_end = ""  # a line break, held until the value goes on or ends
        self._text: list[str] = []  # held until the type is known
        # A string that is allowed to be one and looks like Python's spelling of something is just that string.
        notations = (JSON,) if "string" in kinds else (JSON, PYTHON)
        self._readings = [] if kinds == {"string"} else [_Reading(Transcriber.of_value(each)) for each in notations]
        self._is_string = False
        if not self._readings:
            self._become_string()

    def write(self, text: str) -> None:
        if not text:
            return
        self._take(self._unframed(text))

    def _take(self, text: str) -> None:
        if self._is_string:
            self._emit(escaped(text))
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
        """Of a value that may not be a string and is held as a whole: to read on for a while, and to no effect."""
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
        self._emit('"' + escaped("".join(self._text)))
        self._text.clear()


class _Reading:
    """The text read in one notation."""

    def __init__(self, transcriber: Transcriber) -> None:
        self._transcriber = transcriber
        self._unread = ""
        self._written: list[str] = []
        self._kind_known = False

    def takes(self, text: str, kinds: JsonTypes) -> bool:
        """Whether the text so far may be a value of one of the kinds, other than a string."""
        text = self._unread + text
        self._unread = text[self._transcriber.feed(text, 0) :]
        progress = self._transcriber.progress
        if progress == "failed" or (progress == "done" and self._unread.strip()):
            return False
        self._written.append(self._transcriber.take())
        return self._kind_known or self._allowed(self._written[-1], kinds)

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
        whole = _WHOLE.fullmatch(value)
        return whole[1] if whole else None

    def _allowed(self, written: str, kinds: JsonTypes) -> bool:
        beginning = written.lstrip()[:1]
        if not beginning:
            return True
        self._kind_known = True
        if _is_number(beginning):
            return bool(kinds & {"number", "integer"})
        return _FIRST.get(beginning) in kinds


def _is_number(written: str) -> bool:
    return written != "" and written[0] in "-0123456789"
