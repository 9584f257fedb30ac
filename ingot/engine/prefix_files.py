"""Kept prefixes out to a file and in from one, a piece at a time, so that no step waits longer than for one of them.

Arrays are made, read and let go on the engine thread alone; files are read and written by whoever called.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from ingot.cache import archive
from ingot.cache.archive import Archive, ArchivedRecord, ArchiveSeal, check_going
from ingot.cache.packing import Form, described, fitted, packed, unpacked
from ingot.cache.records import Record
from ingot.cache.tree import Node, Owner
from ingot.engine.reuse import OnThread, Reuse
from ingot.models.form import form_of

if TYPE_CHECKING:
    from ingot.models.adapter import Adapter


@dataclass
class Snapshot:
    """What is kept of a tenant's at one moment, and how many pages of each record were in fewer bits then: more of them
    may be when they are written. The records are immutable, and emptied where they were taken."""

    pieces: list[ArchivedRecord] = field(default_factory=list)
    records: list[tuple[Record, int]] = field(default_factory=list)


def export(run: OnThread, tenant: str, seal: ArchiveSeal, path: Path, going: Callable[[], bool]) -> int:
    """Write all that is kept of a tenant's; returns the number of tokens. Raises Cancelled once `going` says no."""
    taken = run(lambda reuse: _snapshot(reuse, tenant))

    def data(number: int) -> list[bytes]:
        check_going(going)
        return run(lambda reuse: _packed(reuse, *taken.records[number]))

    try:
        archive.write(path, seal, taken.pieces, data)
    finally:
        run(lambda reuse: taken.records.clear())
    return sum(len(piece.tokens) for piece in taken.pieces)


def _snapshot(reuse: Reuse, tenant: str) -> Snapshot:
    taken = Snapshot()
    # Files hold what went through the codec, where there is one, and nothing else.
    for owner in (owner for owner in reuse.index.owners(tenant) if not owner.exact):
        numbers: dict[Node, int] = {}
        # Parents come before their children.
        for node in sorted(reuse.index.nodes(owner), key=lambda node: node.end):
            if node.record is None:  # on disk alone
                continue
            assert node.parent is not None
            parent = numbers.get(node.parent, -1)
            numbers[node] = len(taken.pieces)
            loose = reuse.encoding.loose(node.record)
            stored = described(loose, node.tokens, landmark=node.landmark)
            taken.pieces.append(ArchivedRecord.of(stored, salt=owner.salt, parent=parent, lora=owner.lora))
            taken.records.append((node.record, loose.coded))
    return taken


def _packed(reuse: Reuse, record: Record, coded: int) -> list[bytes]:
    return packed(reuse.encoding.loose(record).with_coded(coded))


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
