"""`GET /health`, `/health/live` and `/health/ready`, and `/version`."""

from __future__ import annotations

from msgspec import UNSET, Struct, UnsetType

from ingot.distributed.heartbeat import RankStatus
from ingot.engine.status import Health


class VersionBody(Struct):
    version: str


class RankBody(Struct):
    """A process of several that run the model."""

    rank: int
    ready: bool
    step: int
    silent_s: float
    late_s: float

    @classmethod
    def of(cls, status: RankStatus) -> RankBody:
        return cls(status.rank, status.ready, status.step, round(status.silent_s, 3), round(status.late_s, 3))


class HealthBody(Struct):
    ok: bool
    detail: str
    stepped_ago_s: float | UnsetType = UNSET
    running: int | UnsetType = UNSET
    queued: int | UnsetType = UNSET
    ranks: list[RankBody] | UnsetType = UNSET

    @classmethod
    def of(cls, health: Health, *, ok: bool, known: bool) -> HealthBody:
        """How much is going on is told only to who is `known`: whoever has a key, where one is needed."""
        if not known:
            return cls(ok, health.detail)
        ranks = [RankBody.of(status) for status in health.ranks]
        return cls(
            ok, health.detail, round(health.stepped_ago_s, 3), health.running, health.queued, ranks if ranks else UNSET
        )
