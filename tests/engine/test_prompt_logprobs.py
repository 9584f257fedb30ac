"""Prompts whose logprobs are asked for, beside others, preempted, and under the rules of every device."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ingot.engine.engine import Engine
from ingot.engine.request import Event, PromptScored, Request, Sampling, Stop
from tests import engines

GREEDY = Sampling(temperature=0.0)
LONG = Stop(ignore_eos=True)
PROMPT = tuple((7 * number) % 95 for number in range(150))


@pytest.fixture(scope="module", params=[None, engines.GPU], ids=["here", "gpu"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    made = engines.start("llama", device=request.param, widest=128)
    yield made
    made.check()
    made.close()


def scored(events: list[Event]) -> list[tuple[float, ...]]:
    """The logprobs of each prompt's tokens, rounded to what a sum in another order leaves alone."""
    found = [event for event in events if isinstance(event, PromptScored)]
    return [tuple(round(info.chosen.logprob, 3) for info in event.tokens if info is not None) for event in found]


def read(stream: object) -> list[Event]:
    return [event for batch in stream for event in batch]  # type: ignore[attr-defined]


def test_a_scored_prompt_leaves_its_neighbours_alone_wherever_it_stands(engine: Engine) -> None:
    neighbours = [
        Request(f"n{number}", ((number + 3, *PROMPT[1:]),), max_tokens=16, sampling=GREEDY, stop=LONG)
        for number in range(4)
    ]
    alone = [engines.text_of(engines.answer(engine, request)) for request in neighbours]
    sampling = Sampling(temperature=0.0, prompt_logprobs=1)
    wanted = Request("scored", (PROMPT,), max_tokens=16, sampling=sampling, stop=LONG)
    expected = engines.answer(engine, wanted)
    for place in (0, 2, 4):
        streams = [engine.generate(request) for request in (*neighbours[:place], wanted, *neighbours[place:])]
        found = [read(stream) for stream in streams]
        beside = found.pop(place)
        assert [engines.text_of(events) for events in found] == alone
        assert engines.text_of(beside) == engines.text_of(expected)
        assert scored(beside) == scored(expected) and len(scored(beside)[0]) == len(PROMPT) - 1


@pytest.mark.parametrize("length", [100, 150])
def test_sampled_answers_to_a_scored_prompt_fail_nobody(engine: Engine, length: int) -> None:
    other = Request("other", ((5, 6, 7),), max_tokens=40, sampling=GREEDY, stop=LONG)
    expected = engines.text_of(engines.answer(engine, other))
    sampling = Sampling(seed=4, logprobs=1, prompt_logprobs=1)
    two = engine.generate(Request("two", (PROMPT[:length],), n=2, max_tokens=12, sampling=sampling, stop=LONG))
    assert engines.text_of(engines.answer(engine, other)) == expected
    events = read(two)
    first, second = scored(events)
    assert first == second and engines.text_of(events, 0) != engines.text_of(events, 1)
