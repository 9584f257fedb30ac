"""Markers are found in arriving text as they would be in the whole."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ingot.text.parser.reader import Markers, TextReader
from tests.text.parser.answers import cut


def found(wanted: Markers, pieces: list[str]) -> list[tuple[str, str | None]]:
    """The texts, each with the marker behind it."""
    reader, story, text = TextReader(), [], ""

    def write(passed: str) -> None:
        nonlocal text
        text += passed

    def read():
        nonlocal text
        while True:
            marker = yield from reader.scan(wanted, write)
            story.append((text, marker))
            text = ""
            if marker is None:
                return
            reader.advance(reader.at + len(marker))

    machine = read()
    for piece in pieces:
        reader.feed(piece)
        next(machine)
    reader.end()
    next(machine, None)
    return story


@given(
    st.frozensets(st.text(alphabet="ab<", min_size=1, max_size=4), max_size=4),
    st.text(alphabet="ab<", max_size=30),
    st.lists(st.integers(0, 30)),
)
def test_the_leftmost_longest_marker_is_found_in_any_pieces(
    literals: frozenset[str], text: str, cuts: list[int]
) -> None:
    wanted = Markers(literals)
    story = found(wanted, cut(text, cuts))
    assert story == found(wanted, [text])
    at = 0
    for passed, marker in story:
        starts = [offset for offset in range(at, len(text)) if any(text.startswith(each, offset) for each in literals)]
        first = starts[0] if starts else len(text)
        assert passed == text[at:first]
        here = [each for each in literals if text.startswith(each, first)]
        assert marker == max(here, key=len, default=None)
        at = first + len(marker or "")


def test_what_cannot_be_a_marker_is_passed_on_at_once() -> None:
    wanted, reader, passed = Markers(frozenset({"<call>"})), TextReader(), []
    machine = reader.scan(wanted, passed.append)
    for piece in ("a <", "ca", "rs> <c", "all>"):
        reader.feed(piece)
        next(machine, None)
    assert [piece for piece in passed if piece] == ["a ", "<cars> "]
    assert reader.text[reader.at :] == "<call>"


def test_a_record_gives_back_what_was_passed_and_unread_text_is_read_again() -> None:
    reader = TextReader()
    reader.feed("one two three")
    reader.advance(4)
    reader.record("<")
    reader.advance(8)
    reader.feed("!")
    assert reader.recorded() == "<two "
    assert reader.recorded() == ""
    reader.unread("two ")
    assert reader.text[reader.at :] == "two three!"
