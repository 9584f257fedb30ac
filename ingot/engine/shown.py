"""What a forward pass is shown: features of whatever media its prompt chunks reach into."""

from __future__ import annotations

from collections.abc import Sequence as Many

import mlx.core as mx

from ingot.engine.passes import LaunchPart
from ingot.models.vision.visual import Visual


def visual_of(parts: Many[LaunchPart]) -> Visual | None:
    """Of the tokens that are about to be computed; None where none of them stands for anything seen."""
    places: list[int] = []
    taken: list[tuple[mx.array, ...]] = []
    begin = 0
    for part in parts:
        for sequence in part.sequences:
            if sequence.sight is not None and not part.decoding:
                computed = sequence.computed
                for digest, numbers, at in sequence.sight.seen(computed, computed + part.width):
                    features = sequence.sight.features[digest]
                    taken.append(tuple(array[numbers.start : numbers.stop] for array in features.arrays))
                    places += range(begin + at.start - computed, begin + at.stop - computed)
            begin += part.width
    if not taken:
        return None
    joined = [each[0] if len(each) == 1 else mx.concatenate(list(each)) for each in zip(*taken, strict=True)]
    return Visual(mx.array(places, dtype=mx.int32), joined[0], tuple(joined[1:]))
