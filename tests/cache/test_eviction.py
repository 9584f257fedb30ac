"""The queue of what may go: each node once, the least worth first, whatever is moved about in it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ingot.cache.prefix_eviction import EvictionQueue
from ingot.cache.prefix_index import PrefixIndex
from ingot.cache.tree import Node, Owner
from tests.cache.paper import APPEND, store

TENANTS = ("a", "b", "c")
CHANGES = st.lists(st.tuples(st.integers(0, 19), st.one_of(st.none(), st.integers(0, 9)), st.booleans()), max_size=60)


def nodes() -> list[Node]:
    roots = [Node(None, (), None, owner=Owner(tenant)) for tenant in TENANTS]
    return [Node(roots[number % 3], (number,), None, 1, turn=number) for number in range(20)]


@given(changes=CHANGES, exceeding=st.sets(st.sampled_from(TENANTS)))
def test_the_first_is_the_least_of_all_whatever_was_moved_or_taken_out(
    changes: list[tuple[int, int | None, bool]], exceeding: set[str]
) -> None:
    queue, known, all_nodes = EvictionQueue(), dict[Node, int](), nodes()
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
            store(held, [number, *range(5)], APPEND, Owner("me", str(number % 50)))
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
        held.match(Owner(), [1] * 50, 49)
    seconds[0] = 1.0
    for first in range(2, 5):
        store(held, [first] * 50, APPEND)
    held.shrink(held.nbytes - 1)
    assert held.peek(Owner(), [1] * 50, 49).length == 49
    held.shrink(500)
    assert held.peek(Owner(), [1] * 50, 49).length == 49
