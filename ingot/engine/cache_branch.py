"""How what is kept branches, for whoever looks at it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CacheBranch:
    """Tokens [begin, end) of prompts that are kept, which go on from those of the branch at place `parent`."""

    parent: int | None
    salt: str
    begin: int
    end: int
    uses: int  # prompts that they were a part of
    bytes: int  # in memory
    pinned: bool
    on_disk: bool
    more: int  # branches that go on from this one and are not told of
