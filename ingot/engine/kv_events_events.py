"""Which blocks came and went, as vLLM tells routers: arrays [time, events, rank], each event a map with its type.

Who subscribes to them knows what a server could take over. Pure: what is told follows from two counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from typing import Final

import msgspec

from ingot.cache.block_listing import Block, Medium

MOST_BLOCKS: Final = 512
"""In one event."""


class BlockStored(msgspec.Struct, tag=True, tag_field="type", omit_defaults=True):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    medium: Medium
    lora_name: str | None = None
    extra_keys: list[list[str] | None] | None = None


class BlockRemoved(msgspec.Struct, tag=True, tag_field="type"):
    block_hashes: list[int]
    medium: Medium


class AllBlocksCleared(msgspec.Struct, tag=True, tag_field="type"):
    pass


BlockEvent = BlockStored | BlockRemoved | AllBlocksCleared


class Batch(msgspec.Struct, array_like=True):
    ts: float
    events: list[BlockEvent]
    data_parallel_rank: int = 0


def differences(before: Mapping[int, Block], after: Mapping[int, Block]) -> list[BlockEvent]:
    """What makes the one of the other. What is gone comes first: whoever follows never counts too much for long."""
    gone = [block for block in before.values() if after.get(block.id) != block]
    come = [block for block in after.values() if before.get(block.id) != block]
    return [*_removed(gone), *_stored(come)]


def _removed(blocks: list[Block]) -> Iterator[BlockRemoved]:
    """Those that go on from others before those that they go on from."""
    for medium, group in groupby(reversed(blocks), key=lambda block: block.medium):
        ids = [block.id for block in group]
        for begin in range(0, len(ids), MOST_BLOCKS):
            yield BlockRemoved(ids[begin : begin + MOST_BLOCKS], medium)


def _stored(blocks: Iterable[Block]) -> Iterator[BlockStored]:
    """One event for blocks that follow one another."""
    run: list[Block] = []
    for block in blocks:
        if run and (block.parent != run[-1].id or block.medium != run[-1].medium or len(run) == MOST_BLOCKS):
            yield _event(run)
            run = []
        run.append(block)
    if run:
        yield _event(run)


def _event(run: list[Block]) -> BlockStored:
    words = [word for word in run[0].owner.words if word]
    return BlockStored(
        [block.id for block in run],
        run[0].parent,
        [token for block in run for token in block.tokens],
        len(run[0].tokens),
        medium=run[0].medium,
        extra_keys=[words] * len(run) if words else None,
    )
