"""What a head's norms multiply by, whichever way it is stored.

Some families publish it as its difference from one, and conversions store it as it is; a file beside a model may be
either. Adding one twice gives a head that guesses little, and nothing else shows it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from typing import Any

import mlx.core as mx

from ingot.errors import ModelError

LOWEST, BETWEEN, HIGHEST = -0.9, 0.5, 100.0
"""Means of a norm's weights: differences from one lie from the first to the second, factors from that to the last."""


def factors(norms: Mapping[str, mx.array], *, published: bool | None, whose: str) -> dict[str, mx.array]:
    """The norms' factors. `published` says whether the tensors around them are as they were published, if anything
    does; a head that was joined to a converted model may be stored either way, so that then its own numbers tell.

    Raises ModelError where they are neither.
    """
    middle = statistics.median(_means(norms))
    if not LOWEST <= middle <= HIGHEST:
        raise ModelError(
            f"The norms of the head in {whose} are neither factors nor differences from one: their mean is {middle:.3g}"
        )
    differences = middle < BETWEEN or bool(published)
    return {name: norm + 1 if differences else norm for name, norm in norms.items()}


def _means(norms: Mapping[str, mx.array]) -> list[float]:
    means: list[Any] = [mx.mean(norm.astype(mx.float32)).item() for norm in norms.values()]
    return [mean if math.isfinite(mean) else math.inf for mean in means]
