"""The slots of a layer: which experts lie in memory, and which of them make room for others.

Experts that were used often stay, where uses count the less the longer ago they were.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

import mlx.core as mx
import numpy as np

AGING: Final = 0.98
"""What a use counts one pass later: half of it after 34 passes."""
NOWHERE: Final = -1


class ExpertSlots:
    def __init__(self, experts: int, slots: int) -> None:
        self.slot_of = np.full(experts, NOWHERE, np.int32)
        """Of each expert, or NOWHERE."""
        self.expert_in = np.full(slots, NOWHERE, np.int32)
        """Each slot's expert, or NOWHERE."""
        self.uses = np.zeros(experts, np.float64)
        self._table: mx.array | None = None

    @property
    def count(self) -> int:
        return self.expert_in.size

    @property
    def is_complete(self) -> bool:
        """Whether every expert is in a slot, as it will be from then on."""
        return self.count == self.slot_of.size and NOWHERE not in self.slot_of

    @property
    def table(self) -> mx.array:
        """`slot_of` for the device; any slot of an expert that is in none."""
        if self._table is None:
            self._table = mx.array(np.maximum(self.slot_of, 0))
        return self._table

    def note_uses(self, chosen: np.ndarray) -> list[int]:
        """Of the experts that a pass has chosen [..., n]; returns each of them once. Uses of a prompt's many tokens
        count more than a decode step's, but not as much as so many steps."""
        self.uses *= AGING
        if chosen.size == chosen.shape[-1]:
            experts: list[int] = list(set(chosen.reshape(-1).tolist()))
            self.uses[experts] += 1
            return experts
        tokens = np.bincount(chosen.reshape(-1), minlength=self.uses.size)
        self.uses += np.sqrt(tokens)
        found: list[int] = tokens.nonzero()[0].tolist()
        return found

    def put(self, expert: int, slot: int) -> None:
        """Whatever was in the slot has no place any more."""
        before = int(self.expert_in[slot])
        if before != NOWHERE:
            self.slot_of[before] = NOWHERE
        self.expert_in[slot], self.slot_of[expert] = expert, slot
        self._table = None

    def drop(self, expert: int) -> None:
        slot = int(self.slot_of[expert])
        self.expert_in[slot], self.slot_of[expert] = NOWHERE, NOWHERE
        self._table = None

    def replaceable(self, most: int, kept: Collection[int]) -> Sequence[int]:
        """Up to so many slots, empty ones first, then those of the experts that are used least and are not to be
        `kept`."""
        owners = self.expert_in
        worth = np.where(owners == NOWHERE, -1.0, self.uses[owners])
        places = self.slot_of[list(kept)] if kept else self.slot_of[:0]
        worth[places[places != NOWHERE]] = np.inf
        order = np.argsort(worth, kind="stable")[: min(most, self.count - np.isinf(worth).sum())]
        found: list[int] = order.tolist()
        return found

    def check(self) -> None:
        """Raises AssertionError unless table and slots agree."""
        for slot, expert in enumerate(self.expert_in):
            assert expert == NOWHERE or self.slot_of[expert] == slot, f"expert {expert} is not where slot {slot} has it"
        assert (self.slot_of != NOWHERE).sum() == (self.expert_in != NOWHERE).sum(), "an expert has a slot of another"
