from __future__ import annotations

from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingot.cache.block_listing import Block, Census
from ingot.cache.matches import Needs
from ingot.cache.tree import Owner
from ingot.engine.kv_events_events import Batch, BlockEvent, BlockRemoved, BlockStored, differences
from tests.cache.paper import APPEND, HYBRID, WINDOW, index, store

TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=14)


class Listener:
    """Follows events as a router does: a block is known by where it is, and must go on from one that is known."""

    def __init__(self) -> None:
        self.known: dict[int, str] = {}

    def follow(self, events: list[BlockEvent]) -> None:
        for event in events:
            if isinstance(event, BlockStored):
                for number, (parent, id) in enumerate(pairwise([event.parent_block_hash, *event.block_hashes])):
                    assert parent is None or parent in self.known, "it goes on from what nobody told of"
                    assert id is not None
                    part = event.token_ids[event.block_size * number : event.block_size * (number + 1)]
                    assert len(part) == event.block_size
                    self.known[id] = event.medium
            elif isinstance(event, BlockRemoved):
                for id in event.block_hashes:
                    assert self.known.pop(id) == event.medium


@pytest.mark.parametrize("needs", [APPEND, WINDOW, HYBRID])
@given(course=st.lists(st.tuples(TOKENS, st.integers(0, 900)), max_size=8))
def test_who_follows_the_events_knows_what_is_kept(needs: Needs, course: list[tuple[list[int], int]]) -> None:
    held, census, listener = index(needs), Census(needs, 2), Listener()
    told: dict[int, Block] = {}
    for tokens, most in course:
        store(held, tokens, needs)
        held.shrink(most)
        found = census.take(held)
        listener.follow(differences(told, found))
        told = found
        assert listener.known == {block.id: block.medium for block in told.values()}


def test_blocks_that_follow_one_another_are_one_event() -> None:
    blocks = [Block(1, None, (7, 8), Owner()), Block(2, 1, (9, 9), Owner()), Block(3, None, (5, 5), Owner("a", "salt"))]
    events = differences({}, {block.id: block for block in blocks})
    assert [event.block_hashes for event in events if isinstance(event, BlockStored)] == [[1, 2], [3]]
    assert isinstance(events[0], BlockStored) and events[0].token_ids == [7, 8, 9, 9] and events[0].extra_keys is None
    assert isinstance(events[1], BlockStored) and events[1].extra_keys == [["a", "salt"]]


def test_a_block_that_moves_to_disk_is_removed_here_and_stored_there() -> None:
    here, there = Block(1, None, (7, 8), Owner()), Block(1, None, (7, 8), Owner(), "STORAGE")
    removed, stored = differences({1: here}, {1: there})
    assert isinstance(removed, BlockRemoved) and removed.medium == "GPU"
    assert isinstance(stored, BlockStored) and stored.medium == "STORAGE"


def test_a_batch_is_an_array_of_a_time_maps_with_a_type_and_a_rank() -> None:
    batch = Batch(12.5, differences({}, {1: Block(1, None, (7, 8), Owner())}))
    said = msgspec.msgpack.decode(msgspec.msgpack.encode(batch))
    assert said[0] == 12.5 and said[2] == 0
    assert said[1] == [
        {
            "type": "BlockStored",
            "block_hashes": [1],
            "parent_block_hash": None,
            "token_ids": [7, 8],
            "block_size": 2,
            "medium": "GPU",
        }
    ]
