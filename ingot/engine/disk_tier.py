"""Between what is kept in memory and what is kept on disk, as the step loop meets it. A server without a folder for
records has one too, which does nothing."""

from __future__ import annotations

import logging
from collections.abc import Callable
from collections.abc import Sequence as Many
from typing import Protocol

from ingot.cache.batch_state import Rows
from ingot.cache.disk.disk import Disk
from ingot.cache.packing import Form
from ingot.cache.prefix_index import PrefixIndex
from ingot.cache.record_encoding import RecordEncoding
from ingot.cache.tree import Node, Owner
from ingot.engine.offload import Promotions
from ingot.engine.request import Request
from ingot.engine.sequence import Sequence
from ingot.engine.spilling import Spiller

log = logging.getLogger("ingot.cache")


class Tier(Protocol):
    """What is below memory. For the engine's thread alone; no call waits for a file, but `close`."""

    @property
    def reserved(self) -> int:
        """Bytes of memory that are kept for what is being read."""

    def spill(self, node: Node) -> bool:
        """Whether a node's record is there, or on its way."""

    def plant(self, owner: Owner, tokens: Many[int]) -> None:
        """Let the index know what is there of an owner's along these tokens."""

    def expect(self, waiting: Many[Sequence], uses: Callable[[Sequence], bool]) -> None:
        """Read for those that wait and use it, and put what has arrived into memory."""

    def waits(self, sequence: Sequence) -> bool:
        """Whether something is being read for a sequence."""

    def look_again(self, sequence: Sequence) -> None:
        """A waiting sequence has other keys than before: read what it needs now."""

    def settle(self, sequence: Sequence, length: int) -> int:
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


class NoTier:
    reserved = 0

    def spill(self, node: Node) -> bool:
        return False

    def plant(self, owner: Owner, tokens: Many[int]) -> None: ...

    def expect(self, waiting: Many[Sequence], uses: Callable[[Sequence], bool]) -> None: ...

    def waits(self, sequence: Sequence) -> bool:
        return False

    def look_again(self, sequence: Sequence) -> None: ...

    def settle(self, sequence: Sequence, length: int) -> int:
        return 0

    def forget(self, tenant: str) -> None: ...

    def pause(self) -> None: ...

    def rest(self) -> None: ...

    def free(self) -> None: ...

    def close(self) -> None: ...


class DiskTier:
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
        """See `Promotions`."""
        self._index = index
        self._spiller = Spiller(disk, rows, encoding)
        self._promotions = Promotions(disk, index, rows, encoding, form, seconds, make_room, owner)
        self.spill, self.plant = self._spiller.spill, self._promotions.plant
        self.expect, self.waits = self._promotions.expect, self._promotions.waits
        self.settle, self.pause = self._promotions.settle, self._promotions.pause
        self.look_again = self._promotions.look_again
        self.forget = disk.forget_elsewhere

    @property
    def reserved(self) -> int:
        return self._promotions.reserved

    def free(self) -> None:
        self._promotions.expect((), lambda sequence: False)

    def rest(self) -> None:
        self._promotions.expect((), lambda sequence: False)
        self._spiller.rest(self._index.nodes())

    def close(self) -> None:
        try:
            self._spiller.close(self._index.nodes())
        except Exception:  # whoever ends has more to do
            log.exception("what is kept could not be saved")
