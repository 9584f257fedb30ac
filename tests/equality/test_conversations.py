"""Each kind of next turn, on each kind of model: what is taken over, why no more, and that the answer is the same."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ingot.cache.prefix_eviction import CLOSE_TOKENS
from ingot.engine.engine import Engine
from tests import talking
from tests.talking import Answered, Talk, computed_anew, echo, result, spoken, system, user

pytestmark = pytest.mark.sampled(3)
ALL = list(talking.KINDS)
Messages = list[dict[str, Any]]


@pytest.fixture(scope="module", params=ALL)
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    made = talking.start(request.param)
    yield made
    made.check()
    made.close()


@pytest.fixture
def talk(engine: Engine) -> Talk:
    engine.kept.clear("")
    return talking.talking(engine)


def is_the_same(engine: Engine, talk: Talk, answer: Answered) -> bool:
    return computed_anew(engine, talk.opened[-1]) == spoken(answer.message)


def begun(talk: Talk, *, name: str = "Ann") -> tuple[Messages, Answered]:
    """A conversation in which a tool was called."""
    messages = [system(f"You serve {name}, in as few words as you can."), user("Look around, and say what is there.")]
    return messages, talk.called(messages, "look")


def test_after_a_tool_result_comes_another(engine: Engine, talk: Talk) -> None:
    messages, first = begun(talk)
    messages = [*messages, echo(first), result(first, "a table and two chairs")]
    second = talk.called(messages, "fetch")
    assert (second.cached_tokens, second.reason) == (first.left, "new_turn")
    messages = [*messages, echo(second), result(second, "one chair")]
    third = talk.called(messages, "write")
    assert (third.cached_tokens, third.reason, third.diverged) == (second.left, "new_turn", None)
    assert is_the_same(engine, talk, third)


def test_after_a_tool_result_and_its_answer_the_user_speaks(engine: Engine, talk: Talk) -> None:
    messages, first = begun(talk)
    messages = [*messages, echo(first), result(first, "a table and two chairs")]
    second = talk.said(messages)
    third = talk.said([*messages, echo(second), user("How many chairs was that?")])
    assert (third.cached_tokens, third.reason) == (second.left, "new_turn")
    assert is_the_same(engine, talk, third)


def test_the_user_speaks_instead_of_giving_the_tools_result(engine: Engine, talk: Talk) -> None:
    messages, first = begun(talk)
    second = talk.said([*messages, echo(first), user("Never mind, and good night.")])
    assert (second.cached_tokens, second.reason) == (first.left, "new_turn")
    assert is_the_same(engine, talk, second)


def test_the_user_speaks_again_and_again(engine: Engine, talk: Talk) -> None:
    messages = [system("You babble."), user("Good morning to you.")]
    before = talk.said(messages)
    for words in ("And how are you today?", "What is for breakfast?", "Where is the jam?"):
        messages = [*messages, echo(before), user(words)]
        answer = talk.said(messages)
        assert (answer.cached_tokens, answer.reason) == (before.left, "new_turn")
        assert is_the_same(engine, talk, answer)
        before = answer


def test_an_edited_message_is_computed_from_where_it_differs(engine: Engine, talk: Talk) -> None:
    messages, first = begun(talk)
    messages = [*messages, echo(first), result(first, "a table and two chairs"), user("How many chairs was that now?")]
    talk.said(messages)
    edited = [*messages[:3], {**messages[3], "content": "a desk and two chairs"}, messages[4]]
    answer = talk.said(edited)
    assert first.left - 16 < answer.cached_tokens < answer.prompt_tokens - 40
    assert answer.reason == "diverged"
    assert answer.diverged["ours"].startswith("desk") and answer.diverged["theirs"].startswith("table")
    assert is_the_same(engine, talk, answer)


def test_a_place_where_texts_part_is_named_by_message_and_character(engine: Engine, talk: Talk) -> None:
    messages, first = begun(talk)
    messages = [*messages, echo(first), result(first, "a table and two chairs")]
    talk.said(messages)
    answer = talk.said([*messages[:3], {**messages[3], "content": "a table and six chairs"}])
    place = answer.diverged
    assert (place["message"], place["role"]) == (3, "tool")
    assert place["character"] == len("a table and ")
    assert (place["ours"][:3], place["theirs"][:3]) == ("six", "two")


def test_a_branch_from_the_middle_shares_what_lies_before_it(engine: Engine, talk: Talk) -> None:
    messages, first = begun(talk)
    messages = [*messages, echo(first), result(first, "a table and two chairs")]
    trunk = talk.said(messages)
    left = talk.said([*messages, echo(trunk), user("Good. What is on the table?")])
    right = talk.said([*messages, echo(trunk), user("Bad. Who sits on the chairs?")])
    assert (left.reason, right.reason) == ("new_turn", "diverged")
    assert right.cached_tokens > trunk.left - CLOSE_TOKENS
    assert (right.diverged["ours"][:3], right.diverged["theirs"][:4]) == ("Bad", "Good")
    assert is_the_same(engine, talk, right)


def test_another_conversation_shares_the_system_prompt_and_the_tools(engine: Engine, talk: Talk) -> None:
    messages, _ = begun(talk)
    other = talk.said([messages[0], user("What is the time?")])
    assert other.reason == "diverged"
    assert other.cached_tokens >= other.prompt_tokens - 60
    assert other.diverged["message"] == 1
    assert is_the_same(engine, talk, other)


def test_a_changed_system_prompt_shares_next_to_nothing_and_shows_why(engine: Engine, talk: Talk) -> None:
    begun(talk)
    _, other = begun(talk, name="Bob")
    assert other.cached_tokens < 40
    assert other.reason in ("diverged", "checkpoint")
    assert (other.diverged["message"], other.diverged["ours"][:3], other.diverged["theirs"][:3]) == (0, "Bob", "Ann")


def test_the_same_prompt_again_is_taken_over_whole(engine: Engine, talk: Talk) -> None:
    messages, first = begun(talk)
    again = talk.called(messages, "look")
    assert again.cached_tokens >= first.prompt_tokens - 24
    assert again.reason in ("complete", "checkpoint")
    assert spoken(again.message) == spoken(first.message)


def test_two_tenants_share_nothing_and_one_does_with_itself(engine: Engine, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("ann-has-a-key\nbob-has-a-key\n")
    talk = talking.talking(engine, api_key_file=keys)
    ann, bob = talk.by("ann-has-a-key"), talk.by("bob-has-a-key")
    messages, first = begun(ann)
    _, theirs = begun(bob)
    assert (theirs.cached_tokens, theirs.reason, theirs.diverged) == (0, "unseen", None)
    longer = [*messages, echo(first), result(first, "a table")]
    assert ann.said(longer).cached_tokens == first.left
    assert spoken(theirs.message) == spoken(first.message)


def test_a_salt_divides_one_tenants_own(engine: Engine, talk: Talk) -> None:
    messages = [system("You babble."), user("Good morning to you all.")]
    talk.said(messages, cache_salt="one")
    other = talk.said(messages, cache_salt="two")
    assert (other.cached_tokens, other.reason, other.diverged) == (0, "salt", None)


def test_who_asks_for_no_cache_takes_and_leaves_nothing(engine: Engine, talk: Talk) -> None:
    messages = [system("You babble."), user("Good evening to you all.")]
    off = talk.said(messages, cache="off")
    after = talk.said(messages)
    assert (off.cached_tokens, off.reason) == (0, "off")
    assert (after.cached_tokens, after.reason) == (0, "unseen")


@pytest.mark.parametrize("kind", ALL)
def test_what_had_to_go_is_said_to_be_gone_and_computed_again(kind: str) -> None:
    engine = talking.start(kind, cache_bytes=900_000)
    talk = talking.talking(engine)
    messages, first = begun(talk)
    for number in range(12):
        talk.said([system(f"You are number {number}. " + "Say so. " * 80), user("Go on.")])
    answer = talk.said([*messages, echo(first), result(first, "a table and two chairs")])
    assert answer.reason == "evicted"
    assert answer.cached_tokens < first.left
    assert is_the_same(engine, talk, answer)
    engine.check()
    engine.close()


def test_conversations_at_once_do_not_get_in_each_others_way(engine: Engine, talk: Talk) -> None:
    starts = [[system("You all babble."), user(f"I am number {number}.")] for number in range(4)]

    async def together(conversations: list[Messages]) -> list[Answered]:
        options = {"logit_bias": talking.LETTERS, "max_tokens": 12}
        return await asyncio.gather(*(talk.asked(messages, **options) for messages in conversations))

    first = asyncio.run(together(starts))
    following = [[*old, echo(answer), user("Again!")] for old, answer in zip(starts, first, strict=True)]
    second = asyncio.run(together(following))
    asked = {request.prompts[0]: request for request in talk.opened[-4:]}
    assert [answer.cached_tokens for answer in second] == [answer.left for answer in first]
    said = sorted(spoken(answer.message) for answer in second)
    assert sorted(computed_anew(engine, request) for request in asked.values()) == said


def test_a_long_conversation_on_a_hybrid_model_holds_few_checkpoints_and_resumes_at_each_turn() -> None:
    engine = talking.start("hybrid")
    talk = talking.talking(engine)
    messages = [system("You babble, at length."), user("Good morning.")]
    answer = talk.said(messages)
    counts = []
    for number in range(16):
        messages = [*messages, echo(answer), user(f"Go on, for the {number}th time, and mind the length of it.")]
        before, answer = answer, talk.said(messages)
        assert answer.cached_tokens == before.left
        counts.append(engine.kept.status("").salts[0].checkpoints)
    assert max(counts) <= 12 and counts[-1] <= counts[5] + 3
    engine.check()
    engine.close()
