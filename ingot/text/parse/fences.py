"""Fenced code in running text: lines of three backticks and more."""

from __future__ import annotations

_FENCE = "```"
_SPACE = " \t\r"


class Fences:
    """Follows text as it comes, and knows whether the line that is being written stands within a fence."""

    def __init__(self) -> None:
        self.open = False
        self._head = ""  # the line's first characters, white space aside: as many as may be a fence
        self._named = False  # something stands behind them
        self._quoted = False  # and backticks in it: then they set off code within a line

    def write(self, text: str) -> None:
        *lines, last = text.split("\n")
        for line in lines:
            self._go_on(line)
            self.end_line()
        self._go_on(last)

    def end_line(self) -> None:
        if self._head == _FENCE and not self._quoted:
            self.open = not self.open or self._named
        self._head, self._named, self._quoted = "", False, False

    def _go_on(self, piece: str) -> None:
        missing = len(_FENCE) - len(self._head)
        if missing:
            piece = piece if self._head else piece.lstrip(_SPACE)
            self._head, piece = self._head + piece[:missing], piece[missing:]
        behind = piece if self._named else piece.lstrip("`").strip(_SPACE)
        self._named = self._named or behind != ""
        self._quoted = self._quoted or "`" in behind
