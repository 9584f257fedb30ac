"""Which tokens of a prompt are computed: required ones, and the best chunks of the others. Pure functions.

`SelectionMemory` remembers selections, for repeated prompts and for next turns, which keep what the turn before kept
and find its KV.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any, NamedTuple

import numpy as np

from ingot.engine.request import TokenRange

TokenFlags = np.ndarray[Any, np.dtype[np.bool_]]
PromptScores = np.ndarray[Any, np.dtype[np.float32]]
KeptPositions = np.ndarray[Any, np.dtype[np.int32]]
TokenKeys = np.ndarray[Any, np.dtype[np.int64]]
ChunkMeans = np.ndarray[Any, np.dtype[np.float64]]


class ScoredPrompt(NamedTuple):
    """How much each token of a prompt matters, and how much of the scorer's attention is concentrated on it; None where
    nothing attends."""

    scores: PromptScores
    mass: PromptScores | None = None

    def kept_mass(self, selection: KeptPositions, flags: TokenFlags) -> float | None:
        """Of the attention to tokens that may be left out, the share that those of a selection have."""
        if self.mass is None:
            return None
        optional = np.where(flags, 0.0, self.mass)
        total = float(optional.sum())
        return float(optional[selection].sum()) / total if total else 1.0


CHUNK_TOKENS = 32
"""Tokens that are kept or left out together."""
FIRST_TOKENS = LAST_TOKENS = 64
"""Tokens at both ends of a prompt that are always computed: the first are attention sinks."""
TOKENS_AROUND_ENDS = 4
"""Tokens on each side of a message's end that are computed: end markers, and the next role."""
NEIGHBOURS_BY_LENGTH = ((8192, 0), (32768, 1), (65536, 2))
"""(length, chunks): up to that prompt length, so many chunks on each side of a good one are kept with it."""
MOST_NEIGHBOURS = 4


def required_tokens(
    length: int,
    whole: Iterable[TokenRange] = (),
    ends: Iterable[int] = (),
    *,
    window: int = 0,
    media: Iterable[TokenRange] = (),
) -> TokenFlags:
    """The tokens that are computed whatever their scores: the first and the last, `whole` spans, those around the
    `ends` of messages, and those that the widest `window` still covers after the prompt. An item of `media` is computed
    with all its tokens, or none."""
    flags = np.zeros(length, np.bool_)
    flags[:FIRST_TOKENS] = True
    flags[max(0, length - max(LAST_TOKENS, window)) :] = True
    for begin, end in (*whole, *((end - TOKENS_AROUND_ENDS, end + TOKENS_AROUND_ENDS) for end in ends)):
        flags[max(0, begin) : max(0, end)] = True
    for begin, end in media:
        flags[begin:end] |= flags[begin:end].any()
    return flags


def count_selected(flags: TokenFlags, keep: float) -> int:
    """About how many tokens will be selected, whatever their scores."""
    required = int(flags.sum())
    return required + ceil(min(1.0, keep) * (flags.size - required))


def select_tokens(
    scores: PromptScores,
    flags: TokenFlags,
    keep: float,
    media: Sequence[TokenRange] = (),
    *,
    mass: PromptScores | None = None,
    quality: float | None = None,
) -> KeptPositions:
    """The positions of the tokens to compute: all that are flagged, and of the chunks with other tokens the share
    `keep` with the best scores, with their neighbours. With `quality`, instead of that share, as many of the best as it
    takes to keep so much of the other tokens' `mass`, if they have any. An item of `media` is one chunk, whatever its
    size."""
    begins = _chunk_begins(flags.size, media)
    sizes = np.diff([*begins, flags.size])
    means = np.add.reduceat(scores, begins, dtype=np.float64) / sizes
    optional = ~np.logical_and.reduceat(flags, begins)
    alone = np.isin(begins, [begin for begin, _ in media])
    added = np.where(alone, sizes / CHUNK_TOKENS, 1.0)
    least = float(ceil(min(1.0, keep) * float(added[optional].sum())))
    if quality is not None and mass is not None and (total := float(mass[~flags].sum(dtype=np.float64))) > 0:
        added, least = np.add.reduceat(np.where(flags, 0.0, mass), begins, dtype=np.float64), quality * total
    chosen, reached = np.zeros(begins.size, np.bool_), 0.0
    for at in _by_score(means, optional, alone, neighbour_chunks(flags.size)):
        if reached >= least:
            break
        chosen[at] = True
        reached += float(added[at])
    return np.flatnonzero(flags | np.repeat(chosen, sizes)).astype(np.int32)


def neighbour_chunks(length: int) -> int:
    """Chunks on each side of a good one that are kept with it: scores are less precise in longer prompts."""
    return next((chunks for most, chunks in NEIGHBOURS_BY_LENGTH if length <= most), MOST_NEIGHBOURS)


def _chunk_begins(length: int, media: Sequence[TokenRange]) -> TokenKeys:
    """Where chunks begin: at the begin and end of each item, and elsewhere at fixed steps."""
    begins = np.arange(0, length, CHUNK_TOKENS)
    for begin, end in media:
        begins = begins[(begins <= begin) | (begins >= end)]
    edges = [edge for span in media for edge in span if edge < length]
    return np.unique([*begins, *edges]).astype(np.int64)


def _by_score(means: ChunkMeans, optional: TokenFlags, alone: TokenFlags, radius: int) -> Iterator[int]:
    """The `optional` chunks in the order in which they are chosen: the best first, each followed by its neighbours
    unless those stand `alone`."""
    seen = ~optional
    for best in np.argsort(-means, kind="stable"):
        if not optional[best]:
            continue
        # Itself first, then by distance.
        near = sorted(range(max(0, best - radius), min(means.size, best + radius + 1)), key=lambda at: abs(at - best))
        for at in near:
            if not seen[at] and (at == best or not alone[at]):
                seen[at] = True
                yield at


REMEMBERED_SELECTIONS = 64


@dataclass(frozen=True, eq=False, slots=True)
class RememberedSelection:
    """The selected `positions` of a prompt, by its `keys` in the prefix index and the `terms` of the request, and the
    attention that they have."""

    terms: Hashable
    keys: TokenKeys
    positions: KeptPositions
    mass: float | None = None

    @property
    def length(self) -> int:
        return self.keys.size

    def begins(self, terms: Hashable, keys: TokenKeys) -> bool:
        return self.terms == terms and self.length <= keys.size and bool((self.keys == keys[: self.length]).all())


class SelectionMemory:
    def __init__(self) -> None:
        self._remembered: list[RememberedSelection] = []  # the most recently used last

    def remember(
        self, terms: Hashable, keys: Sequence[int], positions: KeptPositions, mass: float | None = None
    ) -> None:
        self._use(RememberedSelection(terms, np.asarray(keys, np.int64), positions, mass))

    def longest(self, terms: Hashable, keys: Sequence[int]) -> RememberedSelection | None:
        """The selection of the longest prompt that is a prefix of these keys, or equal to them."""
        key_array = np.asarray(keys, np.int64)
        prefixes = [each for each in self._remembered if each.begins(terms, key_array)]
        found = max(prefixes, key=lambda each: each.length, default=None)
        if found is not None:
            self._use(found)
        return found

    def _use(self, selection: RememberedSelection) -> None:
        others = [each for each in self._remembered if each is not selection]
        self._remembered = [*others, selection][-REMEMBERED_SELECTIONS:]
