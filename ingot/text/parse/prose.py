"""Running text of an answer, cleared of the white space that only sets markers apart."""

from __future__ import annotations

import re
from collections.abc import Callable

from ingot.text.parse.fences import Fences

_SPACE = " \t\r\n"
_JSON_SIGNS = re.compile(r'\\.|\\\Z|["\n]', re.DOTALL)


class _JsonStrings:
    """Follows a text that may be a JSON document, and knows whether what comes next is within a string of it."""

    def __init__(self) -> None:
        self.inside = False
        self._is_json: bool | None = None  # it begins with a bracket
        self._escape = ""  # half of one

    def write(self, text: str) -> None:
        if self._is_json is None and (begins := text.lstrip(_SPACE)[:1]):
            self._is_json = begins in "{["
        if not self._is_json:
            return
        text = self._escape + text
        self._escape = ""
        for sign in _JSON_SIGNS.findall(text):
            if sign == "\\":
                self._escape = sign
            else:
                self.inside = not self.inside if sign == '"' else self.inside and sign != "\n"


class Prose:
    """Hands text on as it comes, but for white space next to a marker: models are taught to write line breaks
    around tags and calls, and templates write them again.

    White space is held until it is known what it is. Text follows: it goes out. A marker follows (`restart`): it is
    dropped, unless more text comes later, from which it then sets off what was said before the marker. The answer
    ends (`finish`): it goes out, if there was text since the last marker.
    """

    def __init__(self, emit: Callable[[str], None]) -> None:
        self._emit = emit
        self._fences = Fences()
        self._held: list[str] = []
        self._between = ""  # white space that stood before the last markers, with text before it
        self._silent = True  # nothing has gone out yet
        self._after_marker = False
        self.blank = True  # nothing but white space since the beginning or the last marker
        self.at_line_start = True  # nothing but white space since the last line break
        self._first = self._last = ""  # the line's first and last characters, white space aside
        self._spaced = True  # white space is what was written last
        self._json = _JsonStrings()

    @property
    def fenced(self) -> bool:
        """Whether the line stands within fenced code."""
        return self._fences.open

    @property
    def quotes(self) -> bool:
        """Whether what comes next is shown rather than said: as code, in quotes, or in a quoted line."""
        return self.fenced or self._first == ">" or self._last in tuple("`'\"“‘«")

    @property
    def attached(self) -> bool:
        """Whether what comes next stands right behind a word or a sentence, as what is shown does not."""
        said = self._last.isalnum() or self._last in tuple(".!?:;…。！？：；")
        return said and not self._spaced and not self.quotes

    @property
    def in_json_string(self) -> bool:
        return self._json.inside

    @property
    def silent(self) -> bool:
        """Whether nothing was said yet."""
        return self._silent

    def write(self, text: str) -> None:
        if not text:
            return
        self._follow_lines(text)
        self._json.write(text)
        body = text.rstrip(_SPACE)
        if body:
            self._emit(self._leading(body) + body.lstrip(_SPACE))
            self._held.clear()
            self.blank = self._silent = False
        self._held.append(text[len(body) :])

    def restart(self) -> None:
        if not self._silent and not self._between:
            self._between = "".join(self._held)
        self._held.clear()
        self._fences.end_line()
        self._first = self._last = ""
        self._json = _JsonStrings()
        self._after_marker = self.blank = self.at_line_start = True

    def finish(self) -> None:
        held = "".join(self._held)
        if held and not (self.blank and self._after_marker):
            self._emit(held)
        self._held.clear()

    def _leading(self, body: str) -> str:
        """The white space that goes out before `body`."""
        space = "".join(self._held) + body[: len(body) - len(body.lstrip(_SPACE))]
        if not (self.blank and self._after_marker):
            return space
        leading = "" if self._silent else self._between or space
        self._between = ""
        return leading

    def _follow_lines(self, text: str) -> None:
        self._fences.write(text)
        line = text[text.rfind("\n") + 1 :]
        if "\n" in text:
            self._first = self._last = ""
        self._spaced = text[-1] in _SPACE
        if shown := line.strip(_SPACE):
            self._first, self._last = self._first or shown[0], shown[-1]
        self.at_line_start = not line.strip(_SPACE) and (self.at_line_start or "\n" in text)
