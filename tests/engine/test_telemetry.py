"""What the engine says it has done: it grows as requests run, and stays when one ends early."""

from __future__ import annotations

from ingot.engine.request import Event, Failed, Request, Sampling
from tests import scripted

GREEDY = Sampling(temperature=0)


def asked(engine: scripted.Engine, text: str = "hi") -> tuple[int, ...]:
    return tuple(engine.tokenizer.encode(f"{scripted.OPEN}user\n{text}\n{scripted.ANSWER}", add_special=False))


def answered(engine: scripted.Engine, request: Request) -> list[Event]:
    return [event for batch in engine.generate(request) for event in batch]


def test_tokens_count_while_they_come_and_stay_when_the_request_is_cancelled() -> None:
    engine = scripted.start(lambda prompt: "x" * 100_000)
    try:
        prompt, metrics = asked(engine), engine.figures
        assert (metrics.prompt_tokens, metrics.generated_tokens, metrics.occupied) == (0, 0, 0.0)
        stream = iter(engine.generate(Request("one", (prompt,), sampling=GREEDY)))
        next(stream)
        assert metrics.prompt_tokens == metrics.queried_tokens == len(prompt)
        assert (generated := metrics.generated_tokens) >= 1
        assert 0 < metrics.occupied <= 1
        engine.cancel("one")
        *_, last = (event for batch in stream for event in batch)
        engine.check()  # the engine has done all that ends a request
        assert isinstance(last, Failed)
        assert metrics.generated_tokens == last.usage.completion_tokens >= generated
        assert (metrics.prompt_tokens, metrics.occupied) == (len(prompt), 0.0)
        assert {name: count for name, count in metrics.endings.items() if count} == {"abort": 1}
        assert metrics.request_s.cumulative()[-1] == 0
    finally:
        engine.close()


def test_every_request_that_ends_leaves_its_durations_and_lengths() -> None:
    engine = scripted.start(lambda prompt: "Hello")
    try:
        prompt, metrics = asked(engine), engine.figures
        answered(engine, Request("one", (prompt,), sampling=GREEDY))
        answered(engine, Request("two", (prompt,), max_tokens=3, n=2, sampling=GREEDY))
    finally:
        engine.close()
    assert {name: count for name, count in metrics.endings.items() if count} == {"stop": 1, "length": 1}
    assert metrics.generated_tokens == 6 + 2 * 3
    for times in (
        metrics.request_s,
        metrics.queue_s,
        metrics.prefill_s,
        metrics.decode_s,
        metrics.inference_s,
        metrics.token_s,
    ):
        assert times.cumulative()[-1] == 2
    assert metrics.first_token_s.cumulative()[-1] == 3  # one an answer
    assert metrics.between_tokens_s.cumulative()[-1] == metrics.generated_tokens - 3
    assert (metrics.prompt_lengths.sum, metrics.answer_lengths.sum) == (2 * len(prompt), 12)
    assert (metrics.answers.sum, metrics.answer_limits.sum) == (3, 3)
    assert metrics.longest_answers.sum == 6 + 3
    assert metrics.request_s.sum >= metrics.inference_s.sum + metrics.queue_s.sum - 1e-6
    assert metrics.reasons["unseen"] == metrics.reasons["complete"] == 1
    assert metrics.step_s.cumulative()[-1] == metrics.step_tokens.cumulative()[-1] > 0


def test_memory_that_is_given_back_while_nothing_runs_is_counted_no_more() -> None:
    engine = scripted.start(lambda prompt: "Hello")
    try:
        answered(engine, Request("one", (asked(engine),), sampling=GREEDY))
        assert engine.figures.held_bytes > 0
        engine.kept.clear("")
        for _ in range(100):
            engine.check()  # between two of these the engine rests
            if engine.figures.held_bytes == 0:
                break
        assert (engine.figures.held_bytes, engine.figures.occupied) == (0, 0.0)
        assert engine.figures.active_bytes > 0
    finally:
        engine.close()


def test_nothing_is_guessed_ahead_by_an_engine_that_has_just_started() -> None:
    engine = scripted.start(lambda prompt: "Hello")
    try:
        assert (engine.speculation.drafts, engine.speculation.accepted_per_position) == (0, [])
    finally:
        engine.close()
