"""Why a match is no longer: one test a reason, and the promises that hold whatever is stored."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingot.cache.prefix_index import SNIPPET_TOKENS, MatchExplanation, PrefixIndex, ResumeNeeds
from ingot.cache.prefix_tree import CacheOwner
from tests.cache.paper import ANYBODY, APPEND, HYBRID, WINDOW, index, store

TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=40)
NEEDS = pytest.mark.parametrize("needs", [APPEND, WINDOW, HYBRID])
LONG = list(range(400, 480))
HEAD, TAIL, OTHER = list(range(100, 140)), list(range(200, 240)), list(range(300, 340))


def explain(held: PrefixIndex, tokens: list[int], owner: CacheOwner = ANYBODY) -> MatchExplanation:
    return held.explain(owner, tokens, len(tokens) - 1)


@NEEDS
def test_nothing_that_begins_like_it_was_kept(needs: ResumeNeeds) -> None:
    held = index(needs)
    store(held, OTHER, needs)
    assert explain(held, HEAD) == MatchExplanation(0, 0, "unseen")


@NEEDS
def test_a_prompt_that_only_goes_on_is_a_new_turn(needs: ResumeNeeds) -> None:
    held = index(needs)
    store(held, HEAD, needs)
    assert explain(held, HEAD + TAIL) == MatchExplanation(40, 40, "new_turn")


@NEEDS
def test_a_prompt_that_goes_on_otherwise_has_diverged_and_is_shown_from_what(needs: ResumeNeeds) -> None:
    held = index(needs)
    store(held, HEAD, needs)
    store(held, HEAD + TAIL, needs)
    assert explain(held, HEAD + OTHER) == MatchExplanation(40, 40, "diverged", tuple(TAIL[:SNIPPET_TOKENS]))


@NEEDS
def test_the_same_prompt_again_is_complete(needs: ResumeNeeds) -> None:
    held = index(needs)
    store(held, [*HEAD, *TAIL], needs)
    store(held, [*HEAD, *TAIL, 1, 2], needs)
    found = explain(held, [*HEAD, *TAIL, 1])
    assert (found.length, found.reason) == (80, "complete")


@NEEDS
def test_what_had_to_go_was_evicted(needs: ResumeNeeds) -> None:
    held = index(needs)
    store(held, HEAD, needs)
    store(held, HEAD + TAIL, needs)
    held.match(CacheOwner(), HEAD, 40)
    held.shrink(500)
    assert explain(held, HEAD + TAIL + OTHER).reason == "evicted"
    held.shrink(0)
    assert explain(held, HEAD + TAIL + OTHER) == MatchExplanation(0, 0, "evicted")
    assert explain(held, OTHER).reason == "unseen"


def test_a_checkpoint_that_had_to_go_was_evicted_too() -> None:
    held = index(HYBRID)
    for tokens in (LONG, LONG + TAIL * 3, LONG + OTHER * 3):  # the longest are worth most a byte
        store(held, tokens, HYBRID)
    held.shrink(held.nbytes - 1)
    found = explain(held, LONG + [7] * 20)
    assert (found.known, found.length, found.reason) == (80, 0, "evicted")


def test_a_hybrid_model_resumes_only_at_checkpoints() -> None:
    held = index(HYBRID)
    store(held, HEAD, HYBRID)
    store(held, HEAD + TAIL * 3, HYBRID)
    found = explain(held, [*HEAD, *TAIL, *TAIL, *OTHER])
    assert (found.known, found.length, found.reason) == (120, 40, "checkpoint")
    assert found.theirs == tuple(TAIL[:SNIPPET_TOKENS])


def test_a_few_tokens_short_of_a_checkpoint_are_no_reason() -> None:
    held = index(HYBRID)
    store(held, HEAD, HYBRID)
    store(held, HEAD + TAIL, HYBRID)
    assert explain(held, [*HEAD, *TAIL[:3], *OTHER]).reason == "diverged"


def test_a_prompt_that_is_cached_and_computed_in_part_is_not_complete() -> None:
    held = index(HYBRID)
    store(held, HEAD, HYBRID)
    store(held, HEAD + TAIL, HYBRID)
    found = explain(held, HEAD + TAIL[:3])
    assert (found.known, found.length, found.reason) == (43, 40, "checkpoint")


@NEEDS
def test_the_same_tokens_under_another_salt_are_named_to_their_tenant_alone(needs: ResumeNeeds) -> None:
    held = index(needs)
    store(held, HEAD + TAIL, needs, CacheOwner("me", "blue"))
    assert explain(held, HEAD + TAIL, CacheOwner("me", "red")) == MatchExplanation(0, 0, "salt")
    assert explain(held, HEAD + TAIL, CacheOwner("you", "red")) == MatchExplanation(0, 0, "unseen")
    assert explain(held, HEAD + TAIL, CacheOwner("you", "blue")) == MatchExplanation(0, 0, "unseen")


@NEEDS
@given(stored=st.lists(st.tuples(st.sampled_from(["a", "b"]), TOKENS), max_size=8), asked=TOKENS)
def test_an_explanation_agrees_with_the_match_and_leaves_no_trace(
    needs: ResumeNeeds, stored: list[tuple[str, list[int]]], asked: list[int]
) -> None:
    held = index(needs)
    for salt, tokens in stored:
        store(held, tokens, needs, CacheOwner("me", salt))
    owner = CacheOwner("me", "a")
    before = [(node.worth, node.resumed) for node in held.nodes()]
    told = explain(held, asked, owner)
    assert [(node.worth, node.resumed) for node in held.nodes()] == before
    found = held.match(owner, asked, len(asked) - 1)
    assert (told.known, told.length) == (found.known, found.length)
    own = [tokens for salt, tokens in stored if salt == "a"]
    if told.theirs:
        assert told.theirs[0] != asked[told.known]
        assert any(tokens[: told.known + 1] == [*asked[: told.known], told.theirs[0]] for tokens in own)


@NEEDS
@given(stored=st.lists(st.tuples(st.sampled_from(["a", "b"]), TOKENS), max_size=8), asked=TOKENS)
def test_nothing_of_one_tenant_is_ever_told_to_another(
    needs: ResumeNeeds, stored: list[tuple[str, list[int]]], asked: list[int]
) -> None:
    both, alone = index(needs), index(needs)
    for tenant, tokens in stored:
        store(both, tokens, needs, CacheOwner(tenant))
        if tenant == "a":
            store(alone, tokens, needs, CacheOwner(tenant))
    both.shrink(both.nbytes)
    assert explain(both, asked, CacheOwner("a")) == explain(alone, asked, CacheOwner("a"))
