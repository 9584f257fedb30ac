"""A few nodes of the index, for people: the most used, each behind what it goes on from."""

from __future__ import annotations

from ingot.cache.outline import outline
from ingot.cache.tree import Owner
from tests.cache.paper import APPEND, index, store

SYSTEM = [1] * 6


def test_the_most_used_come_first_and_behind_what_they_go_on_from() -> None:
    held = index(APPEND)
    for number in range(2, 7):
        store(held, [*SYSTEM, number, number], APPEND, Owner("me"))
    held.match(Owner("me"), [*SYSTEM, 4, 4, 4], 8)
    found = held.outline("me", most=3)
    assert [(node.begin, node.end, parent) for node, parent, _ in found] == [(0, 6, None), (6, 8, 0), (6, 8, 0)]
    assert found[0][0].uses >= found[1][0].uses >= found[2][0].uses
    assert [left_out for _, _, left_out in found] == [3, 0, 0]


def test_nothing_is_told_of_another_tenant() -> None:
    held = index(APPEND)
    store(held, SYSTEM, APPEND, Owner("you"))
    assert held.outline("me", most=3) == []
    assert outline([], most=3) == []
