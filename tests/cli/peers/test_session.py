from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from ingot.cli.client import ServerError
from ingot.cli.peers.session import Course, Heard, Player, Session, Turn, listen, reused_share, tools


class Counting:
    """A server whose tokens are characters, which had all that it computed before, but for some."""

    def __init__(self, missing: int = 0, says: str = "yes", calls: Sequence[Mapping[str, Any]] = ()) -> None:
        self.missing, self.says, self.calls = missing, says, calls
        self.bodies: list[Any] = []
        self.known = 0

    def stream(self, path: str, body: Any) -> Any:
        self.bodies.append(json.loads(json.dumps(body)))
        prompt = sum(len(json.dumps(message)) for message in body["messages"])
        usage = {
            "prompt_tokens": prompt,
            "completion_tokens": len(self.says),
            "prompt_tokens_details": {"cached_tokens": max(0, self.known - self.missing)},
        }
        self.known = prompt + len(self.says) - 1
        deltas = [{"content": self.says}] if self.says else []
        deltas += [{"tool_calls": [call]} for call in self.calls]
        for delta in deltas:
            yield SimpleNamespace(at=1e12, data={"choices": [{"delta": delta}]})
        yield SimpleNamespace(at=1e12, data={"choices": [], "usage": usage})


def play(client: Counting, session: Session, turns: int = 8, tokens: int = 12000) -> Player:
    player = Player(client, "m", session, Course(turns, tokens))  # type: ignore[arg-type]
    for _ in range(turns):
        player.step()
    return player


def test_there_are_more_than_twenty_tools_and_no_two_alike() -> None:
    names = [tool["function"]["name"] for tool in tools()]
    assert len(set(names)) == len(names) > 20


@pytest.mark.parametrize("native", [False, True])
def test_each_turn_goes_on_from_the_one_before(native: bool) -> None:
    client = Counting()
    sent = play(client, Session(native)).sent
    for before, after in pairwise(sent):
        assert after[: len(before)] == before and len(after) == len(before) + 2
    assert all(("tools" in body) == native for body in client.bodies)
    roles = {message["role"] for message in sent[-1]}
    assert roles == ({"system", "user", "assistant", "tool"} if native else {"system", "user", "assistant"})


def test_a_session_grows_to_the_length_that_was_asked_for() -> None:
    player = play(Counting(), Session(False), turns=20, tokens=30_000)
    assert 25_000 < player.turns[-1].heard.prompt_tokens < 33_000


def test_instructions_are_as_long_as_they_should_be() -> None:
    short, long = (len(Session(True, padding=padding).opening()[0]["content"]) for padding in (0, 5000))
    assert 5000 <= long - short < 5100


def test_every_server_is_told_the_same() -> None:
    session = Session(True)
    first, second = play(Counting(says="one"), session), play(Counting(says="two"), session)
    told = [[message for message in player.sent[-1] if message["role"] != "assistant"] for player in (first, second)]
    assert told[0] == told[1]


def test_the_share_is_of_what_was_possible() -> None:
    turns = play(Counting(missing=10), Session(False)).turns
    assert turns[0].possible == 0
    for before, turn in pairwise(turns):
        assert turn.possible == before.heard.prompt_tokens + before.heard.completion_tokens - 1
        assert turn.heard.cached_tokens == turn.possible - 10
    share = reused_share(turns)
    assert share is not None and 0.99 < share < 1


def test_a_server_that_does_not_say_what_it_had_has_no_share() -> None:
    turn = Turn(Heard("", (), 0.1, 0.2, {"prompt_tokens": 100}), 90)
    assert turn.share is None and reused_share([turn]) is None


def test_an_edited_turn_shares_all_but_its_last_message_and_leaves_the_conversation_as_it_was() -> None:
    client = Counting()
    player = play(client, Session(False), turns=3)
    edited = player.edit()
    sent = client.bodies[-1]["messages"]
    assert sent[:-1] == player.sent[-1][:-1] and sent[-1] != player.sent[-1][-1]
    before = player.turns[1].heard
    assert edited.possible == before.prompt_tokens + before.completion_tokens - 1
    player.step()
    assert client.bodies[-1]["messages"][: len(player.sent[2])] == player.sent[2]


def test_a_question_about_a_past_turn_is_right_if_its_number_comes_back() -> None:
    session = Session(False)
    about, number = session.fact(1)
    right = play(Counting(says=f"It is {number}."), session, turns=3)
    assert f"The ticket of the {about} is {number}." in session.texts[1]
    assert right.recall(1)[1] and not right.recall(0)[1]
    assert about in right.recall(1)[0].heard.text or right.sent[-1] == right.sent[2]


def test_a_call_is_put_together_from_its_pieces() -> None:
    pieces = [
        {"index": 0, "id": "c1", "function": {"name": "read_file", "arguments": '{"pa'}},
        {"index": 0, "function": {"arguments": 'th": "here"}'}},
    ]
    heard = listen(Counting(says="", calls=pieces), {"messages": []})  # type: ignore[arg-type]
    (call,) = heard.calls
    assert call["function"] == {"name": "read_file", "arguments": '{"path": "here"}'}
    assert heard.message["tool_calls"] == [call]


def test_an_answer_of_nothing_is_an_error() -> None:
    with pytest.raises(ServerError, match="no text"):
        listen(Counting(says=""), {"messages": []})  # type: ignore[arg-type]
