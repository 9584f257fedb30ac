"""In which rounds nobody is asked for guesses."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingot.engine.speculation.lookout import FULL, HOPELESS, LONGEST, SHARE, Lookout

PLAIN = 0.01


def looks(lookout: Lookout, rows: list[int], rounds: int, seconds: float, *, hopeless: bool = False) -> list[int]:
    """In which of so many rounds it looks, each time in vain."""
    found = []
    for number in range(rounds):
        if not lookout.rests(rows):
            found.append(number)
            lookout.looked(seconds, rows)
            lookout.found_nothing(PLAIN, hopeless=hopeless)
        if lookout.resting:
            lookout.passes()
    return found


@pytest.mark.parametrize("share", [0.01, 0.03, 0.1])
def test_looks_in_vain_take_a_small_share_of_all_time(share: float) -> None:
    rows = list(range(16))
    found = looks(Lookout(), rows, 2000, share * PLAIN)
    assert len(found) * share <= FULL + 1.1 * SHARE * 2000
    assert max(after - before for before, after in pairwise(found)) <= LONGEST + 1


def test_cheap_looks_are_taken_in_every_round() -> None:
    assert looks(Lookout(), [1], 500, 0.9 * SHARE * PLAIN) == list(range(500))


def test_where_nothing_could_pay_rounds_go_by_at_once() -> None:
    assert looks(Lookout(), [1, 2], 2 * HOPELESS + 3, 1e-5, hopeless=True) == [0, HOPELESS + 1, 2 * HOPELESS + 2]


def test_for_a_row_that_is_new_it_looks_at_once_and_a_while() -> None:
    lookout = Lookout()
    looks(lookout, [1], 1000, 0.03 * PLAIN)
    tired = looks(lookout, [1], 5, 0.03 * PLAIN)
    assert len(tired) <= 1
    assert looks(lookout, [2], 5, 0.03 * PLAIN) == [0, 1, 2, 3, 4]


def test_one_that_is_new_among_many_changes_little() -> None:
    lookout, rows = Lookout(), list(range(16))
    looks(lookout, rows, 1000, 0.05 * PLAIN)
    found = []
    for newcomer in range(16, 116):  # another one every four rounds
        rows = [*rows[1:], newcomer]
        found += looks(lookout, rows, 4, 0.05 * PLAIN)
    assert len(found) * 0.05 < 0.01 * 400


def test_when_few_rows_are_left_it_looks_again() -> None:
    lookout = Lookout()
    assert looks(lookout, list(range(16)), 3, 1e-5, hopeless=True) == [0]
    assert looks(lookout, [0], 30, 1e-5, hopeless=True)


def test_after_something_was_found_it_looks_in_every_round_for_a_while() -> None:
    lookout = Lookout()
    looks(lookout, [1], 1000, 0.02 * PLAIN)
    while lookout.rests([1]):
        lookout.passes()
    lookout.looked(0.02 * PLAIN, [1])
    lookout.found()
    assert looks(lookout, [1], 8, 0.02 * PLAIN) == list(range(8))


@given(st.lists(st.tuples(st.sets(st.integers(0, 9), min_size=1), st.floats(0, 1), st.booleans()), max_size=60))
def test_it_never_rests_for_longer_than_it_may(rounds: list[tuple[set[int], float, bool]]) -> None:
    lookout, rested = Lookout(), 0
    for rows, seconds, hopeless in rounds:
        if lookout.rests(rows):
            rested += 1
        else:
            rested = 0
            lookout.looked(seconds, rows)
            lookout.found_nothing(PLAIN, hopeless=hopeless)
        if lookout.resting:
            lookout.passes()
        assert rested <= HOPELESS
