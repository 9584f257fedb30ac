"""`GET /health`, `/health/live` and `/health/ready`, and `/version`."""

from __future__ import annotations

from msgspec import UNSET, Struct, UnsetType

from ingot.engine.request import Health


class VersionBody(Struct):
    version: str


class HealthBody(Struct):
    ok: bool
    detail: str
    stepped_ago_s: float | UnsetType = UNSET
    running: int | UnsetType = UNSET
    queued: int | UnsetType = UNSET

    @classmethod
    def of(cls, health: Health, *, ok: bool, known: bool) -> HealthBody:
        """How much is going on is told only to who is `known`: whoever has a key, where one is needed."""
        if not known:
            return cls(ok, health.detail)
        return cls(ok, health.detail, round(health.stepped_ago_s, 3), health.running, health.queued)
