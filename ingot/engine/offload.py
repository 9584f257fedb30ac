"""Offloading: cached records go to disk when they leave memory, and are onloaded for sequences that wait to run.

Offload: KV is copied off the device on the engine thread, one record at a time, and passed to the writer as bytes.
While requests run, that may take a small share of the time; what would take more, or finds the writer's queue full, is
dropped. Onload: a sequence with a longer prefix on disk than in memory waits while it is read, if reading takes less
time than computing; the others go on. Memory is reserved before anything is read, and each record that arrives is put
into pages between two steps. A lost or damaged record is a miss: the sequence resumes from what is there, and the
remaining tokens are computed.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Final

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


class OffloadTier:
    """What is below memory: by default nothing. For the engine thread alone; no call waits for a file, but `close`."""

    @property
    def reserved(self) -> int:
        """Bytes of memory reserved for what is being read."""
        return 0

    def offload(self, node: PrefixNode) -> bool:
        """Whether a node's record is on disk, or on its way there. Never waits for a file."""
        return False

    def add_disk_entry(self, owner: CacheOwner, tokens: Sequence[int]) -> None:
        """Add to the index what is on disk of an owner's along these tokens."""

    def expect(self, waiting: Sequence[TokenSequence], uses: Callable[[TokenSequence], bool]) -> None:
        """Read for the waiting sequences that use the cache, and put arrived records into memory."""

    def waits(self, sequence: TokenSequence) -> bool:
        """Whether something is being read for a sequence."""
        return False

    def restart_reads(self, sequence: TokenSequence) -> None:
        """A waiting sequence has other keys than before: read what it needs now. What was read stays counted for it."""

    def settle(self, sequence: TokenSequence, length: int) -> int:
        """A sequence runs and reuses `length` tokens; returns how many of them were read for it."""
        return 0

    def forget(self, tenant: str) -> None:
        """Have other ranks remove a tenant's records, by its digest."""

    def pause(self) -> None:
        """Nothing can be computed: wait a little for what is being read."""

    def rest(self) -> None:
        """Nothing runs: save some unsaved records."""

    def free(self) -> None:
        """Cancel reads and save nothing. The last call."""

    def close(self) -> None:
        """Save all unsaved records, as far as there is time."""


OFFLOAD_SHARE: Final = 0.01
"""Of the time while requests run, that copying may take."""
OFFLOAD_BURST_S: Final = 0.05
"""That it may take at once, if it took none before."""
OFFLOAD_IDLE_S: Final = 0.02
"""How long it copies at a time while nothing runs: a new request waits no longer than that."""
OFFLOAD_CLOSING_S: Final = 20.0
"""How long a stopping server goes on copying and writing."""


class Offloader:
    def __init__(
        self, disk: DiskBackend, rows: BatchState, encoding: RecordEncoding, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._disk, self._rows, self._encoding, self._clock = disk, rows, encoding, clock
        self._time_left, self._since = OFFLOAD_BURST_S, clock()

    def offload(self, node: PrefixNode) -> bool:
        """See `OffloadTier`."""
        if node.is_saved:
            return True
        if node.root_owner.exact:  # files hold records that went through the codec
            return False
        now = self._clock()
        self._time_left = min(OFFLOAD_BURST_S, self._time_left + OFFLOAD_SHARE * (now - self._since))
        self._since = now
        if self._time_left <= 0 or not self._disk.has_room():
            self._disk.counts.dropped += 1
            return False
        done = self._hand_over(node)
        self._time_left -= self._clock() - now
        return done

    def rest(self, nodes: Iterable[PrefixNode]) -> None:
        """Nothing runs: save some unsaved records."""
        until = self._clock() + OFFLOAD_IDLE_S
        for node in self._unsaved(nodes):
            # What continues a record that is not saved is of no use.
            if self._clock() > until or not self._disk.has_room() or not self._hand_over(node):
                return

    def close(self, nodes: Iterable[PrefixNode]) -> None:
        """Save all unsaved records, as far as there is time."""
        until = self._clock() + OFFLOAD_CLOSING_S
        for node in self._unsaved(nodes):
            saved = self._disk.has_room() and self._hand_over(node)
            # Once the queue is empty, any record fits.
            if not saved and not (self._disk.drain(max(0.0, until - self._clock())) and self._hand_over(node)):
                break
            if self._clock() > until:
                break
        self._disk.close(max(1.0, until - self._clock()))

    @staticmethod
    def _unsaved(nodes: Iterable[PrefixNode]) -> list[PrefixNode]:
        """Parents first, as their children are of no use without them. What was saved and then evicted is left out, or
        a disk that is too small for everything would be written to forever."""
        unsaved = [
            node
            for node in nodes
            if node.record is not None and not node.root_owner.exact and not node.is_saved
            if node.disk_record is None or node.disk_record.there
        ]
        return sorted(unsaved, key=lambda node: node.end)

    def _hand_over(self, node: PrefixNode) -> bool:
        assert node.record is not None
        unpaged = self._encoding.loose(node.record)
        header = self._header(node, unpaged)
        entry = self._disk.stored(header.name)  # the same record may be stored from before
        if entry is None or entry.lost:
            entry = self._disk.offer(header, tuple(serialise_record(unpaged)), unpaged)
        if entry is None:
            return False
        node.disk_record = DiskRecord.whole(entry)
        # Touch the whole path at once, so that its end is evicted first.
        self._disk.touch([each.disk_record.entry for each in node.path if each.disk_record is not None])
        return True

    def _header(self, node: PrefixNode, unpaged: UnpagedRecord) -> RecordHeader:
        record, owner, parent = node.record, node.root.owner, node.parent
        assert record is not None and owner is not None and parent is not None
        disk_record = parent.disk_record if parent.is_on_disk else None
        ends_inside = disk_record is not None and disk_record.end < disk_record.entry.end
        return RecordHeader(
            self._disk.store.key,
            record_owner(owner.tenant, owner.salt, owner.lora),
            disk_record.entry.path if disk_record is not None and not ends_inside else _path_digest(parent),
            _path_digest(node),
            disk_record.entry.identity if ends_inside and disk_record is not None else "",
            tuple(record.oldest(group.number) for group in self._rows.groups),
            describe_record(unpaged, node.tokens, landmark=node.landmark),
        )


def _path_digest(node: PrefixNode) -> str:
    return EMPTY_PATH if node.parent is None else node.path_hash.hexdigest()


@lru_cache(maxsize=1024)
def record_owner(tenant: str, salt: str, lora: str) -> RecordOwner:
    return RecordOwner.of(tenant, salt, lora)


WORTH_READING: Final = 64
"""Tokens: fewer are computed as fast."""
MUCH_SLOWER: Final = 1.5
"""How many times as long as computing it, reading may take: others are computed meanwhile."""
READ_AHEAD: Final = 8
"""Waiting sequences for which records are read ahead."""
ONLOAD_ATTEMPTS: Final = 3
"""How often a sequence's records may turn out to be lost before it is computed instead."""
ONLOAD_SLICE_S: Final = 0.02
"""How long arrived records are put into memory between two steps, but at least one."""
READS_IN_FLIGHT, BYTES_IN_FLIGHT = 3, 256 << 20
"""Records that are read at a time for a sequence, and more of them up to so many bytes, which the memory budget leaves
out."""
ONLOAD_PATIENCE_S: Final = 30.0
"""After which a sequence no longer waits for its records."""
ONLOAD_PAUSE_S: Final = 0.002
"""How long a step with nothing to compute waits for a record."""
FIRST_READING_SPEED: Final = 2e9
"""Assumed bytes a second, before any record was read: an SSD's."""
SPEED_RECOVERY: Final = 1.1


@dataclass(eq=False, slots=True)
class Onload:
    """What is read for one sequence, and the memory reserved for it."""

    owner: CacheOwner
    tokens: tuple[int, ...]
    resident: int  # tokens of its prefix that were in memory before
    began: float
    attempts: int = 1
    reserved: int = 0
    ahead: deque[DiskEntry] = field(default_factory=deque)  # still to be read
    readings: deque[PendingRead] = field(default_factory=deque)

    @property
    def is_reading(self) -> bool:
        return bool(self.readings or self.ahead)

    @property
    def entries(self) -> list[DiskEntry]:
        return [*(reading.entry for reading in self.readings), *self.ahead]


class DiskTier(OffloadTier):
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
        """`form` is that of raw records. `seconds(n)` is what computing n tokens takes, 0 where that is not sure;
        `make_room` tries to free `reserved` bytes; `owner` gives the owner of a request's prefixes."""
        self._disk, self._index, self._rows = disk, index, rows
        self._encoding, self._form = encoding, encoding.form(form)
        self._seconds, self._make_room, self._owner = seconds, make_room, owner
        self._onloads: dict[TokenSequence, Onload | None] = {}  # of waiting sequences; None: nothing is to be read
        self._speed = FIRST_READING_SPEED
        self._memory_warning = RareWarning(log)
        self._offloader = Offloader(disk, rows, encoding)

    @property
    def reserved(self) -> int:
        return sum(onload.reserved for onload in self._onloads.values() if onload is not None)

    def offload(self, node: PrefixNode) -> bool:
        return self._offloader.offload(node)

    def forget(self, tenant: str) -> None:
        self._disk.forget_on_followers(tenant)

    def free(self) -> None:
        self.expect((), lambda sequence: False)

    def rest(self) -> None:
        self.free()
        self._offloader.rest(self._index.nodes())

    def close(self) -> None:
        try:
            self._offloader.close(self._index.nodes())
        except Exception:  # the rest of the shutdown must go on
            log.exception("cached prefixes could not be saved")

    def add_disk_entry(self, owner: CacheOwner, tokens: Sequence[int]) -> None:
        if not owner.exact:
            record_of = record_owner(owner.tenant, owner.salt, owner.lora)
            self._index.add_disk_entries(owner, self._disk.store.along(record_of, tokens))

    def expect(self, waiting: Sequence[TokenSequence], uses: Callable[[TokenSequence], bool]) -> None:
        queued = set(waiting)
        for sequence in [sequence for sequence in self._onloads if sequence not in queued]:
            self._abandon(self._onloads.pop(sequence))
        self._take_arrived()
        for sequence in waiting[:READ_AHEAD]:
            if sequence not in self._onloads:
                self._onloads[sequence] = self._begin_onload(sequence) if uses(sequence) else None

    def waits(self, sequence: TokenSequence) -> bool:
        if sequence not in self._onloads:
            self._onloads[sequence] = self._begin_onload(sequence)
        onload = self._onloads[sequence]
        return onload is not None and onload.is_reading

    def restart_reads(self, sequence: TokenSequence) -> None:
        before = self._onloads.pop(sequence, None)
        self._abandon(before)
        found = self._begin_onload(sequence)
        if before is not None:
            found = found or Onload(before.owner, tuple(sequence.keys), before.resident, before.began)
            found.resident = min(found.resident, before.resident)
        self._onloads[sequence] = found

    def settle(self, sequence: TokenSequence, length: int) -> int:
        onload = self._onloads.pop(sequence, None)
        read = 0 if onload is None else max(0, length - onload.resident)
        if sequence.preemptions == 0:
            self._disk.counts.hits += read > 0
            self._disk.counts.misses += read == 0 and len(sequence.tokens) - length > WORTH_READING
        path = self._index.along(self._owner(sequence.request), sequence.keys[:length])
        self._disk.touch([node.disk_record.entry for node in path if node.disk_record])
        return read

    def pause(self) -> None:
        for reading in self._readings():
            if not reading.done:
                reading.wait(ONLOAD_PAUSE_S)
                return

    # Beginning

    def _begin_onload(self, sequence: TokenSequence, attempts: int = 1) -> Onload | None:
        owner = self._owner(sequence.request)
        self.add_disk_entry(owner, sequence.keys)
        found = self._index.reach(owner, sequence.keys, sequence.most_reusable)
        entries = list(dict.fromkeys(node.disk_record.entry for node in found.lacking if node.disk_record is not None))
        gained, nbytes = found.length - found.resident, sum(entry.size for entry in entries)
        if gained < WORTH_READING:
            return None
        if 0 < MUCH_SLOWER * self._seconds(gained) < nbytes / self._speed:
            self._speed *= SPEED_RECOVERY  # a drive that was slow once is tried again in the end
            return None
        onload = Onload(owner, tuple(sequence.keys), found.resident, time.monotonic(), attempts)
        coming = {entry for other in self._onloads.values() if other is not None for entry in other.entries}
        onload.reserved = sum(self._room_for(entry) for entry in entries if entry not in coming)
        self._onloads[sequence] = onload
        if not self._make_room():
            self._onloads[sequence] = None
            self._memory_warning.warn("%d bytes of records are not onloaded, as memory has no room for them", nbytes)
            return None
        onload.ahead.extend(entries)
        self._start_reads(onload)
        return onload

    def _start_reads(self, onload: Onload) -> None:
        """Start to read the next few records; reads for other sequences are shared."""
        reads = {reading.entry: reading for reading in self._readings()}
        while onload.ahead and (
            len(onload.readings) < READS_IN_FLIGHT
            or sum(each.entry.size for each in onload.readings) + onload.ahead[0].size <= BYTES_IN_FLIGHT
        ):
            entry = onload.ahead.popleft()
            if self._lacking(onload, entry):
                onload.readings.append(reads.get(entry) or self._disk.ask(entry))

    def _lacking(self, onload: Onload, entry: DiskEntry) -> list[PrefixNode]:
        """The nodes that still lack what a record on disk has."""
        return [
            node
            for node in self._index.along(onload.owner, onload.tokens)
            if node.disk_record is not None and node.disk_record.entry.name == entry.name
            if node.record is None or (not node.has_checkpoint and node.has_disk_checkpoint)
        ]

    def _room_for(self, entry: DiskEntry) -> int:
        """Bytes in memory: the pages at both ends may be partly filled."""
        return self._disk.memory_of(entry) + 2 * sum(group.page_bytes for group in self._rows.groups)

    def _readings(self) -> Iterable[PendingRead]:
        for onload in self._onloads.values():
            if onload is not None:
                yield from onload.readings

    # Arriving

    def _take_arrived(self) -> None:
        began = time.monotonic()
        for sequence, onload in list(self._onloads.items()):
            while onload is not None and onload.readings and onload.readings[0].done:
                if not self._onload_next(onload):
                    self._disk.doubt(onload.entries)
                    self._abandon(onload)
                    retry = onload.attempts < ONLOAD_ATTEMPTS
                    self._onloads[sequence] = self._begin_onload(sequence, onload.attempts + 1) if retry else None
                    break
                if time.monotonic() > began + ONLOAD_SLICE_S:
                    return
            if onload is not None and onload.is_reading and began > onload.began + ONLOAD_PATIENCE_S:
                log.warning("a record took more than %.0f s to read; it is computed instead", ONLOAD_PATIENCE_S)
                self._disk.counts.promotion_failures += 1
                self._abandon(onload)
                self._onloads[sequence] = None

    def _onload_next(self, onload: Onload) -> bool:
        """Put the next record into memory. False where it, or its parent, is lost."""
        reading = onload.readings.popleft()
        if reading.found is not None and not self._lacking(onload, reading.entry):  # another sequence's read was first
            self._continue(onload)
            return True
        began = time.monotonic()
        if reading.found is None or not self._fill(onload, reading.entry, reading.found):
            self._disk.counts.promotion_failures += not reading.gone
            return False
        took = reading.seconds + time.monotonic() - began
        self._speed += 0.2 * (reading.entry.size / max(took, 1e-6) - self._speed)
        self._disk.counts.promotions += 1
        self._disk.counts.promoted_bytes += reading.entry.size
        self._disk.counts.promotion_s += took
        self._continue(onload)
        return True

    def _continue(self, onload: Onload) -> None:
        self._start_reads(onload)
        if not onload.is_reading:
            onload.reserved = 0

    def _fill(self, onload: Onload, entry: DiskEntry, found: StoredData) -> bool:
        try:
            record = self._encoding.opened(found, self._form)
        except IngotError as error:
            log.warning("%s: %s", entry.name, error.message)
            entry.lost = True
            return False
        above: list[PrefixNode] = []
        for node in self._index.along(onload.owner, onload.tokens):
            if node.disk_record is not None and node.disk_record.entry.name == entry.name:
                self._fill_node(node, above, record)
            if node.record is None:
                break
            above.append(node)
        if self._lacking(onload, entry):
            log.warning("%s is of no use, as its parent has left memory meanwhile", entry.name)
            return False
        return True

    def _fill_node(self, node: PrefixNode, above: Sequence[PrefixNode], record: UnpagedRecord) -> None:
        if node.record is None:
            before = [each.record for each in above if each.record is not None]
            part = record.before(node.end).behind(node.begin)
            self._index.fill(node, self._encoding.taken(before, part))
        elif node.record.checkpoint is None and node.has_disk_checkpoint:
            self._index.fill(node, replace(node.record, checkpoint=record.checkpoint))

    def _abandon(self, onload: Onload | None) -> None:
        if onload is None:
            return
        onload.reserved = 0
        own_reads = set(onload.readings)
        onload.readings.clear()
        onload.ahead.clear()
        for reading in own_reads.difference(self._readings()):
            reading.cancel()
