"""Kept prefixes out to a file and in from one, a piece at a time, so that no step waits longer than for one of them.

Arrays are made, read and let go on the engine thread alone; files are read and written by whoever called.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ingot.cache import archive
from ingot.cache.archive import Archive, ArchivedRecord, ArchiveSeal, check_going
from ingot.cache.packing import Form, described, fitted, packed, unpacked
from ingot.cache.tree import Node, Owner
from ingot.engine.prefix_cache import OnThread, Reuse
from ingot.errors import Unavailable
from ingot.models.form import form_of

if TYPE_CHECKING:
    from ingot.models.adapter import Adapter

LOOKED_AT: Final = 256
"""Nodes without anything in memory that are passed over at once."""


Piece = tuple[ArchivedRecord, list[bytes]]


def export(run: OnThread, tenant: str, seal: ArchiveSeal, path: Path, going: Callable[[], bool]) -> int:
    """Write what is kept of a tenant's, each piece as it is when it is its turn; returns the number of tokens. Raises
    Cancelled once `going` says no."""
    with closing(_pieces(run, tenant, going)) as pieces:
        written = archive.write(path, seal, pieces, going)
    return sum(len(piece.tokens) for piece in written)


def _pieces(run: OnThread, tenant: str, going: Callable[[], bool]) -> Generator[Piece, None, None]:
    walk = run(lambda reuse: _Walk(reuse, tenant))
    try:
        while not walk.ended:
            check_going(going)
            piece = run(walk.advance)
            if piece is not None:
                yield piece
    finally:
        run(lambda reuse: walk.end())


class _Walk:
    """Goes through what is in memory of a tenant's, a piece at a time, while it changes: what leaves before it is its
    turn is left out, and what comes may be. Holds on to no record. The engine thread's alone, but for `ended`."""

    def __init__(self, reuse: Reuse, tenant: str) -> None:
        self._index = index = reuse.index
        # Files hold what went through the codec, where there is one, and nothing else.
        owners = [owner for owner in index.owners(tenant) if not owner.exact]
        self._ahead: Iterator[Node] = chain.from_iterable(map(index.nodes, owners))
        self._target: Node | None = None
        self._numbers: dict[Node, int] = {}
        self.ended = False

    def end(self) -> None:
        self._ahead, self._target, self.ended = iter(()), None, True
        self._numbers.clear()

    def advance(self, reuse: Reuse) -> Piece | None:
        """The next piece, behind what it goes on from; None where none was found among the next few nodes, or this is
        the end. Raises Unavailable where all that was kept was lost meanwhile."""
        if reuse.index is not self._index:
            raise Unavailable("What was kept was lost while it was written to a file.")
        if self._target is None or self._target.record is None:
            self._target = self._next_target()
        if self._target is None:
            return None
        # A node that was cut in two since has somebody before it that was not met.
        node = next(each for each in self._target.path if each not in self._numbers)
        if node is self._target:
            self._target = None
        assert node.record is not None and node.parent is not None
        owner, parent = node.root_owner, self._numbers.get(node.parent, -1)
        self._numbers[node] = len(self._numbers)
        loose = reuse.encoding.loose(node.record)
        stored = described(loose, node.tokens, landmark=node.landmark)
        return ArchivedRecord.of(stored, salt=owner.salt, parent=parent, lora=owner.lora), packed(loose)

    def _next_target(self) -> Node | None:
        for _ in range(LOOKED_AT):
            node = next(self._ahead, None)
            if node is None:
                self.end()
                return None
            if node.record is not None and node not in self._numbers:  # else it is on disk alone
                return node
        return None


def adopt(
    run: OnThread, tenant: str, seal: ArchiveSeal, path: Path, adapter: Adapter, going: Callable[[], bool]
) -> int:
    """Keep what an archive holds; returns the tokens that were new.

    Raises ArchiveError before anything is changed, unless it is a state that is none of this model's; and Cancelled
    soon after `going` says no, with what was kept until then.
    """
    opened = Archive.open(path, seal, going)
    form = [run(lambda reuse: reuse.encoding.form(form_of(adapter, reuse.rows)))]
    paths: list[tuple[int, ...]] = []
    added = 0
    try:
        for piece, data in zip(opened.pieces, opened.data(), strict=True):
            check_going(going)
            before = paths[piece.parent] if piece.parent >= 0 else ()
            paths.append((*before, *piece.tokens))
            owner, tokens = Owner(tenant, piece.salt, lora=piece.lora), paths[-1]
            added += run(lambda reuse: _keep(reuse, owner, tokens, piece, data, form[0]))  # noqa: B023  (run at once)
    finally:
        run(lambda reuse: form.clear())
    return added


def _keep(
    reuse: Reuse, owner: Owner, tokens: tuple[int, ...], piece: ArchivedRecord, data: list[bytes], form: Form
) -> int:
    record = fitted(unpacked(piece, data), form)
    return reuse.adopt(owner, tokens, record, landmark=piece.landmark)
