from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingot.errors import BadRequest
from ingot.text.tokenizer.detokenizer import Released, StopMatcher
from tests.text.work import spent

texts = st.text(alphabet="ab\n<", max_size=60)
stop_sets = st.lists(st.text(alphabet="ab\n<", min_size=1, max_size=5), max_size=4).map(tuple)


def run(pieces: list[str], strings: tuple[str, ...], keep: bool = False) -> tuple[str, str | None]:
    matcher = StopMatcher(strings, keep)
    out = ""
    for piece in pieces:
        released = matcher.push(piece)
        out += released.text
        if released.stopped_by is not None:
            return out + matcher.flush(), released.stopped_by
    return out + matcher.flush(), None


def search(text: str, strings: tuple[str, ...], keep: bool) -> tuple[str, str | None]:
    """The contract, said the slow way."""
    for end in range(1, len(text) + 1):
        ending = [s for s in strings if text[:end].endswith(s)]
        if ending:
            longest = max(ending, key=len)
            return text[: end if keep else end - len(longest)], longest
    return text, None


def cut(text: str, places: list[int]) -> list[str]:
    edges = sorted({min(place, len(text)) for place in places} | {0, len(text)})
    return [text[a:b] for a, b in itertools.pairwise(edges)]


@given(texts, stop_sets, st.lists(st.integers(0, 60)), st.booleans())
def test_any_split_gives_what_a_plain_search_of_the_whole_text_gives(
    text: str, strings: tuple[str, ...], places: list[int], keep: bool
) -> None:
    assert run(cut(text, places), strings, keep) == search(text, strings, keep)


@given(texts, stop_sets)
def test_what_was_sent_is_always_a_prefix_of_the_final_text(text: str, strings: tuple[str, ...]) -> None:
    final, _ = search(text, strings, keep=False)
    matcher, sent = StopMatcher(strings, keep=False), ""
    for char in text:
        sent += matcher.push(char).text
        assert final.startswith(sent)


@given(texts, stop_sets)
def test_no_more_is_held_back_than_could_still_become_a_stop_string(text: str, strings: tuple[str, ...]) -> None:
    matcher, sent = StopMatcher(strings, keep=False), ""
    for index, char in enumerate(text):
        released = matcher.push(char)
        sent += released.text
        if released.stopped_by is not None:
            return
        held = text[len(sent) : index + 1]
        assert held == "" or any(s.startswith(held) and s != held for s in strings)


def test_a_stop_string_split_over_tokens_never_leaks() -> None:
    matcher = StopMatcher(("</answer>",), keep=False)
    assert matcher.push("42</") == Released("42", None)
    assert matcher.push("ans") == Released("", None)
    assert matcher.push("wer>tail") == Released("", "</answer>")


def test_a_false_start_is_released_once_it_cannot_match() -> None:
    matcher = StopMatcher(("</answer>",), keep=False)
    matcher.push("</ans")
    assert matcher.push("!") == Released("</ans!", None)


def test_the_match_that_ends_first_wins_over_the_one_that_starts_first() -> None:
    assert run(["abcd"], ("abcd", "bc")) == ("a", "bc")


def test_of_matches_that_end_together_the_longest_wins() -> None:
    assert run(["xab"], ("b", "ab")) == ("x", "ab")


def test_kept_stop_strings_end_the_text_and_hold_nothing_back() -> None:
    matcher = StopMatcher(("END",), keep=True)
    assert matcher.push("oneEN") == Released("oneEN", None)
    assert matcher.push("D two") == Released("D", "END")


def test_nothing_follows_a_stop() -> None:
    matcher = StopMatcher(("x",), keep=False)
    matcher.push("axb")
    assert matcher.push("c") == Released("", "x")
    assert matcher.flush() == ""


def test_without_stop_strings_everything_passes_at_once() -> None:
    matcher = StopMatcher((), keep=False)
    assert matcher.push("anything") == Released("anything", None)
    assert matcher.flush() == ""


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(BadRequest):
        StopMatcher(("a", ""), keep=False)


def test_a_character_costs_the_same_however_long_stop_strings_are() -> None:
    text = "a" * 40_000

    def matched(size: int) -> None:
        matcher = StopMatcher(("a" * size + "b", "a" * (size - 1) + "c"), keep=False)
        sent = sum(len(matcher.push(text[i : i + 3]).text) for i in range(0, len(text), 3))
        assert sent + len(matcher.flush()) == len(text)

    assert spent(lambda: matched(2000)) < 8 * spent(lambda: matched(20))
