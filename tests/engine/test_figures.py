"""What the engine says it has read and written: it grows as requests run, and stays when one ends early."""

from __future__ import annotations

from ingot.engine.request import Failed, Request, Sampling
from ingot.observe.figures import Figures, Traffic
from tests import scripted


def test_tokens_count_while_they_come_and_stay_when_the_request_is_cancelled() -> None:
    engine = scripted.start(lambda prompt: "x" * 100_000)
    try:
        prompt = tuple(engine.tokenizer.encode(f"{scripted.OPEN}user\nhi\n{scripted.ANSWER}", add_special=False))
        assert engine.figures() == Figures(Traffic(), 0.0)
        stream = iter(engine.generate(Request("one", (prompt,), sampling=Sampling(temperature=0))))
        next(stream)
        during = engine.figures()
        assert during.traffic.prompt == during.traffic.asked == len(prompt)
        assert during.traffic.generated >= 1
        assert 0 < during.occupied <= 1
        engine.cancel("one")
        *_, last = (event for batch in stream for event in batch)
        after = engine.figures()
    finally:
        engine.close()
    assert isinstance(last, Failed)
    assert after.traffic.generated == last.usage.completion_tokens >= during.traffic.generated
    assert (after.traffic.prompt, after.occupied) == (len(prompt), 0.0)


def test_nothing_is_guessed_ahead_by_an_engine_that_has_just_started() -> None:
    engine = scripted.start(lambda prompt: "Hello")
    try:
        assert (engine.speculation.drafts, engine.speculation.accepted_per_position) == (0, [])
    finally:
        engine.close()
