from __future__ import annotations

import json
from typing import Any

import pytest

from bench import agent
from bench.agent import Course, Player, Replay, Turn
from bench.agent_models import CONFIGS, CONTEXT
from bench.agent_session import Session, tools
from bench.servers import Running


class Counting:
    """A server whose tokens are characters, which had all that it computed before, but for some."""

    url = "counting"

    def __init__(self, missing: int = 0, says: str = "yes") -> None:
        self.missing, self.says = missing, says
        self.bodies: list[Any] = []
        self.known = 0

    def post(self, path: str, body: Any) -> Any:
        self.bodies.append(json.loads(json.dumps(body)))
        prompt = sum(len(json.dumps(message)) for message in body["messages"])
        cached = max(0, self.known - self.missing) if body.get("cache") != "off" else 0
        self.known = prompt + len(self.says) - 1
        usage = {
            "prompt_tokens": prompt,
            "completion_tokens": len(self.says),
            "prompt_tokens_details": {"cached_tokens": cached},
        }
        message = {"role": "assistant", "content": self.says}
        return {"choices": [{"message": message}], "usage": usage, "ingot": {"cache": {"reason": "new_turn"}}}


def player(client: Counting, session: Session, turns: int = 8, tokens: int = 9000, *, forced: bool = False) -> Player:
    server = Running("counting", client, "default", 0)  # type: ignore[arg-type]
    return Player("counting", server, session, Course(turns, tokens), forced=forced)


def play(client: Counting, session: Session, turns: int = 8, tokens: int = 9000) -> Replay:
    one = player(client, session, turns, tokens)
    for _ in range(turns):
        one.step()
    return one.replay


def test_there_are_more_than_twenty_tools_and_no_two_alike() -> None:
    names = [tool["function"]["name"] for tool in tools()]
    assert len(set(names)) == len(names) > 20


@pytest.mark.parametrize("native", [False, True])
def test_each_turn_goes_on_from_the_one_before(native: bool) -> None:
    client = Counting()
    replay = play(client, Session(native))
    for before, after in zip(replay.messages, replay.messages[1:], strict=False):
        assert after[: len(before)] == before and len(after) == len(before) + 2
    assert all(("tools" in body) == native for body in client.bodies)
    roles = {message["role"] for message in replay.messages[-1]}
    assert roles == ({"system", "user", "assistant", "tool"} if native else {"system", "user", "assistant"})


def test_a_session_grows_to_the_length_that_was_asked_for() -> None:
    replay = play(Counting(), Session(False), turns=20, tokens=30_000)
    assert 25_000 < replay.turns[-1].prompt_tokens < 33_000


def test_every_server_is_told_the_same() -> None:
    session = Session(True)
    first, second = play(Counting(says="one"), session), play(Counting(says="two"), session)
    told = [
        [message for message in replay.messages[-1] if message["role"] != "assistant"] for replay in (first, second)
    ]
    assert told[0] == told[1]


def test_the_share_is_of_what_was_possible() -> None:
    replay = play(Counting(missing=10), Session(False))
    assert replay.turns[0].possible == 0
    for before, turn in zip(replay.turns, replay.turns[1:], strict=False):
        assert turn.possible == before.prompt_tokens + before.completion_tokens - 1
        assert turn.cached_tokens == turn.possible - 10
    assert replay.share is not None and 0.99 < replay.share < 1


def test_a_server_that_does_not_say_what_it_had_has_no_share() -> None:
    turn = Turn(100, 5, None, 90, 0.1)
    assert turn.share is None and Replay("x", [turn]).share is None


def test_turns_are_repeated_with_the_cache_off_the_last_among_them() -> None:
    client, session = Counting(), Session(False)
    warm = play(client, session)
    count = len(client.bodies)
    server = Running("counting", client, "default", 0)  # type: ignore[arg-type]
    again = agent.cold(server, warm, session, 2)
    assert len(again) == 2 and len(warm.messages) - 1 in again
    assert [body["messages"] for body in client.bodies[count:]] == [warm.messages[turn] for turn in again]
    assert all(body["cache"] == "off" for body in client.bodies[count:])
    assert agent.cold(server, warm, session, 0) == {}
    assert list(agent.cold(server, warm, session, 999)) == list(range(len(warm.messages)))


def test_a_forced_turn_names_a_tool() -> None:
    client = Counting()
    player(client, Session(True), forced=True).step()
    assert client.bodies[0]["tool_choice"]["function"]["name"] == tools()[0]["function"]["name"]


def test_the_random_models_hold_long_sessions() -> None:
    assert set(CONFIGS) == {"append", "hybrid", "window"} and CONTEXT > 2 * 16_000
