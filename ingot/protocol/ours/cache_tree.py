"""`GET /v1/cache/tree`: how what is kept of earlier prompts branches, and how often each piece was of use."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec
from msgspec import Struct

from ingot.engine.cache_branch import CacheBranch


class BranchBody(Struct):
    """Tokens `begin` to `end` of prompts. `parent` is the place in the list of what they go on from; null: nothing.
    `uses` are prompts that they were a part of, `bytes` what they take in memory."""

    parent: int | None
    salt: str
    begin: int
    end: int
    uses: int
    bytes: int
    pinned: bool
    on_disk: bool
    more: int


class CacheTreeBody(Struct, kw_only=True):
    """The asking key's, of each loaded model. Those that were used most come first, parents before what goes on from
    them; `more` says how many that go on from one are not listed."""

    object: Literal["list"] = "list"
    data: list[BranchBody]

    @classmethod
    def of(cls, trees: Iterable[Sequence[CacheBranch]]) -> CacheTreeBody:
        told: list[BranchBody] = []
        for tree in trees:
            before = len(told)  # of other models, whose places come first
            for branch in tree:
                made = msgspec.convert(branch, BranchBody, from_attributes=True)
                made.parent = None if branch.parent is None else before + branch.parent
                told.append(made)
        return cls(data=told)
