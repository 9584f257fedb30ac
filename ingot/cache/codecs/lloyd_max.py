"""The best few numbers to stand for one coordinate of a random direction (Lloyd 1957, Max 1960).

A coordinate of a vector drawn evenly from the sphere, times the square root of its size, has the density
(1 - x²/size)^((size - 3)/2): close to a bell curve, and a little narrower. The tables are found for that law by Lloyd's
iteration, once for each size and number of bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

Numbers = np.ndarray[Any, np.dtype[np.float64]]

STEPS = 1 << 16
"""Of the grid on which the density is summed up."""
ROUNDS = 4000
SETTLED = 1e-9


@dataclass(frozen=True, slots=True)
class Codebook:
    """`levels` in rising order, the borders between them, and the mean square of what is lost, of a variance of 1."""

    levels: tuple[float, ...]
    borders: tuple[float, ...]
    distortion: float


@lru_cache(maxsize=64)
def codebook(size: int, bits: int) -> Codebook:
    edges = np.linspace(-np.sqrt(size), np.sqrt(size), STEPS + 1)
    middles = (edges[1:] + edges[:-1]) / 2
    density = np.maximum(1 - middles**2 / size, 0) ** ((size - 3) / 2)
    density /= density.sum()
    mass, moment = (np.concatenate([[0.0], np.cumsum(each)]) for each in (density, density * middles))
    levels = _quantiles(mass, edges, 1 << bits)
    for _ in range(ROUNDS):
        before = levels
        inner = (levels[1:] + levels[:-1]) / 2
        borders = np.concatenate([[edges[0]], inner, [edges[-1]]])
        held, moved = (np.diff(np.interp(borders, edges, each)) for each in (mass, moment))
        levels = moved / held
        levels = (levels - levels[::-1]) / 2  # the law has no side
        if np.abs(levels - before).max() < SETTLED:
            break
    inner = (levels[1:] + levels[:-1]) / 2
    lost = (middles - levels[np.searchsorted(inner, middles)]) ** 2
    return Codebook(tuple(levels.tolist()), tuple(inner.tolist()), float((density * lost).sum()))


def _quantiles(mass: Numbers, edges: Numbers, count: int) -> Numbers:
    return np.interp((np.arange(count) + 0.5) / count, mass, edges)
