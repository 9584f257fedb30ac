"""The queue of what may go: each node once, the least worth first, whatever is moved about in it."""

from __future__ import annotations

import math
import random
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from ingot.cache.prefix_eviction import EVICTED_HEAD, NEAR_TOKENS, NEWEST_CHECKPOINTS, EvictedPrefixes, EvictionQueue
from ingot.cache.prefix_index import PrefixIndex
from ingot.cache.prefix_tree import CacheOwner, PrefixNode
from tests.cache.paper import APPEND, CHECKPOINT, HYBRID, TOKEN, index, store

TOKENS = st.lists(st.integers(0, 2), max_size=12)
OWNER = ("", "")


@given(before=TOKENS, piece=TOKENS.filter(bool), after=TOKENS)
def test_what_was_evicted_is_known_to_whoever_goes_on_alike(
    before: list[int], piece: list[int], after: list[int]
) -> None:
    evicted = EvictedPrefixes()
    evicted.add(OWNER, before, piece)
    assert evicted.holds(OWNER, [*before, *piece, *after], len(before))
    assert not evicted.holds(OWNER, [*before, *piece[:-1], 9, *after], len(before))
    assert not evicted.holds(("", "other"), [*before, *piece, *after], len(before))


def test_the_head_of_a_long_piece_is_enough() -> None:
    evicted = EvictedPrefixes()
    evicted.add(OWNER, [1], list(range(100)))
    assert evicted.holds(OWNER, [1, *range(EVICTED_HEAD), 7, 7], 1)
    assert not evicted.holds(OWNER, [1, *range(EVICTED_HEAD - 1), 7, 7], 1)


def test_owners_cannot_be_spelled_so_that_they_run_together() -> None:
    evicted = EvictedPrefixes()
    evicted.add(("a", "bc"), [1], [2])
    assert not evicted.holds(("ab", "c"), [1, 2], 1)


def test_the_memory_is_bounded() -> None:
    evicted = EvictedPrefixes(most=3)
    for token in range(10):
        evicted.add(OWNER, [], [token])
    assert len(evicted) == 3
    assert evicted.holds(OWNER, [9], 0) and not evicted.holds(OWNER, [0], 0)


TENANTS = ("a", "b", "c")
CHANGES = st.lists(st.tuples(st.integers(0, 19), st.one_of(st.none(), st.integers(0, 9)), st.booleans()), max_size=60)


def nodes() -> list[PrefixNode]:
    roots = [PrefixNode(None, (), None, owner=CacheOwner(tenant)) for tenant in TENANTS]
    return [PrefixNode(roots[number % 3], (number,), None, 1, turn=number) for number in range(20)]


@given(changes=CHANGES, exceeding=st.sets(st.sampled_from(TENANTS)))
def test_the_first_is_the_least_of_all_whatever_was_moved_or_taken_out(
    changes: list[tuple[int, int | None, bool]], exceeding: set[str]
) -> None:
    queue, known, all_nodes = EvictionQueue(), dict[PrefixNode, int](), nodes()
    for number, worth, pinned in changes:
        node = all_nodes[number]
        if worth is None:
            queue.remove(node)
            known.pop(node, None)
        else:
            node.pinned = pinned
            queue.put(node, worth)
            known[node] = worth
        queue.check()
    assert len(queue) == len(known)
    while known:
        found = queue.first(exceeding)
        assert found is not None
        node = found[1].node
        assert found[0] == min((each.pinned, each.tenant not in exceeding, worth) for each, worth in known.items())
        assert found[1].worth == known.pop(node)
        queue.remove(node)
        queue.check()
    assert queue.first(exceeding) is None


def test_making_room_for_one_weighs_as_few_however_many_there_are() -> None:
    weighed = []
    for count in (100, 3000):
        calls: list[int] = []

        def cost(tokens: int, calls: list[int] = calls) -> float:
            calls.append(tokens)
            return float(tokens)

        held = PrefixIndex(APPEND, cost)
        for number in range(count):
            store(held, [number, *range(5)], APPEND, CacheOwner("me", str(number % 50)))
        calls.clear()
        for _ in range(10):
            held.shrink(held.nbytes - 1)
        weighed.append(len(calls))
        held.check()
    assert weighed[0] == weighed[1] <= 10 * 4


def test_what_was_weighed_before_costs_were_known_is_weighed_anew_before_it_goes() -> None:
    """The first prompt of all is kept before anybody knows what computing it takes."""
    seconds = [0.0]
    held = PrefixIndex(APPEND, lambda tokens: seconds[0] * tokens)
    store(held, [1] * 50, APPEND)
    for _ in range(3):
        held.match(CacheOwner(), [1] * 50, 49)
    seconds[0] = 1.0
    for first in range(2, 5):
        store(held, [first] * 50, APPEND)
    held.shrink(held.nbytes - 1)
    assert held.peek(CacheOwner(), [1] * 50, 49).length == 49
    held.shrink(500)
    assert held.peek(CacheOwner(), [1] * 50, 49).length == 49


def grown(steps: list[int]) -> tuple[PrefixIndex, list[int]]:
    """A conversation that was kept after each of so many more tokens, the first time at a landmark."""
    held, tokens = index(HYBRID), list[int]()
    for number, step in enumerate(steps):
        tokens += [number % 50] * step
        store(held, tokens, HYBRID, landmark=number == 0)
    return held, tokens


def ends(held: PrefixIndex) -> list[int]:
    return sorted(node.end for node in held.nodes() if node.has_checkpoint)


@given(steps=st.lists(st.integers(1, 700), min_size=1, max_size=120))
def test_a_conversation_holds_few_checkpoints_and_loses_no_token(steps: list[int]) -> None:
    held, tokens = grown(steps)
    held.check()
    assert len(ends(held)) <= 3 + NEWEST_CHECKPOINTS + math.log2(max(1, len(tokens) / NEAR_TOKENS)) + 2
    assert held.nbytes == TOKEN * len(tokens) + CHECKPOINT * len(ends(held))
    assert held.match(CacheOwner(), [*tokens, 9], len(tokens)).length == len(tokens)


@given(steps=st.lists(st.integers(20, 300), min_size=40, max_size=120), share=st.floats(0.05, 0.95))
def test_going_back_costs_little_more_than_what_was_changed(steps: list[int], share: float) -> None:
    held, tokens = grown(steps)
    at = int(share * len(tokens))
    kept = max((end for end in ends(held) if end <= at), default=0)
    back = len(tokens) - at
    assert at - kept <= 3 * back + NEAR_TOKENS + max(steps)


def test_no_place_to_go_back_to_is_missing_for_a_while_as_a_conversation_grows() -> None:
    held, tokens = index(HYBRID), list[int]()
    dice = random.Random(8)
    for number in range(200):
        tokens += [number % 50] * dice.choice([40, 40, 40, 300])
        store(held, tokens, HYBRID, landmark=number == 0)
        places = [0, *ends(held), len(tokens)]
        for kept, following in pairwise(places):
            assert following - kept <= 3 * max(NEAR_TOKENS, len(tokens) - following) + 300


def test_the_end_of_the_system_prompt_stays() -> None:
    held, _ = grown([400] + [90] * 100)
    assert 400 in ends(held)


def test_of_places_close_together_the_first_is_enough() -> None:
    held, _ = grown([100, 40, 5, 5, 60, 3])
    assert ends(held) == [100, 140, 210, 213]


def test_a_place_that_two_conversations_share_stays() -> None:
    held, tokens = grown([50] * 20)
    shared = ends(held)[2]
    store(held, [*tokens[:shared], 60, 61], HYBRID)
    for _ in range(40):
        tokens += [7] * 50
        store(held, tokens, HYBRID)
    assert shared in ends(held)


def test_models_that_need_no_checkpoints_are_left_alone() -> None:
    held, tokens = index(APPEND), list[int]()
    for number in range(40):
        tokens += [number] * 30
        store(held, tokens, APPEND)
    assert held.nbytes == TOKEN * len(tokens)
