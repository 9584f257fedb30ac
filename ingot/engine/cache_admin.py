"""The prefix cache as other threads may ask about it: status, explanations, clearing, export to a file and import
from one.

What needs the engine thread runs there between two steps, and is short however much is cached. A caller names the
tenant it speaks for, and is told about that one alone. Files are written and read a record at a time, so that no
step waits longer than for one of them: arrays are made, read and let go on the engine thread alone; files are read
and written by whoever called.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ingot.cache import archive
from ingot.cache.archive import Archive, ArchivedRecord, ArchiveSeal, check_still_wanted
from ingot.cache.codecs.names import RAW
from ingot.cache.codecs.pair import PairCodec
from ingot.cache.disk.backend import DiskBackend
from ingot.cache.disk.record_file import tenant_digest
from ingot.cache.prefix_tree import CacheOwner, MemoryTally, PrefixNode
from ingot.cache.records import RecordForm, describe_record, deserialise_record, fit_record, serialise_record
from ingot.engine.prefix_cache import PrefixCache, RunOnEngineThread
from ingot.engine.request import CacheReport, Request
from ingot.engine.sequence import PromptMedia
from ingot.engine.status import CacheBranch, CacheStatus, CacheTotals, DiskStatus, DiskTotals, SaltStatus
from ingot.errors import Unavailable, Unsupported
from ingot.models.adapter import ModelAdapter
from ingot.models.cache_key import kv_key
from ingot.models.kv_codec import record_form_of

if TYPE_CHECKING:
    from ingot.models.adapter import ModelAdapter


log = logging.getLogger("ingot.cache")

SHOWN_BRANCHES: Final = 64  # branches, of however many there are
StillWanted = Callable[[], bool]
"""Whether somebody still waits for the work."""


def is_always_wanted() -> bool:
    return True


class PrefixCacheAdmin:
    def __init__(
        self,
        run: RunOnEngineThread,
        adapter: ModelAdapter,
        folder: Path | None,
        disk: DiskBackend | None,
        codec: PairCodec,
    ) -> None:
        """`folder` has the model's files; without any, what is kept cannot be moved."""
        self._run, self._adapter, self._folder, self._disk, self._codec = run, adapter, folder, disk, codec

    def status(self, tenant: str) -> CacheStatus:
        known, tallies = self._run(lambda reuse: (_tenant_status(reuse, tenant), reuse.index.tallies(tenant)))
        known = replace(known, salts=_salt_statuses(tallies))  # here: there may be many, and the engine has more to do
        live = RAW if self._adapter.live is None else str(self._adapter.live.name)
        known = replace(known, codec=str(self._codec.name), live_codec=live)
        if self._disk is None:
            return known
        totals = replace(known.totals, disk=_disk_totals(self._disk))
        return replace(known, totals=totals, disk=DiskStatus(*self._disk.store.held(tenant_digest(tenant))))

    def tree(self, tenant: str) -> tuple[CacheBranch, ...]:
        """How what is kept of a tenant's branches, or the part of it that was used most."""
        return self._run(
            lambda reuse: tuple(_cache_branch(*found) for found in reuse.index.outline(tenant, SHOWN_BRANCHES))
        )

    def explain(self, request: Request, number: int) -> CacheReport:
        """What one of the request's prompts would take over if it came now. Leaves no trace."""
        prompt, items = request.prompts[number], request.media[number] if request.media else ()
        keys = PromptMedia(items).keyed(prompt) if items else prompt
        return self._run(lambda reuse: reuse.explain(request, keys))

    def clear(self, tenant: str) -> int:
        """Forget all that is kept for a tenant, pinned or not; returns the bytes that this frees, in memory and on
        disk. Raises Unavailable where files cannot be removed."""
        freed = self._run(lambda reuse: reuse.forget(tenant))
        if self._disk is None:
            return freed
        try:
            return freed + self._disk.forget(tenant_digest(tenant))
        except OSError as error:
            log.error("what is kept in %s cannot be removed: %s", self._disk.store.folder, error)
            raise Unavailable("What is kept on disk cannot be removed; the server's log says why.") from error

    def export(self, tenant: str, path: Path, secret: bytes, going: StillWanted = is_always_wanted) -> int:
        """Write all that is kept for a tenant to a file, sealed with `secret`; returns the number of tokens. Raises
        Cancelled soon after `going` says no."""
        return export_prefixes(self._run, tenant, self._seal(secret), path, going)

    def adopt(self, tenant: str, path: Path, secret: bytes, going: StillWanted = is_always_wanted) -> int:
        """Keep for a tenant what is in a file that was sealed with `secret`; returns the tokens that were new. Raises
        ArchiveError; and Cancelled soon after `going` says no."""
        return import_prefixes(self._run, tenant, self._seal(secret), path, self._adapter, going)

    def _seal(self, secret: bytes) -> ArchiveSeal:
        """Names everything that kept states depend on."""
        if self._folder is None:
            raise Unsupported("What is kept cannot be moved: this model has no files to know it by.")
        if not self._adapter.is_whole:
            raise Unsupported(
                "What is kept cannot be moved: several processes run this model, and each has a part of it."
            )
        return ArchiveSeal(kv_key(self._adapter, self._folder, self._codec), secret)


def _disk_totals(disk: DiskBackend) -> DiskTotals:
    records, used = disk.store.total()
    return DiskTotals(records, used, disk.store.limits.most, disk.store.folder_bytes(), **asdict(disk.counts))


def _tenant_status(reuse: PrefixCache, tenant: str) -> CacheStatus:
    index, counts = reuse.index, reuse.counts[tenant]
    return CacheStatus(
        limit_bytes=reuse.limit,
        used_bytes=index.shares.held[tenant],
        evictions=index.shares.evictions[tenant],
        totals=CacheTotals(len(index.shares.held), index.nbytes, index.shares.evictions.total()),
        prompts=counts.prompts,
        hits=counts.hits,
        prompt_tokens=counts.prompt_tokens,
        matched_tokens=counts.matched_tokens,
    )


def _salt_statuses(tallies: Iterable[tuple[CacheOwner, MemoryTally]]) -> tuple[SaltStatus, ...]:
    """What is kept under each salt, exact or not, through whichever adapter."""
    salts: dict[str, MemoryTally] = {}
    for owner, tally in tallies:
        salts[owner.salt] = salts[owner.salt].plus(tally) if owner.salt in salts else tally
    return tuple(
        SaltStatus(salt, tally.records, tally.tokens, tally.checkpoints, tally.pinned_tokens, tally.bytes)
        for salt, tally in salts.items()
    )


def _cache_branch(node: PrefixNode, parent: int | None, more: int) -> CacheBranch:
    return CacheBranch(
        parent=parent,
        salt=node.root_owner.salt,
        begin=node.begin,
        end=node.end,
        uses=node.uses,
        bytes=0 if node.record is None else node.record.nbytes,
        pinned=node.pinned,
        on_disk=node.is_on_disk,
        more=more,
    )


SKIPPED_AT_ONCE: Final = 256
"""Nodes without anything in memory that are passed over at once."""


ExportedRecord = tuple[ArchivedRecord, list[bytes]]


def export_prefixes(
    run: RunOnEngineThread, tenant: str, seal: ArchiveSeal, path: Path, going: Callable[[], bool]
) -> int:
    """Write what is kept of a tenant's, each piece as it is when it is its turn; returns the number of tokens. Raises
    Cancelled once `going` says no."""
    with closing(_exported_records(run, tenant, going)) as pieces:
        written = archive.write_archive(path, seal, pieces, going)
    return sum(len(piece.tokens) for piece in written)


def _exported_records(
    run: RunOnEngineThread, tenant: str, going: Callable[[], bool]
) -> Generator[ExportedRecord, None, None]:
    walk = run(lambda reuse: _ExportWalk(reuse, tenant))
    try:
        while not walk.ended:
            check_still_wanted(going)
            piece = run(walk.advance)
            if piece is not None:
                yield piece
    finally:
        run(lambda reuse: walk.end())


class _ExportWalk:
    """Goes through what is in memory of a tenant's, a piece at a time, while it changes: what leaves before it is its
    turn is left out, and what comes may be. Holds on to no record. The engine thread's alone, but for `ended`."""

    def __init__(self, reuse: PrefixCache, tenant: str) -> None:
        self._index = index = reuse.index
        # Files hold what went through the codec, where there is one, and nothing else.
        owners = [owner for owner in index.owners(tenant) if not owner.exact]
        self._ahead: Iterator[PrefixNode] = chain.from_iterable(map(index.nodes, owners))
        self._target: PrefixNode | None = None
        self._numbers: dict[PrefixNode, int] = {}
        self.ended = False

    def end(self) -> None:
        self._ahead, self._target, self.ended = iter(()), None, True
        self._numbers.clear()

    def advance(self, reuse: PrefixCache) -> ExportedRecord | None:
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
        stored = describe_record(loose, node.tokens, landmark=node.landmark)
        return ArchivedRecord.of(stored, salt=owner.salt, parent=parent, lora=owner.lora), serialise_record(loose)

    def _next_target(self) -> PrefixNode | None:
        for _ in range(SKIPPED_AT_ONCE):
            node = next(self._ahead, None)
            if node is None:
                self.end()
                return None
            if node.record is not None and node not in self._numbers:  # else it is on disk alone
                return node
        return None


def import_prefixes(
    run: RunOnEngineThread, tenant: str, seal: ArchiveSeal, path: Path, adapter: ModelAdapter, going: Callable[[], bool]
) -> int:
    """Keep what an archive holds; returns the tokens that were new.

    Raises ArchiveError before anything is changed, unless it is a state that is none of this model's; and Cancelled
    soon after `going` says no, with what was kept until then.
    """
    opened = Archive.open(path, seal, going)
    form = [run(lambda reuse: reuse.encoding.form(record_form_of(adapter, reuse.rows)))]
    paths: list[tuple[int, ...]] = []
    added = 0
    try:
        for piece, data in zip(opened.pieces, opened.data(), strict=True):
            check_still_wanted(going)
            before = paths[piece.parent] if piece.parent >= 0 else ()
            paths.append((*before, *piece.tokens))
            owner, tokens = CacheOwner(tenant, piece.salt, lora=piece.lora), paths[-1]
            added += run(lambda reuse: _import_record(reuse, owner, tokens, piece, data, form[0]))  # noqa: B023  (run at once)
    finally:
        run(lambda reuse: form.clear())
    return added


def _import_record(
    reuse: PrefixCache,
    owner: CacheOwner,
    tokens: tuple[int, ...],
    piece: ArchivedRecord,
    data: list[bytes],
    form: RecordForm,
) -> int:
    record = fit_record(deserialise_record(piece, data), form)
    return reuse.adopt(owner, tokens, record, landmark=piece.landmark)
