"""Offloading: cached records out to disk when they have to leave memory, and back for sequences that wait to run.

Out: KV is copied off the device on the engine thread, one record at a time, and handed to the writer as bytes.
While requests run that may take a small part of the time; what would take more, or finds the writer's queue full,
is not written. In: a sequence whose prompt is known further on disk than in memory waits while that is read, if
reading takes less time than computing would; the others go on. Room is reserved in memory before anything is read,
and each record that arrives is put into pages between two steps. A record that is lost or damaged is a miss: what
can be resumed without it is, and the rest is computed.

For the engine thread alone; no call waits for a file, but `close`. A server without a folder for records has a
tier that does nothing.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Many
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Final, Protocol

from ingot.cache.batch_state import BatchState
from ingot.cache.disk.backend import DiskBackend, PendingRead
from ingot.cache.disk.index import EMPTY_PATH, DiskEntry
from ingot.cache.disk.record_file import RecordHeader, RecordOwner, StoredData
from ingot.cache.prefix_index import PrefixIndex
from ingot.cache.prefix_tree import CacheOwner, DiskRecord, PrefixNode
from ingot.cache.record_encoding import RecordEncoding
from ingot.cache.records import RecordForm, UnpagedRecord, describe_record, serialise_record
from ingot.engine.request import Request
from ingot.engine.sequence import TokenSequence
from ingot.errors import IngotError
from ingot.observe.logs import RareWarning

log = logging.getLogger("ingot.cache")


class OffloadTier(Protocol):
    """What is below memory. For the engine's thread alone; no call waits for a file, but `close`."""

    @property
    def reserved(self) -> int:
        """Bytes of memory that are kept for what is being read."""

    def spill(self, node: PrefixNode) -> bool:
        """Whether a node's record is there, or on its way."""

    def plant(self, owner: CacheOwner, tokens: Many[int]) -> None:
        """Let the index know what is there of an owner's along these tokens."""

    def expect(self, waiting: Many[TokenSequence], uses: Callable[[TokenSequence], bool]) -> None:
        """Read for those that wait and use it, and put what has arrived into memory."""

    def waits(self, sequence: TokenSequence) -> bool:
        """Whether something is being read for a sequence."""

    def restart_reads(self, sequence: TokenSequence) -> None:
        """A waiting sequence has other keys than before: read what it needs now."""

    def settle(self, sequence: TokenSequence, length: int) -> int:
        """A sequence runs, and takes over `length` tokens; returns how many of them were read for it."""

    def forget(self, tenant: str) -> None:
        """A tenant's records are to be removed, by its digest: have others do the same to what they have of them."""

    def pause(self) -> None:
        """Nothing can be computed: wait a little for what is being read."""

    def rest(self) -> None:
        """Nothing runs."""

    def free(self) -> None:
        """Save nothing, and let go of what is being read. The last call."""

    def close(self) -> None:
        """Save what is not, as far as there is time."""


class NoOffloadTier:
    reserved = 0

    def spill(self, node: PrefixNode) -> bool:
        return False

    def plant(self, owner: CacheOwner, tokens: Many[int]) -> None: ...

    def expect(self, waiting: Many[TokenSequence], uses: Callable[[TokenSequence], bool]) -> None: ...

    def waits(self, sequence: TokenSequence) -> bool:
        return False

    def restart_reads(self, sequence: TokenSequence) -> None: ...

    def settle(self, sequence: TokenSequence, length: int) -> int:
        return 0

    def forget(self, tenant: str) -> None: ...

    def pause(self) -> None: ...

    def rest(self) -> None: ...

    def free(self) -> None: ...

    def close(self) -> None: ...


class DiskTier:
    def __init__(
        self,
        disk: DiskBackend,
        index: PrefixIndex,
        rows: BatchState,
        encoding: RecordEncoding,
        form: RecordForm,
        seconds: Callable[[int], float],
        make_room: Callable[[], bool],
        owner: Callable[[Request], CacheOwner],
    ) -> None:
        """See `Onloader`."""
        self._index = index
        self._offloader = Offloader(disk, rows, encoding)
        self._onloader = Onloader(disk, index, rows, encoding, form, seconds, make_room, owner)
        self.spill, self.plant = self._offloader.spill, self._onloader.plant
        self.expect, self.waits = self._onloader.expect, self._onloader.waits
        self.settle, self.pause = self._onloader.settle, self._onloader.pause
        self.restart_reads = self._onloader.restart_reads
        self.forget = disk.forget_on_followers

    @property
    def reserved(self) -> int:
        return self._onloader.reserved

    def free(self) -> None:
        self._onloader.expect((), lambda sequence: False)

    def rest(self) -> None:
        self._onloader.expect((), lambda sequence: False)
        self._offloader.rest(self._index.nodes())

    def close(self) -> None:
        try:
            self._offloader.close(self._index.nodes())
        except Exception:  # whoever ends has more to do
            log.exception("what is kept could not be saved")


OFFLOAD_SHARE: Final = 0.01
"""Of the time while requests run, what copying may take."""
OFFLOAD_BURST_S: Final = 0.05
"""What it may take at once, if it took nothing before."""
OFFLOAD_IDLE_S: Final = 0.02
"""How long it copies at a time while nothing runs: a newcomer waits no longer than that."""
OFFLOAD_CLOSING_S: Final = 20.0
"""How long a server that stops goes on copying and writing."""


class Offloader:
    def __init__(
        self, disk: DiskBackend, rows: BatchState, encoding: RecordEncoding, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._disk, self._rows, self._encoding, self._clock = disk, rows, encoding, clock
        self._left, self._since = OFFLOAD_BURST_S, clock()

    def spill(self, node: PrefixNode) -> bool:
        """Whether a node's record is on disk, or on its way there. Never waits for a file."""
        if node.is_saved:
            return True
        if node.root_owner.exact:  # files hold what went through the codec
            return False
        now = self._clock()
        self._left = min(OFFLOAD_BURST_S, self._left + OFFLOAD_SHARE * (now - self._since))
        self._since = now
        if self._left <= 0 or not self._disk.has_room():
            self._disk.counts.dropped += 1
            return False
        done = self._hand_over(node)
        self._left -= self._clock() - now
        return done

    def rest(self, nodes: Iterable[PrefixNode]) -> None:
        """Nothing runs: save some of what is not. Whoever waits for the writer is told when it is worth another try."""
        until = self._clock() + OFFLOAD_IDLE_S
        for node in self._unsaved(nodes):
            if self._clock() > until or not self._disk.has_room():
                return
            self._hand_over(node)

    def close(self, nodes: Iterable[PrefixNode]) -> None:
        """Save all that is not, as far as there is time."""
        until = self._clock() + OFFLOAD_CLOSING_S
        for node in self._unsaved(nodes):
            while not self._disk.has_room() and (left := until - self._clock()) > 0:
                if self._disk.writer.is_paused or self._disk.drain(left):
                    break
            if self._clock() > until or self._disk.writer.is_paused:
                break
            self._hand_over(node)
        self._disk.close(max(1.0, until - self._clock()))

    @staticmethod
    def _unsaved(nodes: Iterable[PrefixNode]) -> list[PrefixNode]:
        """Beginnings before what goes on from them: without those it would be of no use. What was saved and had to go
        is left out, or a disk that is too small for all would be written to forever."""
        held = (node for node in nodes if node.record is not None and not node.root_owner.exact)
        unsaved = (node for node in held if not node.is_saved)
        return sorted((node for node in unsaved if node.filed is None or node.filed.there), key=lambda node: node.end)

    def _hand_over(self, node: PrefixNode) -> bool:
        assert node.record is not None
        loose = self._encoding.loose(node.record)
        header = self._header(node, loose)
        entry = self._disk.stored(header.name)  # the same was computed before, and is there still
        if entry is None or entry.lost:
            entry = self._disk.offer(header, tuple(serialise_record(loose)), loose)
        if entry is None:
            return False
        node.filed = DiskRecord.whole(entry)
        # At once, so that of a path that has to go the end goes first.
        self._disk.touch([each.filed.entry for each in node.path if each.filed is not None])
        return True

    def _header(self, node: PrefixNode, loose: UnpagedRecord) -> RecordHeader:
        record, owner, parent = node.record, node.root.owner, node.parent
        assert record is not None and owner is not None and parent is not None
        filed = parent.filed if parent.is_on_disk else None
        amid = filed is not None and filed.end < filed.entry.end
        return RecordHeader(
            self._disk.store.key,
            record_owner(owner.tenant, owner.salt, owner.lora),
            filed.entry.path if filed is not None and not amid else _path_digest(parent),
            _path_digest(node),
            filed.entry.identity if amid and filed is not None else "",
            tuple(record.oldest(group.number) for group in self._rows.groups),
            describe_record(loose, node.tokens, landmark=node.landmark),
        )


def _path_digest(node: PrefixNode) -> str:
    return EMPTY_PATH if node.parent is None else node.path_hash.hexdigest()


@lru_cache(maxsize=1024)
def record_owner(tenant: str, salt: str, lora: str) -> RecordOwner:
    return RecordOwner.of(tenant, salt, lora)


WORTH_READING: Final = 64
"""Tokens: fewer are as soon computed."""
READ_AHEAD: Final = 8
"""Sequences of the queue that records are read for before it is their turn."""
ONLOAD_ATTEMPTS: Final = 3
"""How often a sequence's records may turn out to be lost before it is computed."""
ONLOAD_SLICE_S: Final = 0.02
"""How long arrived records are put into memory between two steps; at least one is."""
READS_IN_FLIGHT: Final = 3
"""Records that are read ahead for a sequence: their bytes are held beside what the memory budget counts."""
ONLOAD_PATIENCE_S: Final = 30.0
"""After which what is still not read is computed."""
ONLOAD_PAUSE_S: Final = 0.002
"""How long a step with nothing to compute waits for a record."""
FIRST_READING_SPEED: Final = 5e8
"""Bytes a second at which records are expected to be read, before any was."""
SPEED_RECOVERY: Final = 1.1


@dataclass(eq=False, slots=True)
class Onload:
    """What is read for one sequence, and the room in memory that is kept for it."""

    owner: CacheOwner
    tokens: tuple[int, ...]
    resident: int  # tokens that could be resumed from memory before
    begun: float
    attempts: int = 1
    reserved: int = 0
    ahead: deque[DiskEntry] = field(default_factory=deque)  # what is still to be asked for
    readings: deque[PendingRead] = field(default_factory=deque)

    @property
    def under_way(self) -> bool:
        return bool(self.readings or self.ahead)

    @property
    def entries(self) -> list[DiskEntry]:
        return [*(reading.entry for reading in self.readings), *self.ahead]


class Onloader:
    """For the engine's thread alone. Each call is short."""

    def __init__(
        self,
        disk: DiskBackend,
        index: PrefixIndex,
        rows: BatchState,
        encoding: RecordEncoding,
        form: RecordForm,
        seconds: Callable[[int], float],
        make_room: Callable[[], bool],
        owner: Callable[[Request], CacheOwner],
    ) -> None:
        """`seconds(n)` is what computing n tokens takes, 0 where that is not known; `make_room` sees to it that
        `reserved` bytes are free, and says whether they are; `owner` says whose prefixes a request takes over."""
        self._disk, self._index, self._rows = disk, index, rows
        self._encoding, self._form = encoding, encoding.form(form)
        self._seconds, self._make_room, self._owner = seconds, make_room, owner
        self._known: dict[TokenSequence, Onload | None] = {}  # those in the queue; None: nothing is to be read
        self._speed = FIRST_READING_SPEED
        self._full = RareWarning(log)

    @property
    def reserved(self) -> int:
        return sum(promotion.reserved for promotion in self._known.values() if promotion is not None)

    def plant(self, owner: CacheOwner, tokens: Many[int]) -> None:
        """Let the index know what is on disk along these tokens: as many records are looked at as lie there."""
        if not owner.exact:
            mine = record_owner(owner.tenant, owner.salt, owner.lora)
            self._index.plant_disk_entries(owner, self._disk.store.along(mine, tokens))

    def expect(self, waiting: Many[TokenSequence], uses: Callable[[TokenSequence], bool]) -> None:
        """Read for those that wait, and put what has arrived into memory."""
        queued = set(waiting)
        for sequence in [sequence for sequence in self._known if sequence not in queued]:
            self._abandon(self._known.pop(sequence))
        self._take_in()
        for sequence in waiting[:READ_AHEAD]:
            if sequence not in self._known:
                self._known[sequence] = self._begun(sequence) if uses(sequence) else None

    def waits(self, sequence: TokenSequence) -> bool:
        if sequence not in self._known:
            self._known[sequence] = self._begun(sequence)
        promotion = self._known[sequence]
        return promotion is not None and promotion.under_way

    def restart_reads(self, sequence: TokenSequence) -> None:
        """A waiting sequence has other keys than before: read what it needs now. What was read stays read for it."""
        before = self._known.pop(sequence, None)
        self._abandon(before)
        found = self._begun(sequence)
        if before is not None:
            found = found or Onload(before.owner, tuple(sequence.keys), before.resident, before.begun)
            found.resident = min(found.resident, before.resident)
        self._known[sequence] = found

    def settle(self, sequence: TokenSequence, length: int) -> int:
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
                reading.wait(ONLOAD_PAUSE_S)
                return

    # Beginning

    def _begun(self, sequence: TokenSequence, attempts: int = 1) -> Onload | None:
        owner = self._owner(sequence.request)
        self.plant(owner, sequence.keys)
        found = self._index.reach(owner, sequence.keys, sequence.most_reusable)
        entries = list(dict.fromkeys(node.filed.entry for node in found.lacking if node.filed is not None))
        gained, nbytes = found.length - found.resident, sum(entry.size for entry in entries)
        if gained < WORTH_READING:
            return None
        if 0 < self._seconds(gained) < nbytes / self._speed:
            self._speed *= SPEED_RECOVERY  # a drive that was slow once is tried again in the end
            return None
        promotion = Onload(owner, tuple(sequence.keys), found.resident, time.monotonic(), attempts)
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

    def _ask(self, promotion: Onload) -> None:
        """Have the next few records read; those that are being read for others are waited for."""
        asked = {reading.entry: reading for reading in self._readings()}
        while promotion.ahead and len(promotion.readings) < READS_IN_FLIGHT:
            entry = promotion.ahead.popleft()
            if self._lacking(promotion, entry):
                promotion.readings.append(asked.get(entry) or self._disk.ask(entry))

    def _lacking(self, promotion: Onload, entry: DiskEntry) -> list[PrefixNode]:
        """The nodes that still need what a record on disk has."""
        return [
            node
            for node in self._index.along(promotion.owner, promotion.tokens)
            if node.filed is not None and node.filed.entry.name == entry.name
            if node.record is None or (not node.has_checkpoint and node.has_disk_checkpoint)
        ]

    def _room_for(self, entry: DiskEntry) -> int:
        """Bytes in memory: pages at both ends may be filled only in part."""
        return self._disk.memory_of(entry) + 2 * sum(group.page_bytes for group in self._rows.groups)

    def _readings(self) -> Iterable[PendingRead]:
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
                    again = promotion.attempts < ONLOAD_ATTEMPTS
                    self._known[sequence] = self._begun(sequence, promotion.attempts + 1) if again else None
                    break
                if time.monotonic() > began + ONLOAD_SLICE_S:
                    return
            if promotion is not None and promotion.under_way and began > promotion.begun + ONLOAD_PATIENCE_S:
                log.warning("a record took more than %.0f s to read; what it holds is computed", ONLOAD_PATIENCE_S)
                self._disk.counts.promotion_failures += 1
                self._abandon(promotion)
                self._known[sequence] = None

    def _arrived(self, promotion: Onload) -> bool:
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

    def _go_on(self, promotion: Onload) -> None:
        self._ask(promotion)
        if not promotion.under_way:
            promotion.reserved = 0

    def _fill(self, promotion: Onload, entry: DiskEntry, found: StoredData) -> bool:
        try:
            record = self._encoding.opened(found, self._form)
        except IngotError as error:
            log.warning("%s: %s", entry.name, error.message)
            entry.lost = True
            return False
        above: list[PrefixNode] = []
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

    def _fill_node(self, node: PrefixNode, above: Many[PrefixNode], record: UnpagedRecord) -> None:
        if node.record is None:
            before = [each.record for each in above if each.record is not None]
            part = record.before(node.end).behind(node.begin)
            self._index.fill(node, self._encoding.taken(before, part))
        elif node.record.checkpoint is None and node.has_disk_checkpoint:
            self._index.fill(node, replace(node.record, checkpoint=record.checkpoint))

    def _abandon(self, promotion: Onload | None) -> None:
        if promotion is None:
            return
        promotion.reserved = 0
        mine = set(promotion.readings)
        promotion.readings.clear()
        promotion.ahead.clear()
        for reading in mine.difference(self._readings()):
            reading.cancel()
