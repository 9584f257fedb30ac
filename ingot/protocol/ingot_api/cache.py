"""`GET` and `DELETE /v1/cache`, `POST /v1/cache/explain`: what is kept of earlier prompts, and what for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec
from msgspec import UNSET, Struct, UnsetType

from ingot.engine.request import CacheReport
from ingot.engine.status import CacheStatus
from ingot.protocol.chat.answers import GenerationTask, Note
from ingot.protocol.chat.receipts import CacheReceipt

FILE: Final = "application/octet-stream"


class SaltBody(Struct):
    """What is kept under one `cache_salt`."""

    salt: str
    records: int
    tokens: int
    checkpoints: int
    pinned_tokens: int
    bytes: int


class DiskTotalsBody(Struct):
    """What is kept on disk of everybody's prompts, for this model, and what was written and read since the server
    started. `limit_bytes` is the whole folder's, and `folder_bytes` what all files in it take, other models' too;
    `dropped` records were not written, as too many waited for it."""

    records: int
    used_bytes: int
    limit_bytes: int
    folder_bytes: int
    spills: int
    spilled_bytes: int
    spill_s: float
    dropped: int
    spill_failures: int
    hits: int
    misses: int
    promotions: int
    promoted_bytes: int
    promotion_s: float
    promotion_failures: int


class DiskBody(Struct):
    """What is kept on disk of the asking tenant's prompts, for this model."""

    records: int
    used_bytes: int


class CacheTotalsBody(Struct):
    """What is kept of everybody's prompts, and of how many keys'. `disk` is null without `--cache-dir`."""

    tenants: int
    used_bytes: int
    evictions: int
    disk: DiskTotalsBody | None = None


class CacheBody(Struct):
    """`limit_bytes` is the whole server's, the rest is the asking tenant's. `disk` is null without `--cache-dir`. The
    administrator, and everybody where there are no keys, is told the `totals` too. `codec` is `--cache-codec`, and
    `live_codec` is `--kv-codec`."""

    limit_bytes: int
    used_bytes: int
    evictions: int
    prompts: int
    hits: int
    prompt_tokens: int
    matched_tokens: int
    salts: list[SaltBody]
    disk: DiskBody | None = None
    codec: str = "raw"
    live_codec: str = "raw"
    totals: CacheTotalsBody | UnsetType = UNSET

    @classmethod
    def of(cls, status: CacheStatus, *, admin: bool) -> CacheBody:
        made = msgspec.convert(status, cls, from_attributes=True)
        if not admin:
            made.totals = UNSET
        return made


class ClearedBody(Struct):
    freed_bytes: int


class AdoptedBody(Struct):
    """Tokens of prompts that are kept now and were not before."""

    added_tokens: int


class ExplainedBody(Struct):
    """What the request would take over if it came now, and why no more."""

    prompt_tokens: int
    cache: CacheReceipt | UnsetType = UNSET
    ingot: Note | UnsetType = UNSET

    @classmethod
    def of(cls, job: GenerationTask, reports: Sequence[CacheReport]) -> ExplainedBody:
        head = job.head
        assert head is not None
        note = Note(head.ignored) if head.ignored else UNSET
        return cls(sum(map(len, job.request.prompts)), CacheReceipt.of(reports, head.source), note)
