"""Which frames of a clip are shown."""

from __future__ import annotations


def spread(total: int, count: int) -> list[int]:
    """So many of a clip's frames, from its first to its last, as evenly as can be."""
    if count == 1:
        return [0]
    step = (total - 1) / (count - 1)
    return [round(at * step) for at in range(count - 1)] + [total - 1]
