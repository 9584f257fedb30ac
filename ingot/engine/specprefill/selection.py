"""Which tokens of a prompt are computed: what always is, and the best chunks of the rest. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Many
from math import ceil
from typing import Any

import numpy as np

from ingot.engine.sparse.ask import Span

Flags = np.ndarray[Any, np.dtype[np.bool_]]
Scores = np.ndarray[Any, np.dtype[np.float32]]
Places = np.ndarray[Any, np.dtype[np.int32]]
Numbers = np.ndarray[Any, np.dtype[np.int64]]
Means = np.ndarray[Any, np.dtype[np.float64]]

CHUNK = 32
"""Tokens that are kept or left out together."""
FIRST = LAST = 64
"""Tokens at both ends of a prompt that are always computed: the first are what attention rests on."""
AROUND = 4
"""Tokens on each side of a message's end: what marks it, and says whose the next one is."""
NEIGHBOURS = ((8192, 0), (32768, 1), (65536, 2))
"""(length, chunks): up to so long a prompt, so many chunks on each side of a good one are kept with it."""
MOST_NEIGHBOURS = 4


def always(
    length: int,
    whole: Iterable[Span] = (),
    ends: Iterable[int] = (),
    *,
    window: int = 0,
    media: Iterable[Span] = (),
) -> Flags:
    """The tokens that are computed whatever they score: the first and the last, those of `whole` spans and around the
    `ends` of messages; of a model with windows, all that the widest still sees behind the prompt. A medium of which
    that is a part is computed with all its tokens."""
    flags = np.zeros(length, np.bool_)
    flags[:FIRST] = True
    flags[max(0, length - max(LAST, window)) :] = True
    for begin, end in (*whole, *((end - AROUND, end + AROUND) for end in ends)):
        flags[max(0, begin) : max(0, end)] = True
    for begin, end in media:
        flags[begin:end] |= flags[begin:end].any()
    return flags


def kept_count(flags: Flags, keep: float) -> int:
    """How many tokens will be kept, give or take a chunk or a medium, whatever they score."""
    sure = int(flags.sum())
    return sure + ceil(min(1.0, keep) * (flags.size - sure))


def select(scores: Scores, flags: Flags, keep: float, media: Many[Span] = ()) -> Places:
    """The places of what is computed, in order: all that is flagged, and of the chunks that hold anything else the
    share `keep` that scores best, with their neighbours. A medium is a chunk, whatever its size: it is kept with all
    its tokens, or with none."""
    begins = _begins(flags.size, media)
    sizes = np.diff([*begins, flags.size])
    means = np.add.reduceat(scores, begins, dtype=np.float64) / sizes
    rest = ~np.logical_and.reduceat(flags, begins)
    alone = np.isin(begins, [begin for begin, _ in media])
    weights = np.where(alone, sizes / CHUNK, 1.0)
    most = ceil(min(1.0, keep) * float(weights[rest].sum()))
    taken = _with_neighbours(means, rest, alone, weights, most, neighbours(flags.size))
    return np.flatnonzero(flags | np.repeat(taken, sizes)).astype(np.int32)


def neighbours(length: int) -> int:
    """Chunks on each side of a good one that are kept with it: the longer a prompt is, the less its scores can tell."""
    return next((chunks for most, chunks in NEIGHBOURS if length <= most), MOST_NEIGHBOURS)


def _begins(length: int, media: Many[Span]) -> Numbers:
    """Where chunks begin: at each medium and behind it, and elsewhere every so many tokens."""
    begins = np.arange(0, length, CHUNK)
    for begin, end in media:
        begins = begins[(begins <= begin) | (begins >= end)]
    edges = [edge for span in media for edge in span if edge < length]
    return np.unique([*begins, *edges]).astype(np.int64)


def _with_neighbours(means: Means, rest: Flags, alone: Flags, weights: Means, most: int, radius: int) -> Flags:
    """Chunks of the `rest`, the best first, each with its neighbours unless those stand `alone`, as long as they weigh
    less than `most`: the last may weigh more than is left."""
    taken = np.zeros(means.size, np.bool_)
    left = float(most)
    for best in np.argsort(-means, kind="stable"):
        if left <= 0:
            break
        if not rest[best]:
            continue
        # Its own first, then by distance.
        near = sorted(range(max(0, best - radius), min(means.size, best + radius + 1)), key=lambda at: abs(at - best))
        for at in near:
            if left > 0 and rest[at] and not taken[at] and (at == best or not alone[at]):
                taken[at] = True
                left -= weights[at]
    return taken
