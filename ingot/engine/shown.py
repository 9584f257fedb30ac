"""What a forward pass is shown: features of whatever media its tokens reach into."""

from __future__ import annotations

from collections.abc import Iterable

import mlx.core as mx

from ingot.engine.sequence import Sequence
from ingot.models.vision.visual import Visual

Stretch = tuple[Sequence, int, int]
"""Tokens of a sequence: the first one's place, and how many."""


def visual_of(stretches: Iterable[Stretch]) -> Visual | None:
    """Of a pass over these tokens, one stretch behind another; None where none of them stands for anything seen."""
    places: list[int] = []
    taken: list[tuple[mx.array, ...]] = []
    number = 0
    for sequence, begin, count in stretches:
        sight = sequence.sight
        for digest, features, at in () if sight is None else sight.seen(begin, begin + count):
            assert sight is not None
            shown = sight.features[digest]
            taken.append(tuple(array[features.start : features.stop] for array in shown.arrays))
            places += range(number + at.start - begin, number + at.stop - begin)
        number += count
    if not taken:
        return None
    joined = [each[0] if len(each) == 1 else mx.concatenate(list(each)) for each in zip(*taken, strict=True)]
    return Visual(mx.array(places, dtype=mx.int32), joined[0], tuple(joined[1:]))
