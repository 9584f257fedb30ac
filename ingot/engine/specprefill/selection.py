"""Which tokens of a prompt are computed: those that always are, and the best chunks of the rest. Pure functions.

`SelectionMemory` remembers what was selected, for who sends a prompt again and for who goes on from there: a next
turn keeps what the one before kept, and finds the KV of that.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from collections.abc import Sequence as Many
from dataclasses import dataclass
from math import ceil
from typing import Any

import numpy as np

from ingot.engine.request import TokenRange

TokenFlags = np.ndarray[Any, np.dtype[np.bool_]]
PromptScores = np.ndarray[Any, np.dtype[np.float32]]
KeptPlaces = np.ndarray[Any, np.dtype[np.int32]]
TokenKeys = np.ndarray[Any, np.dtype[np.int64]]
ChunkMeans = np.ndarray[Any, np.dtype[np.float64]]

CHUNK_TOKENS = 32
"""Tokens that are kept or left out together."""
FIRST_TOKENS = LAST_TOKENS = 64
"""Tokens at both ends of a prompt that are always computed: the first are what attention rests on."""
TOKENS_AROUND_ENDS = 4
"""Tokens on each side of a message's end: what marks it, and says whose the next one is."""
NEIGHBOURS_BY_LENGTH = ((8192, 0), (32768, 1), (65536, 2))
"""(length, chunks): up to so long a prompt, so many chunks on each side of a good one are kept with it."""
MOST_NEIGHBOURS = 4


def required_tokens(
    length: int,
    whole: Iterable[TokenRange] = (),
    ends: Iterable[int] = (),
    *,
    window: int = 0,
    media: Iterable[TokenRange] = (),
) -> TokenFlags:
    """The tokens that are computed whatever they score: the first and the last, those of `whole` spans and around the
    `ends` of messages; of a model with windows, all that the widest still sees behind the prompt. A medium of which
    that is a part is computed with all its tokens."""
    flags = np.zeros(length, np.bool_)
    flags[:FIRST_TOKENS] = True
    flags[max(0, length - max(LAST_TOKENS, window)) :] = True
    for begin, end in (*whole, *((end - TOKENS_AROUND_ENDS, end + TOKENS_AROUND_ENDS) for end in ends)):
        flags[max(0, begin) : max(0, end)] = True
    for begin, end in media:
        flags[begin:end] |= flags[begin:end].any()
    return flags


def count_kept(flags: TokenFlags, keep: float) -> int:
    """How many tokens will be kept, give or take a chunk or a medium, whatever they score."""
    sure = int(flags.sum())
    return sure + ceil(min(1.0, keep) * (flags.size - sure))


def select_tokens(scores: PromptScores, flags: TokenFlags, keep: float, media: Many[TokenRange] = ()) -> KeptPlaces:
    """The places of what is computed, in order: all that is flagged, and of the chunks that hold anything else the
    share `keep` that scores best, with their neighbours. A medium is a chunk, whatever its size: it is kept with all
    its tokens, or with none."""
    begins = _chunk_begins(flags.size, media)
    sizes = np.diff([*begins, flags.size])
    means = np.add.reduceat(scores, begins, dtype=np.float64) / sizes
    rest = ~np.logical_and.reduceat(flags, begins)
    alone = np.isin(begins, [begin for begin, _ in media])
    weights = np.where(alone, sizes / CHUNK_TOKENS, 1.0)
    most = ceil(min(1.0, keep) * float(weights[rest].sum()))
    taken = _with_neighbours(means, rest, alone, weights, most, neighbour_chunks(flags.size))
    return np.flatnonzero(flags | np.repeat(taken, sizes)).astype(np.int32)


def neighbour_chunks(length: int) -> int:
    """Chunks on each side of a good one that are kept with it: the longer a prompt is, the less its scores can tell."""
    return next((chunks for most, chunks in NEIGHBOURS_BY_LENGTH if length <= most), MOST_NEIGHBOURS)


def _chunk_begins(length: int, media: Many[TokenRange]) -> TokenKeys:
    """Where chunks begin: at each medium and behind it, and elsewhere every so many tokens."""
    begins = np.arange(0, length, CHUNK_TOKENS)
    for begin, end in media:
        begins = begins[(begins <= begin) | (begins >= end)]
    edges = [edge for span in media for edge in span if edge < length]
    return np.unique([*begins, *edges]).astype(np.int64)


def _with_neighbours(
    means: ChunkMeans, rest: TokenFlags, alone: TokenFlags, weights: ChunkMeans, most: int, radius: int
) -> TokenFlags:
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


REMEMBERED_SELECTIONS = 64
"""Prompts."""


@dataclass(frozen=True, eq=False, slots=True)
class RememberedSelection:
    """Of a prompt, by its `keys` in the prefix index, so much was `kept` by the `terms` that a request asked by."""

    terms: Hashable
    keys: TokenKeys
    kept: KeptPlaces

    @property
    def length(self) -> int:
        return self.keys.size

    def begins(self, terms: Hashable, keys: TokenKeys) -> bool:
        return self.terms == terms and self.length <= keys.size and bool((self.keys == keys[: self.length]).all())


class SelectionMemory:
    def __init__(self) -> None:
        self._held: list[RememberedSelection] = []  # the one that was used last is the last

    def remember(self, terms: Hashable, keys: Many[int], kept: KeptPlaces) -> None:
        self._use(RememberedSelection(terms, np.asarray(keys, np.int64), kept))

    def longest(self, terms: Hashable, keys: Many[int]) -> RememberedSelection | None:
        """That of the longest prompt that one of these keys begins with, which may be all of it."""
        told = np.asarray(keys, np.int64)
        begun = [each for each in self._held if each.begins(terms, told)]
        found = max(begun, key=lambda each: each.length, default=None)
        if found is not None:
            self._use(found)
        return found

    def _use(self, selection: RememberedSelection) -> None:
        others = [each for each in self._held if each is not selection]
        self._held = [*others, selection][-REMEMBERED_SELECTIONS:]
