"""`GET /health/live` and `/health/ready`."""

from __future__ import annotations

from msgspec import Struct

from ingot.engine.request import Health


class HealthBody(Struct):
    ok: bool
    detail: str
    stepped_ago_s: float
    running: int
    queued: int

    @classmethod
    def of(cls, health: Health, *, ok: bool) -> HealthBody:
        return cls(ok, health.detail, round(health.stepped_ago_s, 3), health.running, health.queued)
