"""Which frames of a clip are shown."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from ingot.media.layout import snap_to_keyframes, spread_frames


def test_a_key_stands_in_for_what_is_near_it() -> None:
    assert snap_to_keyframes([0, 10, 20, 30], [1, 9, 14, 33]) == [1, 9, 20, 33]
    assert snap_to_keyframes([0, 10, 20, 30], []) == [0, 10, 20, 30]
    assert snap_to_keyframes([7], [9]) == [7]


@given(
    total=st.integers(1, 2000),
    count=st.integers(1, 80),
    keys=st.lists(st.integers(0, 1999), max_size=60, unique=True).map(sorted),
)
def test_no_frame_moves_further_than_half_the_way_to_the_next_and_none_is_shown_twice(
    total: int, count: int, keys: list[int]
) -> None:
    frames = spread_frames(total, min(count, total))
    found = snap_to_keyframes(frames, keys)
    apart = (frames[-1] - frames[0]) / max(1, len(frames) - 1)
    assert all(abs(one - other) <= apart / 2 for one, other in zip(found, frames, strict=True))
    assert all(one < other for one, other in pairwise(found))
