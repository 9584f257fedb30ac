"""Records in fewer bits when memory is short: which, how long that may take, and how long it takes to get one back.

Encoding is done on the engine's thread, between steps: it may take a small part of the time, and no more at once than
a short step does.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final

from ingot.cache.record_encoding import LossyEncoding
from ingot.cache.records import Record
from ingot.cache.tree import Node

BUSY_SHARE: Final = 0.02
"""Of the time, what encoding may take. What would take longer has to go instead."""
SLICE_S: Final = 0.01
"""What it may take at once, if it took nothing before; the record that is begun within is finished."""
FIRST_SPEED: Final = 1e9
"""Bytes of pages a second at which records are expected to be decoded, before any was."""


class RecordCondenser:
    """What the prefix index makes records smaller with. Those of owners who want exact states stay as they are."""

    def __init__(self, encoding: LossyEncoding, clock: Callable[[], float] = time.monotonic) -> None:
        self._encoding, self._clock = encoding, clock
        self._left, self._since = SLICE_S, clock()
        self._speed = FIRST_SPEED

    def begin(self) -> None:
        """Room is being made from now on, between two steps."""
        now = self._clock()
        self._left = min(SLICE_S, self._left + BUSY_SHARE * (now - self._since))
        self._since = now

    def may(self, node: Node) -> bool:
        record = node.record
        return record is not None and any(part.table.numbers for part in record.parts) and not node.root_owner.exact

    def least(self, node: Node) -> int:
        record = _held(node)
        return record.nbytes if node.root_owner.exact else self._encoding.least(record)

    def saves(self, node: Node) -> int:
        record = _held(node)
        if record.encoded is None and self._left <= 0:
            return 0
        return self._encoding.saves(record)

    def condensed(self, node: Node) -> Record:
        began = self._clock()
        record = self._encoding.shrunk(_held(node))
        self._left -= self._clock() - began
        return record

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
