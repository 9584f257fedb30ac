"""Nobody's kept prompts are evicted by another's beyond that one's share."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingot.cache.prefix_index import PrefixIndex, ResumeNeeds
from ingot.cache.prefix_tree import CacheOwner
from ingot.shares import IDLE_S
from tests.cache.paper import APPEND, HYBRID, TOKEN, store

MOST = 100 * TOKEN


class Clock:
    def __init__(self) -> None:
        self.now = 1e6

    def __call__(self) -> float:
        return self.now


def index(needs: ResumeNeeds, clock: Clock) -> PrefixIndex:
    return PrefixIndex(needs, lambda tokens: float(tokens), clock)


def fill(held: PrefixIndex, tenant: str, prompts: int, first: int = 0, needs: ResumeNeeds = APPEND) -> None:
    """Prompts of ten tokens that share nothing."""
    for number in range(first, first + prompts):
        store(held, [number] * 10, needs, CacheOwner(tenant))
        held.shrink(MOST)
        held.check()


def test_one_who_is_alone_has_all_the_room() -> None:
    held = index(APPEND, Clock())
    fill(held, "ann", 30)
    assert held.shares.held == {"ann": MOST}


def test_what_was_lent_is_taken_back_up_to_the_share_and_no_further() -> None:
    held = index(APPEND, Clock())
    fill(held, "ann", 30)
    fill(held, "bob", 3)
    assert held.shares.held == {"ann": 70 * TOKEN, "bob": 30 * TOKEN}
    fill(held, "bob", 30, first=100)
    assert held.shares.held == {"ann": 50 * TOKEN, "bob": 50 * TOKEN}
    fill(held, "ann", 30, first=100)
    assert held.shares.held == {"ann": 50 * TOKEN, "bob": 50 * TOKEN}
    assert set(held.shares.evictions) == {"ann", "bob"}


def test_a_little_of_one_outlasts_much_of_another() -> None:
    held = index(APPEND, Clock())
    fill(held, "bob", 2)
    fill(held, "ann", 500, first=100)
    assert held.match(CacheOwner("bob"), [1] * 11, 10).length == 10
    assert held.shares.evictions["bob"] == 0


def test_the_share_of_one_who_has_not_come_for_long_is_lent_as_a_whole() -> None:
    clock = Clock()
    held = index(APPEND, clock)
    fill(held, "bob", 5)
    clock.now += IDLE_S + 1
    fill(held, "ann", 500)
    assert held.shares.held == {"ann": MOST}


def test_pins_go_last_whoever_holds_them() -> None:
    held = index(APPEND, Clock())
    fill(held, "ann", 8)
    for number in range(8):
        held.pin(CacheOwner("ann"), [number] * 10)
    fill(held, "bob", 10)
    assert held.shares.held == {"ann": 80 * TOKEN, "bob": 20 * TOKEN}


@pytest.mark.parametrize("needs", [APPEND, HYBRID])
@given(
    stored=st.lists(
        st.tuples(st.sampled_from("abc"), st.lists(st.integers(0, 2), min_size=1, max_size=12)), max_size=30
    ),
    most=st.integers(0, 1500),
)
def test_whoever_holds_no_more_than_the_share_loses_nothing(
    needs: ResumeNeeds, stored: list[tuple[str, list[int]]], most: int
) -> None:
    held = index(needs, Clock())
    for tenant, tokens in stored:
        store(held, tokens, needs, CacheOwner(tenant))
    before = dict(held.shares.held)
    held.shrink(most)
    held.check()
    assert held.nbytes <= most
    for tenant, nbytes in before.items():
        if nbytes <= most / len(before):
            assert held.shares.held[tenant] == nbytes
