"""The kept prefixes as other threads may ask about them. What needs the engine thread runs there between two steps, and
is short however much is kept.

A caller names the tenant it speaks for, and is told about that one alone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Final

from ingot.cache.archive import ArchiveSeal
from ingot.cache.codecs.names import RAW
from ingot.cache.codecs.pair import PairCodec
from ingot.cache.disk.disk import Disk
from ingot.cache.disk.header import tenant_digest
from ingot.cache.tree import Node, Owner, Tally
from ingot.engine.cache_branch import CacheBranch
from ingot.engine.prefix_cache import OnThread, Reuse
from ingot.engine.prefix_files import adopt, export
from ingot.engine.request import CacheReport, Request
from ingot.engine.sight import Sight
from ingot.engine.status import CacheStatus, CacheTotals, DiskStatus, DiskTotals, SaltStatus
from ingot.errors import Unavailable, Unsupported
from ingot.models.adapter import Adapter
from ingot.models.states_key import states_key

log = logging.getLogger("ingot.cache")

SHOWN: Final = 64  # branches, of however many there are
Going = Callable[[], bool]
"""Whether somebody still waits for the work."""


def always() -> bool:
    return True


class KeptPrefixes:
    def __init__(
        self, run: OnThread, adapter: Adapter, folder: Path | None, disk: Disk | None, codec: PairCodec
    ) -> None:
        """`folder` has the model's files; without any, what is kept cannot be moved."""
        self._run, self._adapter, self._folder, self._disk, self._codec = run, adapter, folder, disk, codec

    def status(self, tenant: str) -> CacheStatus:
        known, tallies = self._run(lambda reuse: (_status(reuse, tenant), reuse.index.tallies(tenant)))
        known = replace(known, salts=_salts(tallies))  # here: there may be many, and the engine has more to do
        live = RAW if self._adapter.live is None else str(self._adapter.live.name)
        known = replace(known, codec=str(self._codec.name), live_codec=live)
        if self._disk is None:
            return known
        totals = replace(known.totals, disk=_disk_totals(self._disk))
        return replace(known, totals=totals, disk=DiskStatus(*self._disk.store.held(tenant_digest(tenant))))

    def tree(self, tenant: str) -> tuple[CacheBranch, ...]:
        """How what is kept of a tenant's branches, or the part of it that was used most."""
        return self._run(lambda reuse: tuple(_branch(*found) for found in reuse.index.outline(tenant, SHOWN)))

    def explain(self, request: Request, number: int) -> CacheReport:
        """What one of the request's prompts would take over if it came now. Leaves no trace."""
        prompt, items = request.prompts[number], request.media[number] if request.media else ()
        keys = Sight(items).keyed(prompt) if items else prompt
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

    def export(self, tenant: str, path: Path, secret: bytes, going: Going = always) -> int:
        """Write all that is kept for a tenant to a file, sealed with `secret`; returns the number of tokens. Raises
        Cancelled soon after `going` says no."""
        return export(self._run, tenant, self._seal(secret), path, going)

    def adopt(self, tenant: str, path: Path, secret: bytes, going: Going = always) -> int:
        """Keep for a tenant what is in a file that was sealed with `secret`; returns the tokens that were new. Raises
        ArchiveError; and Cancelled soon after `going` says no."""
        return adopt(self._run, tenant, self._seal(secret), path, self._adapter, going)

    def _seal(self, secret: bytes) -> ArchiveSeal:
        """Names everything that kept states depend on."""
        if self._folder is None:
            raise Unsupported("What is kept cannot be moved: this model has no files to know it by.")
        if not self._adapter.is_whole:
            raise Unsupported(
                "What is kept cannot be moved: several processes run this model, and each has a part of it."
            )
        return ArchiveSeal(states_key(self._adapter, self._folder, self._codec), secret)


def _disk_totals(disk: Disk) -> DiskTotals:
    records, used = disk.store.total()
    return DiskTotals(records, used, disk.store.limits.most, disk.store.folder_bytes(), **asdict(disk.counts))


def _status(reuse: Reuse, tenant: str) -> CacheStatus:
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


def _salts(tallies: Iterable[tuple[Owner, Tally]]) -> tuple[SaltStatus, ...]:
    """What is kept under each salt, exact or not, through whichever adapter."""
    salts: dict[str, Tally] = {}
    for owner, tally in tallies:
        salts[owner.salt] = salts[owner.salt].plus(tally) if owner.salt in salts else tally
    return tuple(
        SaltStatus(salt, tally.records, tally.tokens, tally.checkpoints, tally.pinned_tokens, tally.bytes)
        for salt, tally in salts.items()
    )


def _branch(node: Node, parent: int | None, more: int) -> CacheBranch:
    return CacheBranch(
        parent=parent,
        salt=node.root_owner.salt,
        begin=node.begin,
        end=node.end,
        uses=node.uses,
        bytes=0 if node.record is None else node.record.nbytes,
        pinned=node.pinned,
        on_disk=node.is_filed,
        more=more,
    )
