"""A next turn goes on from what an earlier one kept, where it asks for the same; nobody else does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ingot.engine.engine import Engine
from ingot.engine.request import PromptScored, Request, Sampling, SequenceEnded, SpecPrefillRequest
from ingot.engine.specprefill.selection import REMEMBERED_SELECTIONS, SelectionMemory, required_tokens, select_tokens
from tests.engine.specprefill.world import Told, ask, ended, evenly, report, some, start, written_by_stock
from tests.engines import answer

KINDS = ["llama", "window", "hybrid"]
LENGTH = 700
Starting = Callable[..., tuple[Engine, Told]]


@pytest.fixture
def starting() -> Iterator[Starting]:
    made: list[Engine] = []

    def started(kind: str = "llama", **options: Any) -> tuple[Engine, Told]:
        scorer = Told(evenly)
        made.append(start(kind, (lambda: scorer), **options))
        return made[-1], scorer

    yield started
    for engine in made:
        if engine.health().alive:
            engine.check()
        engine.close()


def tokens_of(engine: Engine, request: Request) -> tuple[int, ...]:
    events = answer(engine, request)
    ended(events)
    return next(event.tokens for event in events if isinstance(event, SequenceEnded))


def kept_of(prompt: tuple[int, ...]) -> list[int]:
    offsets: list[int] = select_tokens(evenly(prompt), required_tokens(len(prompt)), 0.3).tolist()
    return offsets


def first_turn(engine: Engine, **options: Any) -> tuple[int, ...]:
    """A prompt and its answer."""
    prompt = some(LENGTH)
    return prompt + tokens_of(engine, ask(prompt, **options))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", KINDS)
def test_a_short_next_turn_is_computed_whole_behind_what_was_kept(starting: Starting, kind: str) -> None:
    engine, scorer = starting(kind)
    turn = (*first_turn(engine), *some(90, 1))
    events = answer(engine, ask(turn, max_tokens=3))
    result = report(events)
    assert len(scorer.asked) == 1, "it is not scored again"
    assert (result.scored, result.kept, result.unused) == (0, 0, None) and LENGTH <= result.reused < len(turn)
    cached = ended(events).usage.cached_tokens
    assert cached >= len(kept_of(some(LENGTH))) - 1 if kind != "hybrid" else cached > 0
    if kind == "llama":
        wanted = written_by_stock(kind, turn, [*kept_of(some(LENGTH)), *range(LENGTH, len(turn))], 3)
        assert list(next(event.tokens for event in events if isinstance(event, SequenceEnded))) == wanted


def test_of_a_long_next_turn_only_what_is_new_is_scored_and_thinned_out(starting: Starting) -> None:
    engine, scorer = starting()
    turn = (*first_turn(engine), *some(600, 1))
    events = answer(engine, ask(turn))
    result = report(events)
    assert len(scorer.asked) == 2
    assert LENGTH <= result.reused <= LENGTH + 12 and result.scored == len(turn) - result.reused
    assert 0 < result.kept < 450
    assert ended(events).usage.cached_tokens == len(kept_of(some(LENGTH))) + result.reused - LENGTH
    again = report(answer(engine, ask(turn)))
    assert again.reused == len(turn) and len(scorer.asked) == 2, "and it is what a third turn goes on from"


@pytest.mark.parametrize(
    "other",
    [{"specprefill": SpecPrefillRequest(keep=0.5)}, {"salt": "another"}, {"tenant": "another"}, {"cache": False}],
    ids=str,
)
def test_whoever_asks_for_something_else_is_scored_anew(starting: Starting, other: dict[str, Any]) -> None:
    engine, scorer = starting()
    turn = (*first_turn(engine), *some(90, 1))
    result = report(answer(engine, ask(turn, **other)))
    assert len(scorer.asked) == 2 and result.reused == 0 and result.kept < result.scored


def test_who_does_not_ask_is_answered_like_on_the_first_day(starting: Starting) -> None:
    engine, _ = starting()
    turn = (*first_turn(engine), *some(90, 1))
    answer(engine, ask(turn))
    dense = answer(engine, ask(turn, None))
    assert not ended(dense).specprefill
    fresh, _ = starting()
    assert next(e.tokens for e in dense if isinstance(e, SequenceEnded)) == tokens_of(fresh, ask(turn, None))


def test_exact_states_that_reach_further_are_taken_instead(starting: Starting) -> None:
    engine, scorer = starting()
    turn = (*first_turn(engine), *some(600, 1))
    answer(engine, ask(turn[:-200], None))
    result = report(answer(engine, ask(turn)))
    assert result.unused == "cached" and len(scorer.asked) == 1


def test_what_must_be_whole_and_was_left_out_is_not_gone_on_from(starting: Starting) -> None:
    engine, scorer = starting()
    turn = (*first_turn(engine), *some(90, 1))
    gap = next(position for position in range(LENGTH) if position not in set(kept_of(some(LENGTH))))
    result = report(answer(engine, ask(turn, SpecPrefillRequest(whole=(((gap, gap + 5),),)))))
    assert result.reused == 0 and len(scorer.asked) == 2


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_on_disk_is_found_by_who_asks_for_the_same_and_by_nobody_else(
    starting: Starting, kind: str, tmp_path: Path
) -> None:
    prompt = some(LENGTH)
    engine, _ = starting(kind, disk=tmp_path)
    first = tokens_of(engine, ask(prompt))
    engine.close()
    later, _ = starting(kind, disk=tmp_path)
    events = answer(later, ask(prompt))
    assert next(event.tokens for event in events if isinstance(event, SequenceEnded)) == first
    assert ended(events).cache[0].read == ended(events).usage.cached_tokens > 100, "the receipt says so"
    another, _ = starting(kind, disk=tmp_path)
    gap = next(position for position, token in enumerate(kept_of(prompt)) if token > position)
    exact = answer(another, ask(prompt, None))
    assert ended(exact).usage.cached_tokens <= gap
    fresh, _ = starting(kind)
    assert next(e.tokens for e in exact if isinstance(e, SequenceEnded)) == tokens_of(fresh, ask(prompt, None))


def test_the_longest_prompt_that_another_begins_with_is_remembered_by_its_terms() -> None:
    entries, kept = SelectionMemory(), [np.arange(count, dtype=np.int32) for count in range(4)]
    entries.remember("a", [1, 2], kept[1])
    entries.remember("a", [1, 2, 3], kept[2])
    entries.remember("b", [1, 2, 3, 4], kept[3])
    found = entries.longest("a", [1, 2, 3, 4])
    assert found is not None and (found.length, found.positions is kept[2]) == (3, True)
    shorter = entries.longest("a", [1, 2, 9])
    assert shorter is not None and shorter.length == 2
    assert entries.longest("a", [1]) is None and entries.longest("c", [1, 2]) is None


def test_the_prompts_that_were_asked_for_longest_ago_are_forgotten() -> None:
    entries, none = SelectionMemory(), np.arange(0, dtype=np.int32)
    for number in range(REMEMBERED_SELECTIONS):
        entries.remember("a", [number], none)
    assert entries.longest("a", [0]) is not None
    entries.remember("a", [1000], none)
    assert entries.longest("a", [1]) is None and entries.longest("a", [0]) is not None


def test_a_prompt_that_was_forced_is_whole_where_the_threshold_is_to_decide(starting: Starting) -> None:
    engine, _ = starting()
    prompt = some(280)
    assert report(answer(engine, ask(prompt, SpecPrefillRequest(forced=True)))).kept < 280
    result = answer(engine, ask(prompt))
    assert report(result).unused == "below_threshold"
    fresh, _ = starting()
    assert next(e.tokens for e in result if isinstance(e, SequenceEnded)) == tokens_of(fresh, ask(prompt, None))


def test_a_prompt_whose_logprobs_are_asked_for_is_whole_though_it_was_thinned_out_before(starting: Starting) -> None:
    engine, _ = starting()
    tokens_of(engine, ask(some(LENGTH)))
    result = answer(engine, ask(some(LENGTH), sampling=Sampling(temperature=0.0, prompt_logprobs=0)))
    assert report(result).unused == "unsupported"
    [scored] = [event for event in result if isinstance(event, PromptScored)]
    assert len(scored.tokens) == LENGTH


def test_a_conversation_under_the_servers_policy_goes_on_from_what_it_kept(starting: Starting) -> None:
    engine, scorer = starting()
    auto = SpecPrefillRequest(auto=True)
    turn = some(LENGTH)
    for number, more in enumerate((90, 40, 600)):
        turn = (*turn, *tokens_of(engine, ask(turn, auto)), *some(more, number))
        if more < 300:
            result = report(answer(engine, ask(turn, auto)))
            assert result.reused >= LENGTH and result.auto and result.lossy and len(scorer.asked) == 1
    events = answer(engine, ask(turn, auto))
    assert report(events).reused > LENGTH and len(scorer.asked) == 2, "what is new is long, and scored"
    assert ended(events).usage.cached_tokens >= len(kept_of(some(LENGTH)))
    dense = answer(engine, ask(turn, None))
    fresh, _ = starting()
    assert next(e.tokens for e in dense if isinstance(e, SequenceEnded)) == tokens_of(fresh, ask(turn, None))


def test_a_conversation_that_was_computed_whole_stays_so_under_the_policy(starting: Starting) -> None:
    engine, scorer = starting()
    auto = SpecPrefillRequest(auto=True)
    prompt = some(280)
    turn = (*prompt, *tokens_of(engine, ask(prompt, auto)), *some(200, 1))
    events = answer(engine, ask(turn, auto))
    assert report(events).unused == "cached" and not scorer.asked
    assert ended(events).usage.cached_tokens >= 280


def test_tenants_share_nothing_that_the_policy_chose(starting: Starting) -> None:
    engine, scorer = starting()
    auto = SpecPrefillRequest(auto=True)
    for tenant in ("one", "two"):
        events = answer(engine, ask(some(LENGTH), auto, tenant=tenant))
        assert ended(events).usage.cached_tokens == 0
    assert len(scorer.asked) == 2
