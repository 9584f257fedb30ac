"""What a sequence's prompt shows besides its tokens: which media stand where, where its tokens stand for RoPE, and what
names them in the prefix index. Plain values; the features themselves come from `looks`."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass, field, replace
from sys import maxsize

import numpy as np

from ingot.media.items import MediaItem, Span
from ingot.models.vision.tower import Features, PositionArray, Tower

WORDS = 4
"""Words that a digest is told in, one for each of a medium's first tokens."""


@dataclass(eq=False, slots=True)
class Sight:
    items: tuple[MediaItem, ...]
    positions: PositionArray | None = None  # [3, tokens of the prompt], where the model has three axes
    mutual: bool = False  # whether the tokens of a run all see each other
    features: dict[bytes, Features] = field(default_factory=dict)
    """By digest, those of items that are still to be computed, while the sequence waits for them or computes them."""

    @classmethod
    def of(cls, prompt: Many[int], items: tuple[MediaItem, ...], tower: Tower) -> Sight:
        return cls(items, tower.positions(len(prompt), items), tower.mutual)

    def keyed(self, tokens: Many[int]) -> list[int]:
        """Tokens as the prefix index knows them: two prompts are the same up to the first medium in which they differ,
        whatever tokens stand for it. What stands for its content is no token: it is negative."""
        keys = list(tokens)
        for item in self.items:
            for place, word in zip(range(item.begin, item.end), _words(item.digest), strict=False):
                if place < len(keys):
                    keys[place] = word
        return keys

    def thinned(self, kept: PositionArray) -> Sight:
        """The same where only the tokens at these places are left: of each medium all of them, or none."""
        left = set(kept.tolist())
        items = []
        for item in self.items:
            if item.begin in left:
                moved = int(np.searchsorted(kept, item.begin)) - item.begin
                items.append(replace(item, runs=tuple((begin + moved, end + moved) for begin, end in item.runs)))
        positions = None if self.positions is None else self.positions[:, kept]
        return Sight(tuple(items), positions, self.mutual, self.features)

    @property
    def spans(self) -> list[Span]:
        """What is kept or left out together: each medium with a token on each side, which mark where it begins and
        ends, unless that is another one's."""
        ends = [0, *(item.end for item in self.items)]
        begins = [item.begin for item in self.items]
        return [
            (max(before, begin - 1), min(behind, end + 1))
            for before, begin, end, behind in zip(ends, begins, ends[1:], [*begins[1:], maxsize], strict=False)
        ]

    def inside(self, place: int) -> MediaItem | None:
        """The medium in the middle of which a sequence of so many tokens would end."""
        return next((item for item in self.items if item.begin < place < item.end), None)

    def uncut(self, begin: int, count: int) -> int:
        """How many tokens from `begin` on can be computed at once: `count`, or fewer, so that no run is cut whose
        tokens see each other; all of it where that is the first."""
        for start, stop in self._mutual_runs:
            if start < begin + count < stop:
                return (start if start > begin else stop) - begin
        return count

    def mutual_within(self, begin: int, end: int) -> tuple[Span, ...]:
        """Runs among tokens [begin, end) whose tokens see each other, counted from `begin`."""
        return tuple((start - begin, stop - begin) for start, stop in self._mutual_runs if begin <= start < end)

    @property
    def _mutual_runs(self) -> Iterator[Span]:
        return (run for item in self.items if self.mutual for run in item.runs)

    def ahead(self, computed: int) -> list[MediaItem]:
        """Those whose features are needed by a sequence that has so many tokens computed, each content once."""
        return list({item.digest: item for item in self.items if item.end > computed}.values())

    def position(self, place: int) -> int:
        """That of the token at `place`, where that is text, or of what begins there."""
        if self.positions is None:
            return place
        prompt = self.positions.shape[1]
        if place < prompt:
            return int(self.positions[:, place].min())
        return int(self.positions.max()) + 1 + place - prompt

    def stated(self, begin: int, end: int) -> PositionArray | None:
        """[3, end - begin]: where those tokens stand; None where all of them are text, or there are no axes."""
        if self.positions is None or not any(True for _ in self.seen(begin, end)):
            return None
        return self.axes(self.positions, begin, end)

    def axes(self, positions: PositionArray, begin: int, end: int) -> PositionArray:
        """[3, end - begin]: where those tokens stand, the prompt's at `positions`, and text behind it."""
        own, behind = positions[:, begin:end], end - max(begin, positions.shape[1])
        if behind <= 0:
            return own
        text = np.arange(behind, dtype=np.int32) + self.position(end - behind)
        return np.concatenate([own, np.broadcast_to(text, (3, behind))], axis=1)

    def seen(self, begin: int, end: int) -> Iterator[tuple[bytes, range, range]]:
        """For each run that stands in tokens [begin, end), or the part of it that does: whose digest's features, which
        of them, and at which places."""
        for item in self.items:
            first = 0
            for start, stop in item.runs:
                low, high = max(start, begin), min(stop, end)
                if low < high:
                    yield item.digest, range(first + low - start, first + high - start), range(low, high)
                first += stop - start


def _words(digest: bytes) -> Iterator[int]:
    """Negative numbers of 64 bits, as files of records hold them."""
    for (word,) in struct.iter_unpack("<Q", digest[: 8 * WORDS]):
        yield -1 - (word >> 1)
