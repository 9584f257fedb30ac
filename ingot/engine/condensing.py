"""Records in fewer bits when memory is short: which, how long that may take, and how long it takes to get one back."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final

from ingot.cache.encoding import LossyEncoding
from ingot.cache.records import Record
from ingot.cache.tree import Node

SLICE_S: Final = 0.1
"""How long encoding may take each time that room is made. What would take longer has to go instead."""
FIRST_SPEED: Final = 1e9
"""Bytes of pages a second at which records are expected to be decoded, before any was."""


class RecordCondenser:
    """What the prefix index makes records smaller with. Those of owners who want exact states stay as they are."""

    def __init__(self, encoding: LossyEncoding, clock: Callable[[], float] = time.monotonic) -> None:
        self._encoding, self._clock = encoding, clock
        self._until = 0.0
        self._speed = FIRST_SPEED

    def begin(self) -> None:
        """Room is being made from now on."""
        self._until = self._clock() + SLICE_S

    def may(self, node: Node) -> bool:
        record = node.record
        return record is not None and any(part.table.numbers for part in record.parts) and not node.root_owner.exact

    def least(self, node: Node) -> int:
        record = _held(node)
        return record.nbytes if node.root_owner.exact else self._encoding.least(record)

    def saves(self, node: Node) -> int:
        record = _held(node)
        if record.encoded is None and self._clock() > self._until:
            return 0
        return self._encoding.saves(record)

    def condensed(self, node: Node) -> Record:
        return self._encoding.shrunk(_held(node))

    def seconds(self, node: Node) -> float:
        return sum(part.nbytes for part in _held(node).parts) / self._speed

    def restored(self, records: Sequence[Record], length: int) -> list[Record]:
        """The same with pages, as far as a sequence of so many tokens needs them."""
        if all(record.has_pages for record in records):
            return list(records)
        began = self._clock()
        made = self._encoding.with_pages(records, length)
        new = sum(part.nbytes for record in made for part in record.parts)
        new -= sum(part.nbytes for record in records for part in record.parts)
        self._speed += 0.2 * (max(1, new) / max(self._clock() - began, 1e-6) - self._speed)
        return made


def _held(node: Node) -> Record:
    assert node.record is not None
    return node.record
