"""How a model of the server stands, in plain values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ModelState = Literal["unloaded", "loading", "loaded", "unloading", "failed"]


@dataclass(frozen=True, slots=True)
class Standing:
    name: str
    state: ModelState
    kind: str = "chat"
    aliases: tuple[str, ...] = ()
    pinned: bool = False
    since_s: float = 0.0  # how long it has stood so
    claimed: int = 0  # bytes of memory that it has, or is to have
    progress: float | None = None  # of a load: the share that is done
    failure: str | None = None  # why it could not be loaded
    requests: int = 0  # that use it
    waiting: int = 0  # requests that wait for it
    expires_s: float | None = None  # when it is unloaded, unless somebody asks for it; None: it stays
