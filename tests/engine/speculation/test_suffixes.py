"""Where the newest tokens of a text stood before."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingot.engine.speculation import suffixes
from ingot.engine.speculation.suffixes import LONGEST, SHORTEST, SLOT_BYTES, Match, Suffixes

repetitive = st.lists(st.integers(0, 3), max_size=200)


def learned(tokens: list[int], pieces: list[int] | None = None) -> Suffixes:
    index = Suffixes(tokens)
    for piece in pieces or []:
        index.learn(piece)
    index.learn(len(tokens))
    return index


def common(tokens: list[int], at: int, newest: list[int]) -> int:
    """How many tokens before `at` are the newest ones."""
    length = 0
    while length < min(at, len(newest), LONGEST) and tokens[at - length - 1] == newest[-length - 1]:
        length += 1
    return length


@given(repetitive)
def test_a_match_is_true_and_as_long_as_it_is(tokens: list[int]) -> None:
    found = learned(tokens).find(tokens[-LONGEST:])
    if found is not None:
        assert found.at < len(tokens) and found.length >= SHORTEST
        assert found.length == common(tokens, found.at, tokens)


@given(repetitive, repetitive, st.lists(st.integers(0, 40), max_size=6))
def test_how_a_text_is_learned_makes_no_difference(tokens: list[int], newest: list[int], pieces: list[int]) -> None:
    assert learned(tokens, pieces).find(newest) == learned(tokens).find(newest)


@given(repetitive, st.data())
def test_a_text_that_grows_is_known_up_to_its_last_token_but_one(tokens: list[int], data: st.DataObject) -> None:
    text: list[int] = []
    index = Suffixes(text)
    for token in tokens:
        text.append(token)
        index.learn(1)
        assert index.unlearned == 0
    assert index.find(tokens) == learned(tokens).find(tokens)


@given(repetitive, repetitive, st.integers(0, 150))
def test_what_was_dropped_is_never_found(tokens: list[int], newest: list[int], count: int) -> None:
    text = list(tokens)
    index = learned(text)
    index.drop(count)
    assert text == tokens[count:]
    found = index.find(newest)
    assert found is None or (found.at < len(text) and found.length == common(text, found.at, newest))
    index.learn(len(text))
    found = index.find(newest)
    assert found is None or found.length == common(text, found.at, newest)


def test_the_longest_match_is_found_and_of_those_the_latest() -> None:
    text = [*range(1, 10), 20, 6, 7, 8, 30, *range(1, 9), 40, 21, 6, 7, 8]
    assert learned(text).find([6, 7, 8]) == Match(22, 3)
    assert learned(text).find([2, 3, 4, 5, 6, 7, 8]) == Match(22, 7)
    assert learned(text).find([20, 6, 7, 8]) == Match(22, 3)  # of three tokens, only where they last stood is known
    assert learned(text).find([7, 8]) == Match(22, 2)
    assert learned(text).find([30, 2]) == Match(16, 1)  # a single token
    assert learned(text).find([99]) is None
    assert learned(text).find([]) is None


def test_nearly_all_places_of_a_long_text_are_found() -> None:
    chance = random.Random(7)
    text = [chance.randrange(50_000) for _ in range(60_000)]
    index = learned(text)
    places = [chance.randrange(100, len(text)) for _ in range(500)]
    found = [index.find(text[place - 40 : place]) for place in places]
    assert sum(match == Match(place, 40) for match, place in zip(found, places, strict=True)) >= 490


def test_an_index_takes_no_more_memory_than_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suffixes, "MOST_SLOTS", 1 << 12)
    text = list(range(40_000))
    index = learned(text)
    assert index.nbytes == (1 << 12) * SLOT_BYTES
    assert index.find(text[39_000:39_900]) == Match(39_900, LONGEST)  # what is new is known
    assert index.find(text[100:200]) is None
    small: list[int] = []
    growing = Suffixes(small)
    for token in range(4000):
        small.append(token)
        growing.learn(8)
    assert growing.nbytes <= (1 << 12) * SLOT_BYTES


def test_tables_shrink_with_the_text() -> None:
    text = list(range(30_000))
    index = learned(text)
    before = index.nbytes
    index.drop(29_000)
    assert index.nbytes < before / 8
    index.learn(len(text))
    assert index.find(list(range(29_400, 29_500))) == Match(500, LONGEST)


def test_no_more_is_learned_at_once_than_asked_for_also_where_tables_are_made_anew() -> None:
    text = list(range(500))
    index = learned(text)
    text += range(500, 3000)
    assert index.learn(64) == 64
    assert index.unlearned == 3000 - 65
    while index.unlearned:
        assert 0 < index.learn(64) <= 64
    assert index.learn(64) == 0
    assert index.find(text[:450]) == Match(450, LONGEST)


def test_places_are_counted_anew_before_numbers_run_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suffixes, "_MOST_GONE", 100)
    text: list[int] = []
    index = Suffixes(text)
    for start in range(0, 2000, 50):
        text += range(start, start + 50)
        index.drop(max(0, len(text) - 90))
        index.learn(1000)
        place = 80 if len(text) == 90 else 40
        assert index.find(text[place - 20 : place]) == Match(place, 20)
