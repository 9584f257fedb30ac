"""Which frames of a clip are shown."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence


def spread(total: int, count: int) -> list[int]:
    """So many of a clip's frames, from its first to its last, as evenly as can be."""
    if count == 1:
        return [0]
    step = (total - 1) / (count - 1)
    return [round(at * step) for at in range(count - 1)] + [total - 1]


def near(frames: Sequence[int], keys: Sequence[int]) -> list[int]:
    """Of each frame the nearest of `keys`, where that is no further away than half of what frames are apart; else the
    frame itself. Both are in order, and so are the found; no two frames become one."""
    reach = (frames[-1] - frames[0]) / (2 * max(1, len(frames) - 1))
    found: list[int] = []
    for frame in frames:
        at = bisect_left(keys, frame)
        nearest = min(keys[max(0, at - 1) : at + 1], key=lambda key: abs(key - frame), default=frame)
        close = abs(nearest - frame) <= reach and nearest not in found[-1:]
        found.append(nearest if close else frame)
    return found
