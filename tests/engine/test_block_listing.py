from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingot.cache.prefix_index import PrefixIndex, ResumeNeeds
from ingot.cache.prefix_tree import CacheOwner
from ingot.engine.kv_events import TOKEN_LIMIT, BlockListing, PrefixBlock
from tests.cache.paper import APPEND, BOTH, HYBRID, WINDOW, index, store

SIZE = 3
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=14)
NEEDS = pytest.mark.parametrize("needs", [APPEND, WINDOW, HYBRID, BOTH])


def counted(held: PrefixIndex, needs: ResumeNeeds) -> dict[int, PrefixBlock]:
    return BlockListing(needs, SIZE).take(held)


def prefixes(blocks: dict[int, PrefixBlock]) -> set[tuple[int, ...]]:
    """All tokens up to the end of each block."""

    def whole(block: PrefixBlock) -> tuple[int, ...]:
        return (*(() if block.parent is None else whole(blocks[block.parent])), *block.tokens)

    return {whole(block) for block in blocks.values()}


@NEEDS
@given(stored=st.lists(TOKENS, max_size=8), most=st.integers(0, 900))
def test_a_block_counts_where_some_prompt_that_begins_so_would_be_resumed_behind_it(
    needs: ResumeNeeds, stored: list[list[int]], most: int
) -> None:
    held = index(needs)
    for tokens in stored:
        store(held, tokens, needs)
    held.shrink(most)
    expected = set()
    for tokens in stored:
        length = held.peek(CacheOwner(), tokens, len(tokens)).length
        expected |= {tuple(tokens[:end]) for end in range(SIZE, length + 1, SIZE)}
    assert prefixes(counted(held, needs)) == expected


@NEEDS
@given(stored=st.lists(st.tuples(TOKENS, st.integers(0, 900)), max_size=8))
def test_what_is_remembered_from_one_count_to_the_next_changes_nothing(
    needs: ResumeNeeds, stored: list[tuple[list[int], int]]
) -> None:
    held, census = index(needs), BlockListing(needs, SIZE)
    for tokens, most in stored:
        store(held, tokens, needs)
        assert census.take(held) == counted(held, needs)
        held.shrink(most)
        assert census.take(held) == counted(held, needs)


def test_every_change_of_what_counts_is_seen_in_the_number_of_changes() -> None:
    held = index(APPEND)
    before = held.changes
    store(held, [1, 2, 3, 4], APPEND)
    stored = held.changes
    held.shrink(0)
    shrunk = held.changes
    store(held, [1, 2, 3, 4], APPEND)
    again = held.changes
    held.clear("")
    assert before < stored < shrunk < again < held.changes
    held.match(CacheOwner(), [1, 2], 1)
    assert held.changes == held.changes


def test_owners_have_blocks_of_their_own() -> None:
    held = index(APPEND)
    for owner in (CacheOwner(), CacheOwner("alice"), CacheOwner("alice", "salt")):
        store(held, [1, 2, 3], APPEND, owner)
    assert {block.owner for block in counted(held, APPEND).values()} == {
        CacheOwner(),
        CacheOwner("alice"),
        CacheOwner("alice", "salt"),
    }


@pytest.mark.parametrize("other", [-5, TOKEN_LIMIT, TOKEN_LIMIT + 7])
def test_what_is_no_token_ends_a_path(other: int) -> None:
    held = index(APPEND)
    store(held, [1, 2, 3, 4, other, 6, 7, 8, 9, 1, 2, 3], APPEND)
    store(held, [1, 2, 3, 4, other, 6, 1, 1, 1], APPEND)
    assert prefixes(counted(held, APPEND)) == {(1, 2, 3)}
