from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingot.cache.prefix_index import PrefixIndex, ResumeNeeds
from ingot.cache.prefix_tree import CacheOwner, PrefixNode
from ingot.cache.records import Record
from tests.cache.paper import APPEND, BOTH, HYBRID, WINDOW, Paper, index, store

TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=14)
NEEDS = pytest.mark.parametrize("needs", [APPEND, WINDOW, HYBRID])


@NEEDS
@given(stored=st.lists(TOKENS, max_size=8), asked=TOKENS, most=st.one_of(st.none(), st.integers(0, 600)))
def test_a_match_is_a_true_prefix_whose_records_lie_end_to_end(
    needs: ResumeNeeds, stored: list[list[int]], asked: list[int], most: int | None
) -> None:
    held = index(needs)
    for tokens in stored:
        store(held, tokens, needs)
        held.check()
    if most is not None:
        held.shrink(most)
        held.check()
        assert held.nbytes <= most
    found = held.match(CacheOwner(), asked, len(asked) - 1)
    assert found.length <= found.known and found.length <= len(asked) - 1
    assert any(tokens[: found.known] == asked[: found.known] for tokens in [*stored, []])
    at = 0
    for record in found.records:
        assert record.begin == at
        at = record.end
    assert at >= found.length and (found.records == () or found.records[-1].begin < found.length)
    if not needs.anywhere:
        assert at == found.length


@given(stored=st.lists(TOKENS, max_size=8), asked=TOKENS)
def test_append_layers_resume_at_the_longest_common_prefix(stored: list[list[int]], asked: list[int]) -> None:
    held = index(APPEND)
    for tokens in stored:
        store(held, tokens, APPEND)

    def common(tokens: list[int]) -> int:
        return next(
            (i for i, (a, b) in enumerate(zip(tokens, asked, strict=False)) if a != b), min(len(tokens), len(asked))
        )

    best = max((common(tokens) for tokens in stored), default=0)
    assert held.match(CacheOwner(), asked, len(asked) - 1).length == min(best, len(asked) - 1)


@pytest.mark.parametrize("needs", [WINDOW, HYBRID, BOTH])
@given(stored=st.lists(TOKENS, max_size=8))
def test_what_was_stored_can_be_resumed_there_wherever_others_parted_from_it(
    needs: ResumeNeeds, stored: list[list[int]]
) -> None:
    held = index(needs)
    for number, tokens in enumerate(stored, start=1):
        store(held, tokens, needs)
        # Of checkpoints that stand as close together as these only the first stays once another one comes.
        for known in [tokens] if needs.checkpoint else stored[:number]:
            assert held.match(CacheOwner(), [*known, 9], len(known)).length == len(known)


@NEEDS
@given(stored=st.lists(TOKENS, min_size=1, max_size=8))
def test_nothing_is_stored_twice(needs: ResumeNeeds, stored: list[list[int]]) -> None:
    once, twice = index(needs), index(needs)
    for tokens in stored:
        store(once, tokens, needs)
    for tokens in [*stored, *stored]:
        store(twice, tokens, needs)
    if needs.anywhere:
        assert twice.nbytes == once.nbytes
    prefixes = {tuple(tokens[:n]) for tokens in stored for n in range(1, len(tokens) + 1)}
    assert sum(len(node.tokens) for node in twice.nodes()) == len(prefixes)


def test_salts_share_nothing() -> None:
    held = index(APPEND)
    store(held, [1, 2, 3], APPEND, CacheOwner(salt="a"))
    assert held.match(CacheOwner(salt="b"), [1, 2, 3, 4], 3).known == 0
    assert held.match(CacheOwner(salt="a"), [1, 2, 3, 4], 3).length == 3


def test_the_least_recently_used_goes_first_and_pins_stay() -> None:
    held = index(APPEND)
    for first in (1, 2, 3):
        store(held, [first] * 5, APPEND)
    held.pin(CacheOwner(), [1] * 5)
    held.shrink(100)
    held.match(CacheOwner(), [2] * 5, 4)
    store(held, [4] * 5, APPEND)
    held.shrink(100)
    assert held.match(CacheOwner(), [1] * 5, 5).length == 5
    assert held.nbytes == 100


def test_a_node_that_others_build_on_gives_up_its_checkpoint_before_they_lose_their_tokens() -> None:
    held = index(HYBRID)
    store(held, [1] * 4, HYBRID)
    store(held, [1] * 8, HYBRID)
    held.match(CacheOwner(), [1] * 9, 8)
    held.shrink(held.nbytes - 1)
    lengths = {held.match(CacheOwner(), [1] * n + [2], n).length for n in (4, 8)}
    assert lengths in ({0, 8}, {4, 0}, {4})
    held.check()


def test_a_lost_checkpoint_comes_back_when_the_same_tokens_are_computed_again() -> None:
    held = index(HYBRID)
    store(held, [1] * 4, HYBRID)
    store(held, [1, 1, 2], HYBRID)  # splits the first: its upper half has no checkpoint
    assert held.match(CacheOwner(), [1, 1, 3], 2).length == 0
    store(held, [1, 1], HYBRID)
    assert held.match(CacheOwner(), [1, 1, 3], 2).length == 2
    held.check()


def test_a_pin_ends_where_its_tokens_do() -> None:
    held = index(APPEND)
    store(held, [1, 2, 3, 4, 5], APPEND)
    assert held.pin(CacheOwner(), [1, 2, 3, 9]) == 3
    assert held.pinned_bytes() == 30
    held.check()
    held.shrink(30)
    assert held.match(CacheOwner(), [1, 2, 3, 4], 4).length == 3


def test_pins_give_way_when_nothing_else_is_left() -> None:
    held = index(APPEND)
    store(held, [1] * 5, APPEND)
    store(held, [2] * 5, APPEND)
    held.pin(CacheOwner(), [1] * 5)
    held.shrink(60)
    assert held.match(CacheOwner(), [1] * 6, 5).length == 5
    held.shrink(0)
    assert held.nbytes == 0
    held.check()


def test_what_many_prompts_share_outlives_what_one_used_lately() -> None:
    held = index(APPEND)
    store(held, [1] * 5, APPEND)
    for _ in range(8):
        held.match(CacheOwner(), [1] * 6, 5)
    for other in range(2, 6):
        store(held, [other] * 5, APPEND)
        held.shrink(100)
    assert held.match(CacheOwner(), [1] * 6, 5).length == 5


def test_nothing_is_left_of_an_owner_whose_last_piece_went() -> None:
    held = index(APPEND)
    for salt in "abc":
        store(held, [1] * 5, APPEND, CacheOwner("me", salt))
    held.shrink(0)
    assert held.owners("me") == [] and held.tenants == []


def test_clearing_takes_all_of_one_tenants_and_nothing_of_anothers() -> None:
    held = index(APPEND)
    for owner in (CacheOwner("me", "a"), CacheOwner("me", "b"), CacheOwner("you", "a")):
        store(held, [1] * 5, APPEND, owner)
    assert held.clear("me") == 100
    held.check()
    assert (held.nbytes, held.owners("me"), held.owners("you")) == (50, [], [CacheOwner("you", "a")])
    assert held.clear("nobody") == 0


@pytest.mark.parametrize("forget", [lambda held: held.clear("me"), lambda held: held.shrink(0)])
def test_what_is_forgotten_is_gone_at_once_without_the_garbage_collector(
    forget: Callable[[PrefixIndex], object],
) -> None:
    held = index(APPEND)
    store(held, [1] * 5, APPEND, CacheOwner("me"))
    store(held, [1] * 5 + [2] * 5, APPEND, CacheOwner("me"))
    records = [weakref.ref(node.record) for node in held.nodes() if node.record is not None]
    gc.disable()
    try:
        forget(held)
        assert [record() for record in records] == [None, None]
    finally:
        gc.enable()


class PaperCondenser:
    """Halves what is on paper, once."""

    def may(self, node: PrefixNode) -> bool:
        return node.record is not None and not _paper(node).halved

    def least(self, node: PrefixNode) -> int:
        return _paper(node).nbytes // (1 if _paper(node).halved else 2)

    def saves(self, node: PrefixNode) -> int:
        return _paper(node).nbytes - self.least(node)

    def compress_record(self, node: PrefixNode) -> Record:
        return cast(Record, replace(_paper(node), halved=True))

    def seconds(self, node: PrefixNode) -> float:
        return float(len(node.tokens))


def _paper(node: PrefixNode) -> Paper:
    return cast(Paper, node.record)


@pytest.mark.parametrize("most", [0, 40, 120])
def test_what_was_made_smaller_and_became_a_leaf_goes_once(most: int) -> None:
    """An inner node that may be condensed waits in the queue already when what goes on from it leaves."""
    held = PrefixIndex(APPEND, float, compressor=PaperCondenser())
    for turns in range(1, 5):
        store(held, [1] * 5 * turns, APPEND)
    store(held, [2] * 5, APPEND)
    for times, tokens in ((8, [1] * 11), (12, [2] * 5)):
        for _ in range(times):
            held.match(CacheOwner(), tokens, 10)
    held.shrink(most)
    held.check()
    assert held.nbytes <= most
