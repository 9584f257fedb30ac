from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingot.protocol.schema.misspelling import distance, misspelt

NAMES = ("model", "messages", "temperature", "top_p", "top_k", "max_tokens", "n", "seed", "repetition_penalty")
WORDS = st.text("abc", max_size=6)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("temprature", "temperature"),
        ("temperatrue", "temperature"),
        ("tempreture", "temperature"),
        ("Temperature", "temperature"),
        ("max_token", "max_tokens"),
        ("mesages", "messages"),
        ("tpo_p", "top_p"),
        ("repetition_penality", "repetition_penalty"),
    ],
)
def test_a_slip_or_two_are_recognised(name: str, meant: str) -> None:
    assert misspelt(name, NAMES) == meant


@pytest.mark.parametrize("name", ["max_new_tokens", "repeat_penalty", "sed", "k", "tokens", "max_tokens_total", ""])
def test_names_that_are_merely_alike_are_not(name: str) -> None:
    assert misspelt(name, NAMES) is None


@given(WORDS, WORDS)
def test_the_distance_is_the_same_both_ways_and_none_only_between_equals(one: str, other: str) -> None:
    assert distance(one, other, most=9) == distance(other, one, most=9)
    assert (distance(one, other, most=9) == 0) == (one == other)


@given(WORDS, WORDS, WORDS)
def test_the_distance_counts_every_slip(one: str, between: str, other: str) -> None:
    assert distance(one + between, one + "d" + between, most=9) == 1
    assert distance(f"{one}de{other}", f"{one}ed{other}", most=9) == 1
    assert distance(f"{one}d{other}", f"{one}e{other}", most=9) == 1
    assert distance(one + "ddd", one, most=2) is None
