from __future__ import annotations

from collections.abc import Iterator

import pytest

from bench.engine import measure, requests
from bench.http_share import Shares, as_json, measure_round
from ingot.cli.bench import LoadPlan, LoadTarget
from ingot.cli.client import ServerClient
from ingot.engine.engine import Engine
from tests import engines, tiny
from tests.cli.scripted import Answer, Script, scripted_server


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    made = engines.start("llama")
    yield made
    made.close()


def test_the_share_is_that_of_the_medians() -> None:
    shares = Shares(8, http=[90.0, 10.0, 95.0], engine=[100.0, 100.0, 200.0])
    assert shares.share == 0.9
    assert shares.share_of_rounds == [0.9, 0.1, 0.475]
    assert as_json("small", [shares])["levels"][0]["http_rounds"] == [90.0, 10.0, 95.0]


def test_the_engine_is_measured_on_answers_of_exactly_the_asked_length(engine: Engine) -> None:
    figures = measure(engine, requests("some", 3, 12, 5, tiny.VOCAB - 1))
    assert figures.streams == 3
    assert figures.tokens_per_second > 0 and figures.decode_tokens_per_second > 0
    assert 0 < figures.ttft_s < 60


def test_requests_are_the_same_for_the_same_name_and_share_no_prompt() -> None:
    first, again, other = (requests(name, 4, 12, 5, 100) for name in ("a", "a", "b"))
    assert [each.prompts for each in first] == [each.prompts for each in again]
    assert len({each.prompts for each in (*first, *other)}) == 8


def test_a_round_asks_the_server_and_the_engine_for_as_much(engine: Engine) -> None:
    with scripted_server(Script(answer=lambda body: Answer(tuple("abcdef"), prompt_tokens=9))) as script:
        target = LoadTarget(ServerClient(script.url), "name", is_ingot=True, words=4)
        plan = LoadPlan(model="name", prompt_tokens=9, output_tokens=6, requests=2)
        through, own = measure_round(target, engine, plan, streams=2, round_=0)
    assert through > 0 and own > 0
    assert len(script.bodies) == 3
