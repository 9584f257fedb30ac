"""What the engine says about itself: its health, the state of each model of the fleet, and what the prefix cache
holds.

Plain, frozen values that any thread may hold. Light to import: a server answers health checks before it has a
model. What a tenant sees of the prefix cache is its own; `CacheTotals` are for the administrator.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ingot.distributed.heartbeat import RankStatus


@dataclass(frozen=True, slots=True)
class Health:
    alive: bool
    ready: bool
    detail: str
    stepped_ago_s: float
    running: int
    queued: int
    refused: int = 0  # requests that found the queue full, since the start
    ranks: tuple[RankStatus, ...] = ()  # the processes that run the model, where there are several


ModelState = Literal["unloaded", "loading", "loaded", "unloading", "failed"]


@dataclass(frozen=True, slots=True)
class StatedFacts:
    """What the files of a chat model say of it before it is loaded."""

    context: int
    media: tuple[str, ...] = ()  # kinds that it is shown
    tool_format: str | None = None
    thinking_format: str | None = None


@dataclass(frozen=True, slots=True)
class ModelStatus:
    name: str
    state: ModelState
    kind: str = "chat"
    aliases: tuple[str, ...] = ()
    pinned: bool = False
    claimed: int = 0  # bytes of memory that it has, or is to have
    progress: float | None = None  # of a load: the share that is done
    failure: str | None = None  # why it could not be loaded
    requests: int = 0  # that use it
    waiting: int = 0  # requests that wait for it
    expires_s: float | None = None  # when it is unloaded, unless somebody asks for it; None: it stays
    resident: bool = False  # loaded before the server is ready, and never unloaded
    stated: StatedFacts | None = None  # of a chat model that is not loaded, where its files are here


@dataclass(frozen=True, slots=True)
class SaltStatus:
    """What is cached under one of a tenant's salts."""

    salt: str
    records: int
    tokens: int
    checkpoints: int
    pinned_tokens: int
    bytes: int


@dataclass(frozen=True, slots=True)
class DiskTotals:
    """What is cached on disk of all tenants' prompts, for this model, and what was written and read so far."""

    records: int
    used_bytes: int
    limit_bytes: int  # of the whole folder,
    folder_bytes: int  # and what all files in it take, also other models'
    spills: int  # records that were written
    spilled_bytes: int
    spill_s: float
    dropped: int  # records that were not, as too much waited to be written
    spill_failures: int
    hits: int  # prompts that reused something from disk
    misses: int  # prompts that found nothing there that memory lacked
    promotions: int  # records that were read back
    promoted_bytes: int
    promotion_s: float
    promotion_failures: int


@dataclass(frozen=True, slots=True)
class DiskStatus:
    """What is cached on disk of one tenant's prompts, for this model."""

    records: int
    used_bytes: int


@dataclass(frozen=True, slots=True)
class CacheTotals:
    """What is cached of all tenants' prompts."""

    tenants: int
    used_bytes: int
    evictions: int
    disk: DiskTotals | None = None


@dataclass(frozen=True, slots=True)
class CacheStatus:
    """What is cached of one tenant's prompts, and how much of it was reused."""

    limit_bytes: int  # for all tenants
    used_bytes: int
    evictions: int
    totals: CacheTotals  # for the administrator alone
    prompts: int = 0  # that could have reused something,
    hits: int = 0  # and did
    prompt_tokens: int = 0
    matched_tokens: int = 0
    salts: tuple[SaltStatus, ...] = ()
    disk: DiskStatus | None = None
    codec: str = "raw"  # of cached records when memory is short, and on disk
    live_codec: str = "raw"  # of running sequences, behind their newest tokens


@dataclass(frozen=True, slots=True)
class CacheBranch:
    """Tokens [begin, end) of cached prompts, which go on from those of the branch at index `parent`."""

    parent: int | None
    salt: str
    begin: int
    end: int
    uses: int  # prompts that they were a part of
    bytes: int  # in memory
    pinned: bool
    on_disk: bool
    more: int  # branches that go on from this one and are left out
