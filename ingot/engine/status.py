"""What is kept of prompts, as it is told to tenants and to the administrator. Plain values that any thread may hold."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SaltStatus:
    """What is kept under one of a tenant's salts."""

    salt: str
    records: int
    tokens: int
    checkpoints: int
    pinned_tokens: int
    bytes: int


@dataclass(frozen=True, slots=True)
class DiskTotals:
    """What is kept on disk of all tenants' prompts, for this model, and what was written and read so far."""

    records: int
    used_bytes: int
    limit_bytes: int  # of the whole folder,
    folder_bytes: int  # and what all files in it take, also other models'
    spills: int  # records that were written
    spilled_bytes: int
    spill_s: float
    dropped: int  # records that were not, as too much waited to be written
    spill_failures: int
    hits: int  # prompts that took something over from disk
    misses: int  # prompts that found nothing there that memory lacked
    promotions: int  # records that were read back
    promoted_bytes: int
    promotion_s: float
    promotion_failures: int


@dataclass(frozen=True, slots=True)
class DiskStatus:
    """What is kept on disk of one tenant's prompts, for this model."""

    records: int
    used_bytes: int


@dataclass(frozen=True, slots=True)
class CacheTotals:
    """What is kept of all tenants' prompts."""

    tenants: int
    used_bytes: int
    evictions: int
    disk: DiskTotals | None = None


@dataclass(frozen=True, slots=True)
class CacheStatus:
    """What is kept of one tenant's prompts, and what that was good for."""

    limit_bytes: int  # for all tenants
    used_bytes: int
    evictions: int
    totals: CacheTotals  # which are no tenant's business, but the administrator's
    prompts: int = 0  # that could have taken something over,
    hits: int = 0  # and did
    prompt_tokens: int = 0
    matched_tokens: int = 0
    salts: tuple[SaltStatus, ...] = ()
    disk: DiskStatus | None = None
    codec: str = "raw"  # what is kept is put into when memory is short, and on disk
    live_codec: str = "raw"  # what running sequences have behind their newest tokens
