"""How an engine is, for whoever probes the server. Light to import: a server answers that before it has a model."""

from __future__ import annotations

from dataclasses import dataclass

from ingot.distributed.heartbeat import Standing


@dataclass(frozen=True, slots=True)
class Health:
    alive: bool
    ready: bool
    detail: str
    stepped_ago_s: float
    running: int
    queued: int
    refused: int = 0  # requests that found the queue full, since the start
    ranks: tuple[Standing, ...] = ()  # the processes that run the model, where there are several
