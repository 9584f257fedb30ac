"""Guesses from what was written before."""

from __future__ import annotations

import random
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

import ingot.engine  # noqa: F401  (binds the fast BLAS before mlx)
from ingot.cache.prefix_tree import CacheOwner
from ingot.engine.request import Request, Sampling
from ingot.engine.sequence import TokenSequence
from ingot.engine.speculation import lookup
from ingot.engine.speculation import lookup as past_answers
from ingot.engine.speculation.lookup import (
    END_OF_ANSWER,
    INDEXED_A_STEP,
    LEADING_TOKENS,
    LONGEST_MATCH,
    MOST_LOOKUP_TOKENS,
    SHORTEST_MATCH,
    SLOT_BYTES,
    LookupProposer,
    PastAnswers,
    SuffixIndex,
    SuffixMatch,
)
from ingot.engine.speculation.proposer import DraftOffer

NUMBERS = count()
CHANCE = random.Random(11)
TEXT = [CHANCE.randrange(1000, 9000) for _ in range(400)]


def sequence(prompt: list[int], tenant: str = "", salt: str = "", **asked: object) -> TokenSequence:
    request = Request(f"r{next(NUMBERS)}", (tuple(prompt),), tenant=tenant, salt=salt, **asked)  # type: ignore[arg-type]
    return TokenSequence(request, 0, 0, tuple(prompt), 10_000, 0)


def write(row: TokenSequence, *tokens: int) -> None:
    row.tokens.extend(tokens)
    row.sampled += len(tokens)


def end(lookup: LookupProposer, row: TokenSequence) -> None:
    row.ended = True
    lookup.forget(row)


def draft_tokens(lookup: LookupProposer, row: TokenSequence, most: int = MOST_LOOKUP_TOKENS) -> tuple[int, ...]:
    """What is proposed, after an offer that says as much."""
    [offer] = lookup.offers([row])
    if offer is None:
        return ()
    [proposal] = lookup.propose([row], [most])
    assert offer.free and len(proposal.tokens) == min(offer.most, most)
    assert proposal.confidences == offer.confidences[:most] and proposal.source == offer.source == "lookup"
    assert all(0 <= confidence <= 1 for confidence in offer.confidences)
    return proposal.tokens


def offered(lookup: LookupProposer, row: TokenSequence) -> DraftOffer:
    [offer] = lookup.offers([row])
    assert offer is not None
    return offer


# In the same text.


def test_what_is_copied_from_the_prompt_is_drafted() -> None:
    row, lookup = sequence([*TEXT, 1, 2]), LookupProposer()
    write(row, *TEXT[100:103])
    assert draft_tokens(lookup, row) == tuple(TEXT[103 : 103 + MOST_LOOKUP_TOKENS])


def test_nothing_is_drafted_where_nothing_matches() -> None:
    lookup = LookupProposer()
    assert draft_tokens(lookup, sequence([])) == ()
    assert draft_tokens(lookup, sequence([1, 2])) == ()
    assert draft_tokens(lookup, sequence(TEXT)) == ()
    row = sequence([*TEXT, 1])
    write(row, 10_000)
    assert draft_tokens(lookup, row) == ()


def test_one_token_in_common_is_enough_where_it_led_on_before() -> None:
    copying, other, lookup = sequence([*TEXT, 1]), sequence([*TEXT, 1]), LookupProposer()
    for place in range(20):
        for row, following in ((copying, TEXT[10 * place + 1]), (other, 20_000 + place)):
            write(row, 10_000 + place, TEXT[10 * place])
            lookup.offers([row])
            write(row, following)
    for row in (copying, other):
        write(row, 30_000, TEXT[300])
    assert draft_tokens(lookup, copying) == tuple(TEXT[301 : 301 + MOST_LOOKUP_TOKENS])
    assert offered(lookup, copying).confidences[0] > 0.8
    assert offered(lookup, other).confidences[0] < 0.1


def test_it_is_surer_of_what_follows_a_longer_match() -> None:
    row, lookup = sequence([*TEXT, 1]), LookupProposer()
    write(row, *TEXT[10:12])
    few = offered(lookup, row)
    write(row, *TEXT[12:40])
    many = offered(lookup, row)
    assert few.most == many.most == MOST_LOOKUP_TOKENS and list(few.confidences) == sorted(few.confidences)
    assert many.confidences[0] > 1.5 * few.confidences[0]


def test_no_more_is_proposed_than_asked_for() -> None:
    row, lookup = sequence([*TEXT, 1]), LookupProposer()
    write(row, *TEXT[10:40])
    assert draft_tokens(lookup, row, 2) == tuple(TEXT[40:42])


def test_confidence_follows_what_comes_true_for_this_sequence() -> None:
    good, bad, lookup = sequence([*TEXT, 1]), sequence([*TEXT, 1]), LookupProposer()
    for place in range(20):
        write(good, *TEXT[10 * place : 10 * place + 3])
        write(bad, *TEXT[10 * place : 10 * place + 3])
        lookup.offers([good, bad])
        write(good, TEXT[10 * place + 3], 5)
        write(bad, 6, 5)
    write(good, *TEXT[300:303])
    write(bad, *TEXT[300:303])
    likely, unlikely = offered(lookup, good).confidences[0], offered(lookup, bad).confidences[0]
    assert likely > 0.9 and unlikely < 0.1


def test_a_new_sequence_begins_with_what_came_true_for_others() -> None:
    lookup, fresh = LookupProposer(), sequence([*TEXT, 1])
    write(fresh, *TEXT[300:303])
    before = offered(LookupProposer(), fresh).confidences[0]
    other = sequence([*TEXT, 2])
    for place in range(20):
        write(other, *TEXT[10 * place : 10 * place + 3])
        lookup.offers([other])
        write(other, 6, 5)
    assert offered(lookup, fresh).confidences[0] < before


def test_drafts_are_judged_also_where_they_were_not_verified() -> None:
    """What comes is known anyway, so that it need not be explored whether drafts would pay again."""
    row, lookup = sequence([*TEXT, 1]), LookupProposer()
    for right in (False, True):
        before = _chance_of_three(lookup, row)
        for place in range(20):
            write(row, 10_000 + len(row.tokens), *TEXT[10 * place : 10 * place + 3])
            expected = draft_tokens(lookup, row)[:1]
            write(row, *(expected if right else [6]))
        assert (_chance_of_three(lookup, row) > before) == right


def _chance_of_three(lookup: LookupProposer, row: TokenSequence) -> float:
    """How sure it is of what follows three tokens in common."""
    write(row, 10_000 + len(row.tokens), *TEXT[300:303])
    return offered(lookup, row).confidences[0]


def test_asking_again_before_anything_came_gives_the_same_and_teaches_nothing() -> None:
    row, lookup = sequence([*TEXT, 1]), LookupProposer()
    write(row, *TEXT[10:13])
    first = offered(lookup, row)
    assert [offered(lookup, row) for _ in range(5)] == [first] * 5
    write(row, *TEXT[13:17])
    second = offered(lookup, row)
    assert second.confidences != first.confidences and offered(lookup, row) == second


def test_long_prompts_are_indexed_a_piece_in_each_step_all_rows_together() -> None:
    chance = random.Random(3)
    rows = [sequence([chance.randrange(50_000) for _ in range(3 * INDEXED_A_STEP)]) for _ in range(2)]
    lookup = LookupProposer()
    left = [6 * INDEXED_A_STEP - 2]
    while left[-1]:
        lookup.offers(rows)
        left.append(sum(lookup._followed[row].index.unlearned for row in rows))
        assert left[-2] - left[-1] == min(INDEXED_A_STEP, left[-2])
    write(rows[1], *rows[1].prompt[2 * INDEXED_A_STEP : 2 * INDEXED_A_STEP + 6])
    assert draft_tokens(lookup, rows[1])[0] == rows[1].prompt[2 * INDEXED_A_STEP + 6]


# In earlier answers.


def test_an_answer_is_drafted_from_an_earlier_one_to_the_same_owner() -> None:
    lookup = LookupProposer()
    first = sequence([1, 2, 3])
    write(first, *TEXT[:50])
    end(lookup, first)
    second = sequence([4, 5, 6])
    write(second, 8, *TEXT[20:23])
    assert draft_tokens(lookup, second) == tuple(TEXT[23 : 23 + MOST_LOOKUP_TOKENS])


def test_the_beginning_of_an_answer_is_drafted_from_an_answer_to_a_prompt_that_ended_alike() -> None:
    lookup = LookupProposer()
    first = sequence([1, 2, 3, 4, 5])
    write(first, *TEXT[:50])
    end(lookup, first)
    assert draft_tokens(lookup, sequence([9, 3, 4, 5])) == tuple(TEXT[:MOST_LOOKUP_TOKENS])


def test_the_longer_match_wins_wherever_it_is() -> None:
    lookup = LookupProposer()
    first = sequence([1, 2])
    write(first, *TEXT[:10], 77, 78)
    end(lookup, first)
    row = sequence([*TEXT[5:10], 88, 89, 0])
    write(row, *TEXT[7:10])
    assert draft_tokens(lookup, row)[0] == 88
    row = sequence([*TEXT[5:10], 88, 89, 0])
    write(row, *TEXT[3:10])
    assert draft_tokens(lookup, row)[0] == 77


def test_no_draft_goes_on_from_one_answer_to_the_next() -> None:
    lookup = LookupProposer()
    for text in (TEXT[:6], TEXT[100:106]):
        row = sequence([1])
        write(row, *text)
        end(lookup, row)
    row = sequence([2])
    write(row, *TEXT[1:4])
    assert draft_tokens(lookup, row) == tuple(TEXT[4:6])


def test_owners_share_nothing() -> None:
    lookup = LookupProposer()
    first = sequence([1, 2, 3], "a", "x")
    write(first, *TEXT[:50])
    end(lookup, first)
    for tenant, salt in (("b", "x"), ("a", "y"), ("", "")):
        other = sequence([1, 2, 3], tenant, salt)
        write(other, *TEXT[:20])
        assert draft_tokens(lookup, other) == ()
    same = sequence([1, 2, 3], "a", "x")
    write(same, *TEXT[:20])
    assert draft_tokens(lookup, same)


def test_who_keeps_nothing_leaves_nothing_and_takes_nothing() -> None:
    lookup = LookupProposer()
    for asked in ({"cache": False}, {"sampling": Sampling(prompt_logprobs=1)}):
        row = sequence([1, 2, 3], **asked)
        write(row, *TEXT[:50])
        end(lookup, row)
    other = sequence([1, 2, 3])
    write(other, *TEXT[:20])
    assert draft_tokens(lookup, other) == ()
    end(lookup, other)
    for asked in ({"cache": False}, {"sampling": Sampling(prompt_logprobs=1)}):
        row = sequence([1, 2, 3], **asked)
        write(row, *TEXT[:10])
        assert draft_tokens(lookup, row) == ()


def test_a_preempted_sequence_goes_on_and_leaves_its_answer_once() -> None:
    past = PastAnswers()
    row, lookup = sequence([*TEXT, 1]), LookupProposer(past)
    write(row, *TEXT[100:110])
    before = draft_tokens(lookup, row)
    lookup.forget(row)
    assert past.count == 0
    assert draft_tokens(lookup, row) == before
    end(lookup, row)
    assert past.count == LEADING_TOKENS + 10 + 1


def test_forgetting_a_sequence_that_was_never_seen_is_nothing() -> None:
    past = PastAnswers()
    end(LookupProposer(past), sequence([1, 2, 3]))
    assert past.count == 0


def test_answers_are_remembered_up_to_a_bound_the_oldest_go_first() -> None:
    past = PastAnswers(100)
    owner = CacheOwner("a", "")
    for start in range(0, 400, 40):
        past.add(owner, TEXT[start : start + 40])
        past.learn(owner, 1000)
        assert past.count <= 100
    found = past.find(owner, TEXT[370:380])
    assert found is not None and past.following(owner, found.at, 50) == TEXT[380:400]
    matches = [past.find(owner, TEXT[place : place + 8]) for place in range(290)]
    assert all(match is None or match.length < 3 for match in matches)


def test_owners_have_an_equal_share() -> None:
    past = PastAnswers(120)
    owners = [CacheOwner(name, "") for name in "abc"]
    for owner in owners:
        for _ in range(4):
            past.add(owner, TEXT[:50])
    shares = [len(past._owners[owner].tokens) for owner in owners]
    assert shares == [40, 40, 40] and past.count == 120


def test_only_so_many_owners_are_remembered_those_that_came_last() -> None:
    past = PastAnswers()
    for number in range(past_answers.MOST_ANSWER_OWNERS + 5):
        past.add(CacheOwner(str(number), ""), TEXT[:20])
        past.add(CacheOwner("0", ""), TEXT[:5])
    assert len(past._owners) == past_answers.MOST_ANSWER_OWNERS
    past.learn(CacheOwner("0", ""), 100)
    assert past.find(CacheOwner("0", ""), TEXT[:4]) is not None
    assert past.find(CacheOwner("1", ""), TEXT[:4]) is None


# Whatever happens.

steps = st.lists(
    st.tuples(st.integers(0, 3), st.sampled_from(["write", "accept", "end", "preempt"]), st.integers(0, 3)), max_size=60
)


@given(steps, st.randoms(use_true_random=False))
def test_every_draft_followed_the_same_tokens_earlier_in_the_text_or_in_an_answer_to_the_same_owner(
    steps: list[tuple[int, str, int]], chance: random.Random
) -> None:
    lookup = LookupProposer(PastAnswers(200))
    tenants = ["a", "b", "a", "b"]
    answers: dict[str, list[list[int]]] = {"a": [], "b": []}
    rows = [sequence([chance.randrange(3) for _ in range(12)], tenant) for tenant in tenants]
    for number, action, token in steps:
        row = rows[number]
        offers = lookup.offers(rows)
        drafts = [proposal.tokens for proposal in lookup.propose(rows, [MOST_LOOKUP_TOKENS] * 4)]
        for each, offer, tokens in zip(rows, offers, drafts, strict=True):
            assert len(tokens) == (offer.most if offer else 0)
            sources = [each.tokens, *answers[each.tenant]]
            assert not tokens or any(_stands((*each.tokens[-SHORTEST_MATCH:], *tokens), source) for source in sources)
        if action == "accept":
            write(row, *drafts[number], token)
        elif action == "write":
            write(row, token, chance.randrange(3))
        elif action == "preempt":
            lookup.forget(row)
        else:
            end(lookup, row)
            answers[row.tenant].append(row.tokens)
            rows[number] = sequence([chance.randrange(3) for _ in range(12)], row.tenant)


def _stands(tokens: tuple[int, ...], text: list[int]) -> bool:
    return END_OF_ANSWER not in tokens and any(
        tuple(text[place : place + len(tokens)]) == tokens for place in range(len(text) - len(tokens) + 1)
    )


repetitive = st.lists(st.integers(0, 3), max_size=200)


def learned(tokens: list[int], pieces: list[int] | None = None) -> SuffixIndex:
    index = SuffixIndex(tokens)
    for piece in pieces or []:
        index.learn(piece)
    index.learn(len(tokens))
    return index


def common(tokens: list[int], at: int, newest: list[int]) -> int:
    """How many tokens before `at` are the newest ones."""
    length = 0
    while length < min(at, len(newest), LONGEST_MATCH) and tokens[at - length - 1] == newest[-length - 1]:
        length += 1
    return length


@given(repetitive)
def test_a_match_is_true_and_as_long_as_it_is(tokens: list[int]) -> None:
    found = learned(tokens).find(tokens[-LONGEST_MATCH:])
    if found is not None:
        assert found.at < len(tokens) and found.length >= SHORTEST_MATCH
        assert found.length == common(tokens, found.at, tokens)


@given(repetitive, repetitive, st.lists(st.integers(0, 40), max_size=6))
def test_how_a_text_is_learned_makes_no_difference(tokens: list[int], newest: list[int], pieces: list[int]) -> None:
    assert learned(tokens, pieces).find(newest) == learned(tokens).find(newest)


@given(repetitive, st.data())
def test_a_text_that_grows_is_known_up_to_its_last_token_but_one(tokens: list[int], data: st.DataObject) -> None:
    text: list[int] = []
    index = SuffixIndex(text)
    for token in tokens:
        text.append(token)
        index.learn(1)
        assert index.unlearned == 0
    assert index.find(tokens) == learned(tokens).find(tokens)


@given(repetitive, repetitive, st.integers(0, 150))
def test_what_was_dropped_is_never_found(tokens: list[int], newest: list[int], count: int) -> None:
    text = list(tokens)
    index = learned(text)
    index.drop(count)
    assert text == tokens[count:]
    found = index.find(newest)
    assert found is None or (found.at < len(text) and found.length == common(text, found.at, newest))
    index.learn(len(text))
    found = index.find(newest)
    assert found is None or found.length == common(text, found.at, newest)


def test_the_longest_match_is_found_and_of_those_the_latest() -> None:
    text = [*range(1, 10), 20, 6, 7, 8, 30, *range(1, 9), 40, 21, 6, 7, 8]
    assert learned(text).find([6, 7, 8]) == SuffixMatch(22, 3)
    assert learned(text).find([2, 3, 4, 5, 6, 7, 8]) == SuffixMatch(22, 7)
    assert learned(text).find([20, 6, 7, 8]) == SuffixMatch(
        22, 3
    )  # of three tokens, only where they last stood is known
    assert learned(text).find([7, 8]) == SuffixMatch(22, 2)
    assert learned(text).find([30, 2]) == SuffixMatch(16, 1)  # a single token
    assert learned(text).find([99]) is None
    assert learned(text).find([]) is None


def test_nearly_all_places_of_a_long_text_are_found() -> None:
    chance = random.Random(7)
    text = [chance.randrange(50_000) for _ in range(60_000)]
    index = learned(text)
    places = [chance.randrange(100, len(text)) for _ in range(500)]
    found = [index.find(text[place - 40 : place]) for place in places]
    assert sum(match == SuffixMatch(place, 40) for match, place in zip(found, places, strict=True)) >= 490


def test_an_index_takes_no_more_memory_than_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup, "MOST_SLOTS", 1 << 12)
    text = list(range(40_000))
    index = learned(text)
    assert index.nbytes == (1 << 12) * SLOT_BYTES
    assert index.find(text[39_000:39_900]) == SuffixMatch(39_900, LONGEST_MATCH)  # what is new is known
    assert index.find(text[100:200]) is None
    small: list[int] = []
    growing = SuffixIndex(small)
    for token in range(4000):
        small.append(token)
        growing.learn(8)
    assert growing.nbytes <= (1 << 12) * SLOT_BYTES


def test_tables_shrink_with_the_text() -> None:
    text = list(range(30_000))
    index = learned(text)
    before = index.nbytes
    index.drop(29_000)
    assert index.nbytes < before / 8
    index.learn(len(text))
    assert index.find(list(range(29_400, 29_500))) == SuffixMatch(500, LONGEST_MATCH)


def test_no_more_is_learned_at_once_than_asked_for_also_where_tables_are_made_anew() -> None:
    text = list(range(500))
    index = learned(text)
    text += range(500, 3000)
    assert index.learn(64) == 64
    assert index.unlearned == 3000 - 65
    while index.unlearned:
        assert 0 < index.learn(64) <= 64
    assert index.learn(64) == 0
    assert index.find(text[:450]) == SuffixMatch(450, LONGEST_MATCH)


def test_places_are_counted_anew_before_numbers_run_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup, "_MOST_GONE", 100)
    text: list[int] = []
    index = SuffixIndex(text)
    for start in range(0, 2000, 50):
        text += range(start, start + 50)
        index.drop(max(0, len(text) - 90))
        index.learn(1000)
        place = 80 if len(text) == 90 else 40
        assert index.find(text[place - 20 : place]) == SuffixMatch(place, 20)
