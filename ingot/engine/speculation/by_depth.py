"""What a model guessed for several rows at once, as it comes from the device."""

from __future__ import annotations

from collections.abc import Sequence as Many

import mlx.core as mx


def columns(by_depth: Many[mx.array], rows: int) -> list[list[float]]:
    """What each row was given, depth by depth, where the first rows go as deep as the others or deeper."""
    found: list[list[float]] = [[] for _ in range(rows)]
    for given in by_depth:
        values: list[float] = given.tolist()  # type: ignore[assignment]
        for number, value in enumerate(values):
            found[number].append(value)
    return found
