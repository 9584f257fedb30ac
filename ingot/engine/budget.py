"""The memory model: what the states of running sequences take, from the model's own shapes, before they exist.

Pure arithmetic. Live states are dense: every slot has room for as many tokens as the longest reservation, so the
cost of a set of rows is their number times that length.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ingot.cache.footprint import Footprint, rounded, window_capacity

TRANSIENT_SHARE = 0.25
"""At most this share of what the weights leave is set aside for what a forward pass holds while it runs."""


def slot_count(rows: int) -> int:
    """Slots are made in powers of two, so that joining seldom makes new ones."""
    return 1 << max(0, rows - 1).bit_length()


class Budget:
    """Says whether a set of sequences fits, and how wide a launch may be."""

    def __init__(self, total: int, weights: int, footprint: Footprint, *, context: int, widest: int, rows: int) -> None:
        self.total, self.weights, self.footprint = total, weights, footprint
        self.widest, self._rows = widest, rows
        free = max(0, total - weights)
        wanted = self.pass_bytes([(widest, context), (rows, context)]) + rows * 4 * footprint.logits
        self.transient = min(wanted, int(free * TRANSIENT_SHARE))
        self.states = free - self.transient

    def pass_bytes(self, parts: Iterable[tuple[int, int]]) -> int:
        """What a forward pass holds while it runs, besides logits, of parts of `(tokens, context)` each."""
        return sum(self._part_bytes(tokens, context) for tokens, context in parts)

    def _part_bytes(self, tokens: int, context: int) -> int:
        shape = self.footprint
        at_once = tokens if shape.tile is None else min(tokens, shape.tile)
        return tokens * shape.activation + at_once * shape.score * context

    def runs(self, parts: Iterable[tuple[int, int]]) -> bool:
        """Whether parts of `(tokens, context)` each fit in one forward pass."""
        return self.pass_bytes(parts) <= self.transient

    def state_bytes(self, slots: int, capacity: int) -> int:
        """What `slots` slots with room for `capacity` tokens take, while they are being made."""
        shape = self.footprint
        windows = sum(size * window_capacity(window, self.widest, capacity) for window, size in shape.windows)
        kept = slots * (shape.append * capacity + windows + shape.recurrent)
        return kept + slots * shape.largest_layer * capacity

    def fits(self, reserved: Sequence[int]) -> bool:
        """Whether sequences with these reservations, in tokens, can run together."""
        if not reserved:
            return True
        return self.state_bytes(slot_count(len(reserved)), rounded(max(reserved))) <= self.states

    def longest(self, limit: int) -> int:
        """The longest single sequence that fits, at most `limit` tokens."""
        if self.fits([limit]):
            return limit
        low, high = 0, limit
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.fits([middle]) else (low, middle - 1)
        return low

    def widest_launch(self, context: int) -> int:
        """Tokens that one launch may compute behind `context` earlier ones, with room for some that decode."""
        low, high = 1, self.widest
        while low < high:
            middle = (low + high + 1) // 2
            beside = min(self._rows, middle)
            fits = self.runs([(middle + beside, context + self.widest)])
            low, high = (middle, high) if fits else (low, middle - 1)
        return low
