"""What is left of a prompt, where it stands, and what it is known by."""

from __future__ import annotations

import numpy as np

from ingot.engine.request import Request
from ingot.engine.sequence import Sequence
from ingot.engine.sparse.thinned import GAP, Thinned

WHOLE = tuple(range(100, 120))
LEFT = np.array([0, 1, 2, 5, 6, 12, 19], np.int32)


def sequence() -> Sequence:
    made = Sequence(Request("r", (WHOLE,)), 0, 0, WHOLE, 8, 0)
    made.marks = frozenset({2, 6, 20})
    return made


def test_tokens_stand_where_they_stood_and_those_behind_the_prompt_behind_all_of_it() -> None:
    thinned = Thinned(WHOLE, LEFT)
    assert thinned.tokens == (100, 101, 102, 105, 106, 112, 119)
    assert [thinned.position(place) for place in range(10)] == [0, 1, 2, 5, 6, 12, 19, 20, 21, 22]


def test_positions_are_stated_only_where_one_does_not_follow_another() -> None:
    thinned = Thinned(WHOLE, LEFT)
    assert thinned.stated(0, 2) is None
    assert thinned.stated(7, 9) is None
    assert thinned.stated(6, 9) is None
    for begin, end in ((0, 3), (2, 4), (3, 7), (0, 9)):
        stated = thinned.stated(begin, end)
        assert stated is not None and stated.dtype == np.int32
        assert stated.tolist() == [thinned.position(place) for place in range(begin, end)]


def test_what_stands_behind_a_gap_is_known_by_nothing_that_a_whole_prompt_could_hold() -> None:
    keys = Thinned(WHOLE, LEFT).keyed([*Thinned(WHOLE, LEFT).tokens, 7])
    assert keys == [100, 101, 102, 105 + 2 * GAP, 106, 112 + 5 * GAP, 119 + 6 * GAP, 7]


def test_the_same_tokens_at_other_positions_have_other_keys() -> None:
    one, other = Thinned((1, 2, 2, 3), np.array([0, 1, 3])), Thinned((1, 2, 2, 3), np.array([0, 2, 3]))
    assert one.tokens == other.tokens
    assert one.keyed(one.tokens) != other.keyed(other.tokens)


def test_keys_of_a_beginning_are_the_beginning_of_the_keys() -> None:
    thinned = Thinned(WHOLE, LEFT)
    whole = thinned.keyed(thinned.tokens)
    for count in range(len(whole) + 1):
        assert thinned.keyed(thinned.tokens[:count]) == whole[:count]


def test_a_sequence_goes_on_with_what_is_left_and_knows_what_was_sent() -> None:
    thin = sequence()
    thin.thin(LEFT)
    assert thin.total == len(LEFT) and thin.peak == len(LEFT) + 7
    assert thin.whole_prompt == WHOLE and thin.tokens == list(thin.prompt)
    assert thin.marks == {2, 4, 7}  # as much is stored when so much of the prompt has passed


def test_nothing_left_out_is_nothing_changed() -> None:
    thin = sequence()
    thin.thin(np.arange(20, dtype=np.int32))
    assert thin.keys == list(WHOLE) and thin.stated(0, 20) is None and thin.position(25) == 25
