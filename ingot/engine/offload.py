"""Records back from disk, for sequences that wait to run.

A sequence whose prompt is known further on disk than in memory waits while that is read, if reading takes less time
than computing would; the others go on. Room is reserved in memory before anything is read, and each record that
arrives is put into pages between two steps. A record that is lost or damaged is a miss: what can be resumed without it
is, and the rest is computed.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Many
from dataclasses import dataclass, field, replace
from typing import Final

from ingot.cache.batch_state import Rows
from ingot.cache.disk.disk import Disk
from ingot.cache.disk.entry import Entry
from ingot.cache.disk.reader import Reading
from ingot.cache.disk.record_file import StoredData
from ingot.cache.packing import Form, LooseRecord
from ingot.cache.prefix_index import PrefixIndex
from ingot.cache.record_encoding import RecordEncoding
from ingot.cache.tree import Node, Owner
from ingot.engine.request import Request
from ingot.engine.sequence import Sequence
from ingot.engine.spilling import record_owner
from ingot.errors import IngotError
from ingot.observe.notices import Notice

log = logging.getLogger("ingot.cache")

WORTH_READING: Final = 64
"""Tokens: fewer are as soon computed."""
AHEAD: Final = 8
"""Sequences of the queue that records are read for before it is their turn."""
ATTEMPTS: Final = 3
"""How often a sequence's records may turn out to be lost before it is computed."""
SLICE_S: Final = 0.02
"""How long arrived records are put into memory between two steps; at least one is."""
IN_FLIGHT: Final = 3
"""Records that are read ahead for a sequence: their bytes are held beside what the memory budget counts."""
PATIENCE_S: Final = 30.0
"""After which what is still not read is computed."""
PAUSE_S: Final = 0.002
"""How long a step with nothing to compute waits for a record."""
FIRST_SPEED: Final = 5e8
"""Bytes a second at which records are expected to be read, before any was."""
FORGIVING: Final = 1.1


@dataclass(eq=False, slots=True)
class Promotion:
    """What is read for one sequence, and the room in memory that is kept for it."""

    owner: Owner
    tokens: tuple[int, ...]
    resident: int  # tokens that could be resumed from memory before
    begun: float
    attempts: int = 1
    reserved: int = 0
    ahead: deque[Entry] = field(default_factory=deque)  # what is still to be asked for
    readings: deque[Reading] = field(default_factory=deque)

    @property
    def under_way(self) -> bool:
        return bool(self.readings or self.ahead)

    @property
    def entries(self) -> list[Entry]:
        return [*(reading.entry for reading in self.readings), *self.ahead]


class Promotions:
    """For the engine's thread alone. Each call is short."""

    def __init__(
        self,
        disk: Disk,
        index: PrefixIndex,
        rows: Rows,
        encoding: RecordEncoding,
        form: Form,
        seconds: Callable[[int], float],
        make_room: Callable[[], bool],
        owner: Callable[[Request], Owner],
    ) -> None:
        """`seconds(n)` is what computing n tokens takes, 0 where that is not known; `make_room` sees to it that
        `reserved` bytes are free, and says whether they are; `owner` says whose prefixes a request takes over."""
        self._disk, self._index, self._rows = disk, index, rows
        self._encoding, self._form = encoding, encoding.form(form)
        self._seconds, self._make_room, self._owner = seconds, make_room, owner
        self._known: dict[Sequence, Promotion | None] = {}  # those in the queue; None: nothing is to be read
        self._speed = FIRST_SPEED
        self._full = Notice(log)

    @property
    def reserved(self) -> int:
        return sum(promotion.reserved for promotion in self._known.values() if promotion is not None)

    def plant(self, owner: Owner, tokens: Many[int]) -> None:
        """Let the index know what is on disk along these tokens: as many records are looked at as lie there."""
        if not owner.exact:
            mine = record_owner(owner.tenant, owner.salt, owner.lora)
            self._index.plant_along(owner, self._disk.store.along(mine, tokens))

    def expect(self, waiting: Many[Sequence], uses: Callable[[Sequence], bool]) -> None:
        """Read for those that wait, and put what has arrived into memory."""
        queued = set(waiting)
        for sequence in [sequence for sequence in self._known if sequence not in queued]:
            self._abandon(self._known.pop(sequence))
        self._take_in()
        for sequence in waiting[:AHEAD]:
            if sequence not in self._known:
                self._known[sequence] = self._begun(sequence) if uses(sequence) else None

    def waits(self, sequence: Sequence) -> bool:
        if sequence not in self._known:
            self._known[sequence] = self._begun(sequence)
        promotion = self._known[sequence]
        return promotion is not None and promotion.under_way

    def look_again(self, sequence: Sequence) -> None:
        """A waiting sequence has other keys than before: read what it needs now. What was read stays read for it."""
        before = self._known.pop(sequence, None)
        self._abandon(before)
        found = self._begun(sequence)
        if before is not None:
            found = found or Promotion(before.owner, tuple(sequence.keys), before.resident, before.begun)
            found.resident = min(found.resident, before.resident)
        self._known[sequence] = found

    def settle(self, sequence: Sequence, length: int) -> int:
        """A sequence runs, and takes over `length` tokens; returns how many of them were read from disk for it."""
        promotion = self._known.pop(sequence, None)
        read = 0 if promotion is None else max(0, length - promotion.resident)
        if sequence.preemptions == 0:
            self._disk.counts.hits += read > 0
            self._disk.counts.misses += read == 0 and len(sequence.tokens) - length > WORTH_READING
        used = [
            node.filed.entry
            for node in self._index.along(self._owner(sequence.request), sequence.keys[:length])
            if node.filed
        ]
        self._disk.touch(used)
        return read

    def pause(self) -> None:
        """Nothing can be computed: wait a little for what is being read."""
        for reading in self._readings():
            if not reading.done:
                reading.wait(PAUSE_S)
                return

    # Beginning

    def _begun(self, sequence: Sequence, attempts: int = 1) -> Promotion | None:
        owner = self._owner(sequence.request)
        self.plant(owner, sequence.keys)
        found = self._index.reach(owner, sequence.keys, sequence.most_taken_over)
        entries = list(dict.fromkeys(node.filed.entry for node in found.lacking if node.filed is not None))
        gained, nbytes = found.length - found.resident, sum(entry.size for entry in entries)
        if gained < WORTH_READING:
            return None
        if 0 < self._seconds(gained) < nbytes / self._speed:
            self._speed *= FORGIVING  # a drive that was slow once is tried again in the end
            return None
        promotion = Promotion(owner, tuple(sequence.keys), found.resident, time.monotonic(), attempts)
        coming = {entry for other in self._known.values() if other is not None for entry in other.entries}
        promotion.reserved = sum(self._room_for(entry) for entry in entries if entry not in coming)
        self._known[sequence] = promotion
        if not self._make_room():
            self._known[sequence] = None
            self._full.warn("%d bytes of records are not read back, as there is no room in memory for them", nbytes)
            return None
        promotion.ahead.extend(entries)
        self._ask(promotion)
        return promotion

    def _ask(self, promotion: Promotion) -> None:
        """Have the next few records read; those that are being read for others are waited for."""
        asked = {reading.entry: reading for reading in self._readings()}
        while promotion.ahead and len(promotion.readings) < IN_FLIGHT:
            entry = promotion.ahead.popleft()
            if self._lacking(promotion, entry):
                promotion.readings.append(asked.get(entry) or self._disk.ask(entry))

    def _lacking(self, promotion: Promotion, entry: Entry) -> list[Node]:
        """The nodes that still need what a record on disk has."""
        return [
            node
            for node in self._index.along(promotion.owner, promotion.tokens)
            if node.filed is not None and node.filed.entry.name == entry.name
            if node.record is None or (not node.has_checkpoint and node.has_filed_checkpoint)
        ]

    def _room_for(self, entry: Entry) -> int:
        """Bytes in memory: pages at both ends may be filled only in part."""
        return self._disk.memory_of(entry) + 2 * sum(group.page_bytes for group in self._rows.groups)

    def _readings(self) -> Iterable[Reading]:
        for promotion in self._known.values():
            if promotion is not None:
                yield from promotion.readings

    # Arriving

    def _take_in(self) -> None:
        began = time.monotonic()
        for sequence, promotion in list(self._known.items()):
            while promotion is not None and promotion.readings and promotion.readings[0].done:
                if not self._arrived(promotion):
                    self._disk.doubt(promotion.entries)
                    self._abandon(promotion)
                    again = promotion.attempts < ATTEMPTS
                    self._known[sequence] = self._begun(sequence, promotion.attempts + 1) if again else None
                    break
                if time.monotonic() > began + SLICE_S:
                    return
            if promotion is not None and promotion.under_way and began > promotion.begun + PATIENCE_S:
                log.warning("a record took more than %.0f s to read; what it holds is computed", PATIENCE_S)
                self._disk.counts.promotion_failures += 1
                self._abandon(promotion)
                self._known[sequence] = None

    def _arrived(self, promotion: Promotion) -> bool:
        """Put the next record into memory. False where it is lost, or what it goes on from is."""
        reading = promotion.readings.popleft()
        if reading.found is not None and not self._lacking(promotion, reading.entry):  # another one was first
            self._go_on(promotion)
            return True
        began = time.monotonic()
        if reading.found is None or not self._fill(promotion, reading.entry, reading.found):
            self._disk.counts.promotion_failures += not reading.gone
            return False
        took = reading.seconds + time.monotonic() - began
        self._speed += 0.2 * (reading.entry.size / max(took, 1e-6) - self._speed)
        self._disk.counts.promotions += 1
        self._disk.counts.promoted_bytes += reading.entry.size
        self._disk.counts.promotion_s += took
        self._go_on(promotion)
        return True

    def _go_on(self, promotion: Promotion) -> None:
        self._ask(promotion)
        if not promotion.under_way:
            promotion.reserved = 0

    def _fill(self, promotion: Promotion, entry: Entry, found: StoredData) -> bool:
        try:
            record = self._encoding.opened(found, self._form)
        except IngotError as error:
            log.warning("%s: %s", entry.name, error.message)
            entry.lost = True
            return False
        above: list[Node] = []
        for node in self._index.along(promotion.owner, promotion.tokens):
            if node.filed is not None and node.filed.entry.name == entry.name:
                self._fill_node(node, above, record)
            if node.record is None:
                break
            above.append(node)
        if self._lacking(promotion, entry):
            log.warning("%s is of no use, as what it goes on from has left memory meanwhile", entry.name)
            return False
        return True

    def _fill_node(self, node: Node, above: Many[Node], record: LooseRecord) -> None:
        if node.record is None:
            before = [each.record for each in above if each.record is not None]
            part = record.before(node.end).behind(node.begin)
            self._index.fill(node, self._encoding.taken(before, part))
        elif node.record.checkpoint is None and node.has_filed_checkpoint:
            self._index.fill(node, replace(node.record, checkpoint=record.checkpoint))

    def _abandon(self, promotion: Promotion | None) -> None:
        if promotion is None:
            return
        promotion.reserved = 0
        mine = set(promotion.readings)
        promotion.readings.clear()
        promotion.ahead.clear()
        for reading in mine.difference(self._readings()):
            reading.cancel()
