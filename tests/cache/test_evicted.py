from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ingot.cache.evicted import HEAD, Evicted

TOKENS = st.lists(st.integers(0, 2), max_size=12)
OWNER = ("", "")


@given(before=TOKENS, piece=TOKENS.filter(bool), after=TOKENS)
def test_what_was_evicted_is_known_to_whoever_goes_on_alike(
    before: list[int], piece: list[int], after: list[int]
) -> None:
    evicted = Evicted()
    evicted.add(OWNER, before, piece)
    assert evicted.holds(OWNER, [*before, *piece, *after], len(before))
    assert not evicted.holds(OWNER, [*before, *piece[:-1], 9, *after], len(before))
    assert not evicted.holds(("", "other"), [*before, *piece, *after], len(before))


def test_the_head_of_a_long_piece_is_enough() -> None:
    evicted = Evicted()
    evicted.add(OWNER, [1], list(range(100)))
    assert evicted.holds(OWNER, [1, *range(HEAD), 7, 7], 1)
    assert not evicted.holds(OWNER, [1, *range(HEAD - 1), 7, 7], 1)


def test_owners_cannot_be_spelled_so_that_they_run_together() -> None:
    evicted = Evicted()
    evicted.add(("a", "bc"), [1], [2])
    assert not evicted.holds(("ab", "c"), [1, 2], 1)


def test_the_memory_is_bounded() -> None:
    evicted = Evicted(most=3)
    for token in range(10):
        evicted.add(OWNER, [], [token])
    assert len(evicted) == 3
    assert evicted.holds(OWNER, [9], 0) and not evicted.holds(OWNER, [0], 0)
