"""Text that arrives in pieces, read as if it were all there.

The readers of a grammar are generators: where what has arrived does not decide, they yield, and go on when there is
more or nothing more will come. So a grammar reads top to bottom, and no piece boundary can show in its result. Each
character is passed once: what stays unread between two pieces is never longer than a marker.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Set
from functools import lru_cache
from typing import TypeVar

T = TypeVar("T")
Steps = Generator[None, None, T]

MOST_SPACE = 64  # characters of white space that may stand between two literals of a sequence

_SPACE = re.compile(r"[ \t\r\n]*")


class Markers:
    """A set of literals to be found in arriving text: the leftmost, and of several there the longest."""

    def __init__(self, literals: frozenset[str]) -> None:
        self._pattern = _any_of_pattern(literals)
        self._firsts = _any_of_pattern({literal[0] for literal in literals})
        self._prefixes = {literal[:size] for literal in literals for size in range(1, len(literal))}
        self._reach = max(map(len, self._prefixes), default=0)

    def find(self, text: str, at: int, ended: bool) -> tuple[int, str | None]:
        """Where text that is surely no marker ends, and the marker that is surely there, if one is."""
        match = self._pattern.search(text, at)
        if match is not None and (ended or match.start() < len(text) - self._reach):
            return match.start(), match.group()
        undecided = len(text) if ended else self.undecided(text, at)
        if match is not None and match.start() < undecided:
            return match.start(), match.group()
        return undecided, None

    def undecided(self, text: str, at: int = 0) -> int:
        """The first offset from which the text could still become a (longer) marker."""
        start = max(at, len(text) - self._reach)
        while (match := self._firsts.search(text, start)) is not None:
            if text[match.start() :] in self._prefixes:
                return match.start()
            start = match.start() + 1
        return len(text)


def _any_of_pattern(literals: Set[str]) -> re.Pattern[str]:
    longest_first = sorted(literals, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


@lru_cache(maxsize=256)
def make_markers(*literals: str) -> Markers:
    return Markers(frozenset(literals))


class TextReader:
    """The arriving text and an offset in it. While recording, what is passed is also stored, to be emitted as text.

    A copy (`start_copy`) is independent of any recording meanwhile.
    """

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.ended = False
        self.cut = False
        self._record: list[str] | None = None
        self._copy: list[str] | None = None
        self._ahead: list[str] | None = None  # while looking ahead: what was passed and may be put back,
        self._lookahead_from: int | None = None  # and from where on, unless more text has arrived since

    def feed(self, text: str) -> None:
        self.text = self.text[self.at :] + text
        self.at = 0
        self._lookahead_from = None

    def end(self, *, cut: bool = False) -> None:
        """`cut`: not of itself, so that more would have come."""
        self.ended, self.cut = True, cut

    def advance(self, to: int) -> str:
        """Pass the text up to `to`."""
        passed = self.text[self.at : to]
        self.at = to
        if self._ahead is not None:
            self._ahead.append(passed)
        else:
            self._note(passed)
        return passed

    def _note(self, passed: str) -> None:
        if self._record is not None:
            self._record.append(passed)
        if self._copy is not None:
            self._copy.append(passed)

    def record(self, beginning: str = "") -> None:
        self._record = [beginning]

    def forget(self) -> None:
        self._record = None

    def recorded(self) -> str:
        """What was passed since `record`, and the end of recording."""
        recorded = "".join(self._record or ())
        self._record = None
        return recorded

    @property
    def unsettled_text(self) -> str:
        """What is recorded, and what comes next as far as it has arrived."""
        return "".join(self._record or ()) + self.text[self.at :]

    def start_copy(self, beginning: str) -> None:
        self._copy = [beginning]

    def end_copy(self) -> str:
        """What was passed since `start_copy`, and its beginning."""
        copied = "".join(self._copy or ())
        self._copy = None
        return copied

    def unread(self, text: str) -> None:
        """Put back what was passed, to be read again."""
        self.text = text + self.text[self.at :]
        self.at = 0

    def start_lookahead(self) -> None:
        """What is passed from here on is put back by `undo_lookahead`, or passed for good by `keep_lookahead`."""
        self._ahead, self._lookahead_from = [], self.at

    def undo_lookahead(self) -> None:
        if self._lookahead_from is None:
            self.unread("".join(self._ahead or ()))
        else:
            self.at = self._lookahead_from
        self._ahead = None

    def keep_lookahead(self) -> str:
        """Passes what was read while looking ahead."""
        passed = "".join(self._ahead or ())
        self._ahead = None
        self._note(passed)
        return passed

    def cut_short(self, literals: tuple[str, ...]) -> bool:
        """Whether the text has ended within one of the literals, or right before it."""
        remaining = self.text[self.at : self.at + max(map(len, literals), default=0) + 1]
        return self.ended and any(literal.startswith(remaining) for literal in literals)

    def drop_remaining(self) -> None:
        self.at = len(self.text)
        self._record = None

    def sees(self, literal: str) -> Steps[bool]:
        """Whether `literal` comes next; passes nothing."""
        while True:
            if self.text.startswith(literal, self.at):
                return True
            if self.ended or not literal.startswith(self.text[self.at : self.at + len(literal)]):
                return False
            yield

    def next_in_turn(self, alternatives: tuple[tuple[str, ...], ...]) -> Steps[bool]:
        """Whether one of each of these alternatives comes next, in turn, with little white space between.

        Passes nothing. The first literal that fits counts; an empty one always does, where no other could.
        """
        while (seen := self._in_turn(alternatives)) is None:
            yield
        return seen

    def _in_turn(self, alternatives: tuple[tuple[str, ...], ...]) -> bool | None:
        """None: what has arrived does not decide."""
        at = self.at
        for literals in alternatives:
            ahead = self.text[at : at + MOST_SPACE]
            at += len(ahead) - len(ahead.lstrip(" \t\r\n"))
            found = next((each for each in literals if self.text.startswith(each, at)), None)
            partial = (each for each in literals if each and each.startswith(self.text[at : at + len(each)]))
            if not found and not self.ended and any(partial):
                return None
            if found is None:
                return False
            at += len(found)
        return True

    def ahead(self, size: int) -> Steps[str]:
        """The next `size` characters, or all that come; passes nothing."""
        while len(self.text) - self.at < size and not self.ended:
            yield
        return self.text[self.at : self.at + size]

    def literal(self, literal: str) -> Steps[bool]:
        """Passes `literal` if it comes next."""
        if not (yield from self.sees(literal)):
            return False
        self.advance(self.at + len(literal))
        return True

    def one_of(self, literals: tuple[str, ...]) -> Steps[str | None]:
        """Passes and returns the first of `literals` that comes next."""
        for literal in literals:
            if (yield from self.literal(literal)):
                return literal
        return None

    def run(self, pattern: re.Pattern[str], limit: int) -> Steps[str]:
        """Passes what `pattern`, some repeated character class, matches: at most a little more than `limit`."""
        passed: list[str] = []
        size = 0
        while True:
            match = pattern.match(self.text, self.at)
            if match is not None:
                passed.append(self.advance(match.end()))
                size += len(passed[-1])
            if self.at < len(self.text) or self.ended or size > limit:
                return "".join(passed)
            yield

    def gap(self) -> Steps[str]:
        """Passes white space."""
        passed: list[str] = []
        while True:
            match = _SPACE.match(self.text, self.at)
            assert match is not None
            passed.append(self.advance(match.end()))
            if self.at < len(self.text) or self.ended:
                return "".join(passed)
            yield

    def scan(self, markers: Markers, write: Callable[[str], None]) -> Steps[str | None]:
        """Hands on the text up to the next marker, and stops before it; None when the text has ended instead."""
        while True:
            stop, marker = markers.find(self.text, self.at, self.ended)
            write(self.advance(stop))
            if marker is not None or self.ended:
                return marker
            yield

    def until(self, markers: Markers, limit: int) -> Steps[tuple[str, str] | None]:
        """Passes text and the marker that ends it. None where none comes within `limit` or so: nothing is certain
        then of how much was passed, so be recording."""
        found: list[str] = []
        size = 0
        while True:
            stop, marker = markers.find(self.text, self.at, self.ended)
            found.append(self.advance(stop))
            size += len(found[-1])
            if size > limit:
                return None
            if marker is not None:
                self.advance(self.at + len(marker))
                return "".join(found), marker
            if self.ended:
                return None
            yield
