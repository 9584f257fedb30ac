"""Records out to disk: when they have to leave memory, when nothing else runs, and at the end.

States are copied off the device on the engine's thread, one record at a time, and handed to the writer as bytes. While
requests run that may take a small part of the time; what would take more, or finds the writer's queue full, is not
written.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Final

from ingot.cache.batch_state import Rows
from ingot.cache.disk.disk import Disk
from ingot.cache.disk.entry import START
from ingot.cache.disk.header import Header, RecordOwner
from ingot.cache.filed import FiledRecord
from ingot.cache.packing import LooseRecord, described, packed
from ingot.cache.record_encoding import RecordEncoding
from ingot.cache.tree import Node

BUSY_SHARE: Final = 0.01
"""Of the time while requests run, what copying may take."""
BURST_S: Final = 0.05
"""What it may take at once, if it took nothing before."""
IDLE_S: Final = 0.02
"""How long it copies at a time while nothing runs: a newcomer waits no longer than that."""
CLOSING_S: Final = 20.0
"""How long a server that stops goes on copying and writing."""


class Spiller:
    def __init__(
        self, disk: Disk, rows: Rows, encoding: RecordEncoding, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._disk, self._rows, self._encoding, self._clock = disk, rows, encoding, clock
        self._left, self._since = BURST_S, clock()

    def spill(self, node: Node) -> bool:
        """Whether a node's record is on disk, or on its way there. Never waits for a file."""
        if node.is_saved:
            return True
        if node.root_owner.exact:  # files hold what went through the codec
            return False
        now = self._clock()
        self._left = min(BURST_S, self._left + BUSY_SHARE * (now - self._since))
        self._since = now
        if self._left <= 0 or not self._disk.has_room():
            self._disk.counts.dropped += 1
            return False
        done = self._hand_over(node)
        self._left -= self._clock() - now
        return done

    def rest(self, nodes: Iterable[Node]) -> None:
        """Nothing runs: save some of what is not. Whoever waits for the writer is told when it is worth another try."""
        until = self._clock() + IDLE_S
        for node in self._unsaved(nodes):
            if self._clock() > until or not self._disk.has_room():
                return
            self._hand_over(node)

    def close(self, nodes: Iterable[Node]) -> None:
        """Save all that is not, as far as there is time."""
        until = self._clock() + CLOSING_S
        for node in self._unsaved(nodes):
            while not self._disk.has_room() and (left := until - self._clock()) > 0:
                if self._disk.writer.is_paused or self._disk.drain(left):
                    break
            if self._clock() > until or self._disk.writer.is_paused:
                break
            self._hand_over(node)
        self._disk.close(max(1.0, until - self._clock()))

    @staticmethod
    def _unsaved(nodes: Iterable[Node]) -> list[Node]:
        """Beginnings before what goes on from them: without those it would be of no use. What was saved and had to go
        is left out, or a disk that is too small for all would be written to forever."""
        held = (node for node in nodes if node.record is not None and not node.root_owner.exact)
        unsaved = (node for node in held if not node.is_saved)
        return sorted((node for node in unsaved if node.filed is None or node.filed.there), key=lambda node: node.end)

    def _hand_over(self, node: Node) -> bool:
        assert node.record is not None
        loose = self._encoding.loose(node.record)
        header = self._header(node, loose)
        entry = self._disk.stored(header.name)  # the same was computed before, and is there still
        if entry is None or entry.lost:
            entry = self._disk.offer(header, tuple(packed(loose)), loose)
        if entry is None:
            return False
        node.filed = FiledRecord.whole(entry)
        # At once, so that of a path that has to go the end goes first.
        self._disk.touch([each.filed.entry for each in node.path if each.filed is not None])
        return True

    def _header(self, node: Node, loose: LooseRecord) -> Header:
        record, owner, parent = node.record, node.root.owner, node.parent
        assert record is not None and owner is not None and parent is not None
        filed = parent.filed if parent.is_filed else None
        amid = filed is not None and filed.end < filed.entry.end
        return Header(
            self._disk.store.key,
            record_owner(owner.tenant, owner.salt, owner.lora),
            filed.entry.path if filed is not None and not amid else _path_digest(parent),
            _path_digest(node),
            filed.entry.identity if amid and filed is not None else "",
            tuple(record.oldest(group.number) for group in self._rows.groups),
            described(loose, node.tokens, landmark=node.landmark),
        )


def _path_digest(node: Node) -> str:
    return START if node.parent is None else node.path_hash.hexdigest()


@lru_cache(maxsize=1024)
def record_owner(tenant: str, salt: str, lora: str) -> RecordOwner:
    return RecordOwner.of(tenant, salt, lora)
