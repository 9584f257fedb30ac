"""The prefix cache for other threads: status, explanations, clearing, export to a file and import from one.

What needs the engine thread runs there between two steps, and is short however much is cached. A caller names a tenant
and learns of that one alone. Archives are written and read a record at a time, so that no step waits longer than for
one of them: arrays belong to the engine thread alone, files to the caller.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import asdict, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Final

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

log = logging.getLogger("ingot.cache")

SHOWN_BRANCHES: Final = 64
StillWanted = Callable[[], bool]
"""Whether the caller still waits for the work."""


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
        """`folder` has the model's files; without any, there is no export or import."""
        self._run, self._adapter, self._folder, self._disk, self._codec = run, adapter, folder, disk, codec

    def status(self, tenant: str) -> CacheStatus:
        status, tallies = self._run(lambda cache: (_tenant_status(cache, tenant), cache.index.tallies(tenant)))
        live = RAW if self._adapter.live is None else str(self._adapter.live.name)
        # Salts are summed up here, not on the engine thread: there may be many.
        status = replace(status, salts=_salt_statuses(tallies), codec=str(self._codec.name), live_codec=live)
        if self._disk is None:
            return status
        totals = replace(status.totals, disk=_disk_totals(self._disk))
        return replace(status, totals=totals, disk=DiskStatus(*self._disk.store.held(tenant_digest(tenant))))

    def tree(self, tenant: str) -> tuple[CacheBranch, ...]:
        """A tenant's cached prefixes as a tree, or the part of it that was used most."""
        return self._run(
            lambda cache: tuple(_cache_branch(*found) for found in cache.index.outline(tenant, SHOWN_BRANCHES))
        )

    def explain(self, request: Request, number: int) -> CacheReport:
        """What one of the request's prompts would reuse if it came now. Changes nothing."""
        prompt, items = request.prompts[number], request.media[number] if request.media else ()
        keys = PromptMedia(items).keyed(prompt) if items else prompt
        return self._run(lambda cache: cache.explain(request, keys))

    def clear(self, tenant: str) -> int:
        """Drop all of a tenant's cached prefixes, pinned or not; returns the bytes freed in memory and on disk. Raises
        Unavailable where files cannot be removed."""
        freed = self._run(lambda cache: cache.forget(tenant))
        if self._disk is None:
            return freed
        try:
            return freed + self._disk.forget(tenant_digest(tenant))
        except OSError as error:
            log.error("records in %s cannot be removed: %s", self._disk.store.folder, error)
            raise Unavailable("The cache on disk cannot be removed; the server's log says why.") from error

    def export(self, tenant: str, path: Path, secret: bytes, still_wanted: StillWanted = is_always_wanted) -> int:
        """Write a tenant's cached prefixes to a file, sealed with `secret`; returns the number of tokens. Raises
        Cancelled soon after `still_wanted` is false."""
        return export_prefixes(self._run, tenant, self._seal(secret), path, still_wanted)

    def adopt(self, tenant: str, path: Path, secret: bytes, still_wanted: StillWanted = is_always_wanted) -> int:
        """Cache for a tenant what is in a file that was sealed with `secret`; returns the tokens that were new.

        Raises ArchiveError before anything is changed, unless a record does not fit this model; and Cancelled soon
        after `still_wanted` is false, with what was imported until then.
        """
        archive_file = Archive.open(path, self._seal(secret), still_wanted)
        form = [self._run(lambda cache: cache.encoding.form(record_form_of(self._adapter, cache.rows)))]
        paths: list[tuple[int, ...]] = []
        added = 0
        try:
            for record, data in zip(archive_file.pieces, archive_file.data(), strict=True):
                check_still_wanted(still_wanted)
                before = paths[record.parent] if record.parent >= 0 else ()
                paths.append((*before, *record.tokens))
                owner = CacheOwner(tenant, record.salt, lora=record.lora)
                added += self._run(partial(_import_record, owner, paths[-1], record, data, form))
        finally:
            self._run(lambda cache: form.clear())  # its arrays are the engine thread's
        return added

    def _seal(self, secret: bytes) -> ArchiveSeal:
        """By everything that cached KV depends on."""
        if self._folder is None:
            raise Unsupported("The cache cannot be exported or imported: this model has no files to identify it by.")
        if not self._adapter.is_whole:
            raise Unsupported(
                "The cache cannot be exported or imported: several ranks run this model, and each has a part of it."
            )
        return ArchiveSeal(kv_key(self._adapter, self._folder, self._codec), secret)


def _disk_totals(disk: DiskBackend) -> DiskTotals:
    records, used = disk.store.total()
    return DiskTotals(records, used, disk.store.limits.most, disk.store.folder_bytes(), **asdict(disk.counts))


def _tenant_status(cache: PrefixCache, tenant: str) -> CacheStatus:
    index, counts = cache.index, cache.counts[tenant]
    return CacheStatus(
        limit_bytes=cache.limit,
        used_bytes=index.shares.held[tenant],
        evictions=index.shares.evictions[tenant],
        totals=CacheTotals(len(index.shares.held), index.nbytes, index.shares.evictions.total()),
        prompts=counts.prompts,
        hits=counts.hits,
        prompt_tokens=counts.prompt_tokens,
        matched_tokens=counts.matched_tokens,
    )


def _salt_statuses(tallies: Iterable[tuple[CacheOwner, MemoryTally]]) -> tuple[SaltStatus, ...]:
    """What is cached under each salt, exact or not, with any adapter."""
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
"""Nodes without a record in memory that are passed over in one call."""
ExportedRecord = tuple[ArchivedRecord, list[bytes]]


def export_prefixes(
    run: RunOnEngineThread, tenant: str, seal: ArchiveSeal, path: Path, still_wanted: Callable[[], bool]
) -> int:
    """Write a tenant's cached prefixes, each record as it is at its turn; returns the number of tokens. Raises
    Cancelled once `still_wanted` is false."""
    with closing(_exported_records(run, tenant, still_wanted)) as records:
        written = archive.write_archive(path, seal, records, still_wanted)
    return sum(len(record.tokens) for record in written)


def _exported_records(
    run: RunOnEngineThread, tenant: str, still_wanted: Callable[[], bool]
) -> Generator[ExportedRecord, None, None]:
    walk = run(lambda cache: _ExportWalk(cache, tenant))
    try:
        while not walk.ended:
            check_still_wanted(still_wanted)
            record = run(walk.advance)
            if record is not None:
                yield record
    finally:
        run(lambda cache: walk.end())


class _ExportWalk:
    """Walks a tenant's records in memory, one at a time, while the index changes: what is evicted before its turn is
    left out, and what is added may be. Holds no record. For the engine thread alone, but for `ended`."""

    def __init__(self, cache: PrefixCache, tenant: str) -> None:
        self._index = index = cache.index
        # Files hold only records that went through the codec, where there is one.
        owners = [owner for owner in index.owners(tenant) if not owner.exact]
        self._ahead: Iterator[PrefixNode] = chain.from_iterable(map(index.nodes, owners))
        self._target: PrefixNode | None = None
        self._numbers: dict[PrefixNode, int] = {}
        self.ended = False

    def end(self) -> None:
        self._ahead, self._target, self.ended = iter(()), None, True
        self._numbers.clear()

    def advance(self, cache: PrefixCache) -> ExportedRecord | None:
        """The next record, after its parent; None where the next few nodes have none, or at the end. Raises Unavailable
        where the cache was lost meanwhile."""
        if cache.index is not self._index:
            raise Unavailable("The cache was lost while it was exported.")
        if self._target is None or self._target.record is None:
            self._target = self._next_target()
        if self._target is None:
            return None
        # A node that was split since has a new parent, which comes first.
        node = next(each for each in self._target.path if each not in self._numbers)
        if node is self._target:
            self._target = None
        assert node.record is not None and node.parent is not None
        owner, parent = node.root_owner, self._numbers.get(node.parent, -1)
        self._numbers[node] = len(self._numbers)
        unpaged = cache.encoding.loose(node.record)
        stored = describe_record(unpaged, node.tokens, landmark=node.landmark)
        return ArchivedRecord.of(stored, salt=owner.salt, parent=parent, lora=owner.lora), serialise_record(unpaged)

    def _next_target(self) -> PrefixNode | None:
        for _ in range(SKIPPED_AT_ONCE):
            node = next(self._ahead, None)
            if node is None:
                self.end()
                return None
            if node.record is not None and node not in self._numbers:  # else it is on disk alone
                return node
        return None


def _import_record(
    owner: CacheOwner,
    tokens: tuple[int, ...],
    record: ArchivedRecord,
    data: list[bytes],
    form: list[RecordForm],
    cache: PrefixCache,
) -> int:
    unpaged = fit_record(deserialise_record(record, data), form[0])
    return cache.adopt(owner, tokens, unpaged, landmark=record.landmark)
