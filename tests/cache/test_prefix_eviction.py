"""Checkpoints along a growing conversation: few, and where they are of use."""

from __future__ import annotations

import math
import random
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from ingot.cache.prefix_index import PrefixIndex
from ingot.cache.thinning import NEAR, NEWEST
from ingot.cache.tree import Owner
from tests.cache.paper import APPEND, CHECKPOINT, HYBRID, TOKEN, index, store


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
    assert len(ends(held)) <= 3 + NEWEST + math.log2(max(1, len(tokens) / NEAR)) + 2
    assert held.nbytes == TOKEN * len(tokens) + CHECKPOINT * len(ends(held))
    assert held.match(Owner(), [*tokens, 9], len(tokens)).length == len(tokens)


@given(steps=st.lists(st.integers(20, 300), min_size=40, max_size=120), share=st.floats(0.05, 0.95))
def test_going_back_costs_little_more_than_what_was_changed(steps: list[int], share: float) -> None:
    held, tokens = grown(steps)
    at = int(share * len(tokens))
    kept = max((end for end in ends(held) if end <= at), default=0)
    back = len(tokens) - at
    assert at - kept <= 3 * back + NEAR + max(steps)


def test_no_place_to_go_back_to_is_missing_for_a_while_as_a_conversation_grows() -> None:
    held, tokens = index(HYBRID), list[int]()
    dice = random.Random(8)
    for number in range(200):
        tokens += [number % 50] * dice.choice([40, 40, 40, 300])
        store(held, tokens, HYBRID, landmark=number == 0)
        places = [0, *ends(held), len(tokens)]
        for kept, following in pairwise(places):
            assert following - kept <= 3 * max(NEAR, len(tokens) - following) + 300


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
