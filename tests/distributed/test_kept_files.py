"""`ingot serve` over ranks with a folder for what is kept: stopped and started again, and killed while it writes."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import pytest

from ingot.cache.disk.survey import FolderSurvey
from tests import tiny
from tests.distributed.groups import write_model
from tests.distributed.serving import LOADED_S, Group, engines, is_gone, started, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")]
KILLS = 5
WORDS = "one two three four five six seven eight nine ten eleven twelve "


def command(folder: Path) -> list[str]:
    request = {"--cache-dir": folder / "kept", "--cache-disk-free-gb": 0}
    return [*engines(folder, 2), *(str(word) for pair in request.items() for word in pair)]


def ask(group: Group, number: int) -> tuple[str, int] | None:
    """What is answered to a long prompt, and how many of its tokens were taken over; None where the group is gone."""
    messages = [{"role": "user", "content": f"{number}: " + WORDS * 8}]
    body = {"model": "default", "messages": messages, "max_tokens": 6, "temperature": 0, "ignore_eos": True}
    status, message = group._ask("POST", "/v1/chat/completions", json.dumps(body))
    if status in (0, 503):
        return None
    assert status == 200, message
    answer = json.loads(message)
    return answer["choices"][0]["message"]["content"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_a_server_that_is_stopped_and_started_again_goes_on_where_it_was(tmp_path: Path) -> None:
    write_model(tmp_path, tiny.CONFIGS["llama"])
    answers = []
    for _ in range(2):
        with started(command(tmp_path)) as group:
            answers.append(ask(group, 0))
            group.parent.send_signal(signal.SIGTERM)
            assert group.parent.wait(LOADED_S) == 0
    (first, nothing), (again, used) = (answer or ("", -1) for answer in answers)
    assert first == again and nothing == 0 < 64 < used
    survey = FolderSurvey.of(tmp_path / "kept")
    assert len(survey.scopes) == 2 and len({len(scope.files) for scope in survey.scopes}) == 1
    assert {scope.about["part"] for scope in survey.scopes} == {"tensor, rank 0 of 2", "tensor, rank 1 of 2"}


def test_ranks_that_are_killed_while_they_write_leave_nothing_but_misses(tmp_path: Path) -> None:
    write_model(tmp_path, tiny.CONFIGS["llama"])
    dice = random.Random(3)
    answers: dict[int, str] = {}

    def same(group: Group, number: int) -> None:
        answer = ask(group, number)
        if answer is not None:
            assert answers.setdefault(number, answer[0]) == answer[0]

    with started(command(tmp_path)) as group:
        for kill in range(KILLS):
            same(group, kill)
            ranks = group.ranks
            time.sleep(dice.uniform(0.0, 0.05))  # when nothing runs it is written what was kept
            os.kill(dice.choice(ranks), signal.SIGKILL)
            wait_until(lambda ranks=ranks: all(map(is_gone, ranks)))  # type: ignore[misc]
            group.await_ready()
            for number in range(kill + 1):
                same(group, number)
        assert len(answers) == KILLS
    assert not [*FolderSurvey.of(tmp_path / "kept").problems()]
