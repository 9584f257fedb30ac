from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from bench.serve import QUICK, STREAM_WORDS, USUAL, Load, compare, measure_beside, read
from ingot.cli.bench import LoadTarget
from ingot.cli.client import ServerClient, ServerError
from tests.cli.scripted import Answer, Script, scripted_server
from tests.waiting import WAIT_S

LOAD = Load((1, 3), 40, 4, rounds=2, requests_per_stream=2, least_requests=3, endpoint="chat")


def obedient(body: Mapping[str, Any]) -> Answer:
    return Answer(pieces=tuple("abcdefgh"[: body["max_tokens"]]), prompt_tokens=len(body["messages"][0]["content"]))


def curt(body: Mapping[str, Any]) -> Answer:
    return Answer(pieces=("a",), prompt_tokens=len(body["messages"][0]["content"]))


def target(script: Script, *, is_ingot: bool) -> LoadTarget:
    return LoadTarget(ServerClient(script.url), "name", is_ingot=is_ingot, words=10)


def prompts(script: Script) -> list[str]:
    return [body["messages"][0]["content"] for body in script.bodies]


def test_both_servers_get_the_same_prompts_and_no_prompt_twice() -> None:
    with scripted_server(Script(answer=obedient)) as one, scripted_server(Script(answer=obedient)) as other:
        match = compare("scripted", (target(one, is_ingot=True), target(other, is_ingot=False)), LOAD)
    assert sorted(prompts(one)) == sorted(prompts(other))
    assert len(set(prompts(one))) == len(prompts(one))
    assert [duel.streams for duel in match.duels] == [1, 3]
    assert all(len(duel.ours) == len(duel.theirs) == LOAD.rounds for duel in match.duels)


def test_shorter_answers_than_were_asked_for_are_no_comparison() -> None:
    with (
        scripted_server(Script(answer=obedient)) as one,
        scripted_server(Script(answer=curt)) as other,
        pytest.raises(ServerError, match=r"answers have 1\.0 tokens instead of 4"),
    ):
        compare("scripted", (target(one, is_ingot=True), target(other, is_ingot=False)), LOAD)


def test_a_prompt_is_measured_by_itself_and_beside_a_stream_that_is_left_then() -> None:
    def endless(body: Mapping[str, Any]) -> Answer:
        question = body["messages"][0]["content"].split()
        if len(question) == STREAM_WORDS:
            return Answer(pieces=("a",) * 50_000)  # many more than are read before it is left
        return Answer(pieces=("a",), prompt_tokens=len(question))

    with scripted_server(Script(answer=endless)) as script:
        plan = replace(LOAD.plan("name", 1, 0), output_tokens=1)
        found = measure_beside(target(script, is_ingot=True), plan, 1)
        assert script.left.wait(WAIT_S)
    assert found.alone > 0 and found.kept == found.beside / found.alone
    asked = [len(prompt.split()) for prompt in prompts(script)]
    assert asked == [STREAM_WORDS, 10, 10], "in an odd round the stream comes first"
    assert len(set(prompts(script))) == 3


def test_flags_change_the_usual_load_and_the_quick_one() -> None:
    assert read([])[1] == USUAL
    assert read(["--quick"])[1] == QUICK
    chosen, load = read(["--quick", "--streams", "2,8", "--rounds", "5", "--models", "default"])
    assert (load.streams, load.rounds, load.output_tokens) == ((2, 8), 5, QUICK.output_tokens)
    assert chosen.models == ("default",)


@pytest.mark.parametrize("flags", [["--models", "nobody"], ["--streams", "0"], ["--streams", "a"], ["--rouns", "2"]])
def test_wrong_flags_are_refused(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        read(flags)
    assert ended.value.code == 2
    assert capsys.readouterr().err
