from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ingot.observe.speculation import SpeculationCounts

GUESSES = st.integers(0, 20).flatmap(lambda proposed: st.tuples(st.just(proposed), st.integers(0, proposed)))


@given(st.lists(GUESSES))
def test_guesses_add_up_in_all_and_by_position(guesses: list[tuple[int, int]]) -> None:
    counts = SpeculationCounts()
    for proposed, accepted in guesses:
        counts.add(proposed, accepted)
    assert counts.drafts == len(guesses)
    assert counts.draft_tokens == sum(proposed for proposed, _ in guesses)
    assert counts.accepted_tokens == sum(accepted for _, accepted in guesses) == sum(counts.accepted_per_position)
    longest = max((accepted for _, accepted in guesses), default=0)
    expected = [sum(accepted > position for _, accepted in guesses) for position in range(longest)]
    assert counts.accepted_per_position == expected


def test_rounds_add_up_by_rows_and_tokens() -> None:
    counts = SpeculationCounts()
    for rows, tokens, seconds in ((1, 4, 0.5), (1, 4, 0.25), (2, 4, 1.0)):
        counts.ran(rows, tokens, seconds)
    assert counts.rounds == {(1, 4): (2, 0.75), (2, 4): (1, 1.0)}
