from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator

import pytest

from ingot.engine.admission import Admission, EngineLimits
from ingot.engine.engine import Engine
from ingot.engine.output import ActiveRequest
from ingot.engine.request import (
    Ended,
    Event,
    Failed,
    PromptScored,
    Request,
    Sampling,
    SequenceEnded,
    Stop,
    TextDelta,
)
from ingot.engine.streams import EventSink
from ingot.errors import BadRequest, Cancelled, ContextOverflow, DeadlineExceeded, Overloaded, Unavailable
from tests import engines
from tests.waiting import WAIT_S

GREEDY = Sampling(temperature=0.0)
PROMPT = (5, 17, 40)
LONG = Stop(ignore_eos=True)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    made = engines.start("llama")
    yield made
    made.check()
    made.close()


def ends(events: list[Event]) -> list[SequenceEnded]:
    return [event for event in events if isinstance(event, SequenceEnded)]


def read_some(stream: object) -> Event:
    """The first event of a stream that goes on."""
    return next(iter(stream))[0]  # type: ignore[call-overload]


def test_a_stream_ends_in_exactly_one_terminal_event(engine: Engine) -> None:
    events = engines.answer(engine, Request("one", (PROMPT,), max_tokens=9, sampling=GREEDY, stop=LONG))
    assert [isinstance(event, Ended | Failed) for event in events].count(True) == 1
    assert isinstance(events[-1], Ended)
    assert events[-1].usage.prompt_tokens == 3 and events[-1].usage.completion_tokens == 9
    assert ends(events)[0].reason == "length"


def test_every_sequence_of_a_request_ends_once_under_its_own_index(engine: Engine) -> None:
    request = Request("many", (PROMPT, (1, 2)), n=3, max_tokens=4, sampling=Sampling(seed=3), stop=LONG)
    events = engines.answer(engine, request)
    assert sorted(end.index for end in ends(events)) == list(range(6))
    texts = [engines.text_of(events, index) for index in range(6)]
    assert len(set(texts)) == 6
    single = engines.answer(engine, Request("single", (PROMPT,), max_tokens=4, sampling=Sampling(seed=3), stop=LONG))
    assert engines.text_of(single) == texts[0]


def test_a_stop_string_ends_the_text_before_it_and_never_shows(engine: Engine) -> None:
    whole = engines.text_of(engines.answer(engine, Request("w", (PROMPT,), max_tokens=40, sampling=GREEDY, stop=LONG)))
    stop = whole[10:13]
    request = Request("s", (PROMPT,), max_tokens=40, sampling=GREEDY, stop=Stop(strings=(stop,), ignore_eos=True))
    events = engines.answer(engine, request)
    assert engines.text_of(events) == whole[: whole.index(stop)]
    assert ends(events)[0].reason == "stop" and ends(events)[0].stopped_by == stop
    for event in events:
        if isinstance(event, TextDelta):
            assert stop not in event.text


def test_a_stop_token_ends_the_sequence_but_not_before_min_tokens(engine: Engine) -> None:
    whole = engines.answer(engine, Request("w2", (PROMPT,), max_tokens=30, sampling=GREEDY, stop=LONG))
    text = engines.text_of(whole)
    token = engine.tokenizer.encode(text[6], add_special=False)[0]
    first = text.index(text[6])
    early = engines.answer(
        engine,
        Request(
            "t", (PROMPT,), max_tokens=30, sampling=GREEDY, stop=Stop(token_ids=frozenset({token}), ignore_eos=True)
        ),
    )
    assert engines.text_of(early) == text[:first] and ends(early)[0].stopped_by == token
    late = engines.answer(
        engine,
        Request(
            "t2",
            (PROMPT,),
            max_tokens=30,
            sampling=GREEDY,
            stop=Stop(token_ids=frozenset({token}), min_tokens=first + 1, ignore_eos=True),
        ),
    )
    assert len(engines.text_of(late)) > first
    assert text[6] not in engines.text_of(late)[: first + 1]


def test_logprobs_come_with_the_text_they_belong_to(engine: Engine) -> None:
    sampling = Sampling(temperature=0.0, logprobs=3)
    events = engines.answer(engine, Request("l", (PROMPT,), max_tokens=12, sampling=sampling, stop=LONG))
    infos = [info for event in events if isinstance(event, TextDelta) for info in event.tokens]
    assert "".join(info.chosen.text for info in infos) == engines.text_of(events)
    assert all(len(info.top) == 3 and info.top[0].token == info.chosen.token for info in infos)
    total = ends(events)[0].logprob_sum
    assert total == pytest.approx(sum(info.chosen.logprob for info in infos), abs=1e-4)


def test_prompt_logprobs_agree_with_those_of_generating_the_same_tokens(engine: Engine) -> None:
    sampling = Sampling(temperature=0.0, logprobs=0)
    events = engines.answer(engine, Request("g", (PROMPT,), max_tokens=200, sampling=sampling, stop=LONG))
    infos = [info.chosen for event in events if isinstance(event, TextDelta) for info in event.tokens]
    whole = PROMPT + tuple(info.token for info in infos)
    scoring = Sampling(temperature=0.0, prompt_logprobs=2)
    scored = engines.answer(engine, Request("e", (whole,), max_tokens=0, sampling=scoring))
    (prompt,) = [event for event in scored if isinstance(event, PromptScored)]
    assert prompt.tokens[0] is None and len(prompt.tokens) == len(whole)
    again = [token.chosen.logprob for token in prompt.tokens[len(PROMPT) :] if token is not None]
    assert again == pytest.approx([info.logprob for info in infos], abs=1e-3)
    assert isinstance(scored[-1], Ended) and scored[-1].usage.completion_tokens == 0


def test_a_prompt_of_one_token_can_be_scored(engine: Engine) -> None:
    scored = engines.answer(engine, Request("e1", ((5,),), max_tokens=0, sampling=Sampling(prompt_logprobs=1)))
    assert PromptScored(0, (None,)) in scored


def test_a_prompt_over_the_context_is_refused_with_both_numbers(engine: Engine) -> None:
    with pytest.raises(ContextOverflow, match=r"2049.*2048"):
        engine.generate(Request("long", ((1,) * 2048,), max_tokens=5))


def test_an_answer_ends_where_the_context_does(engine: Engine) -> None:
    events = engines.answer(engine, Request("edge", ((1,) * 2040,), sampling=GREEDY, stop=LONG))
    assert ends(events)[0].reason == "length" and ends(events)[0].completion_tokens == 8


@pytest.mark.parametrize("prompt", [(), (96,), (-1,)])
def test_a_prompt_that_is_empty_or_outside_the_vocabulary_is_refused(engine: Engine, prompt: tuple[int, ...]) -> None:
    with pytest.raises(BadRequest):
        engine.generate(Request("bad", (prompt,), max_tokens=5))


def test_a_cancel_while_decoding_releases_everything(engine: Engine) -> None:
    stream = engine.generate(Request("c", (PROMPT,), sampling=GREEDY, stop=LONG))
    events = iter(stream)
    next(events)
    assert engine.cancel("c")
    last = list(events)[-1]
    assert isinstance(last[-1], Failed) and isinstance(last[-1].error, Cancelled)
    engine.check()
    assert engine.status() == [] and not engine.cancel("c")


def test_a_cancel_in_the_queue_and_in_prefill_releases_everything() -> None:
    engine = engines.start("llama", widest=16, limits=EngineLimits(max_sequences=1))
    first = engine.generate(Request("prefill", ((3,) * 2000,), max_tokens=1, sampling=GREEDY))
    queued = engine.generate(Request("queued", (PROMPT,), max_tokens=5, sampling=GREEDY))
    assert engine.cancel("queued") and engine.cancel("prefill")
    for stream in (queued, first):
        last = list(stream)[-1][-1]
        assert isinstance(last, Failed) and isinstance(last.error, Cancelled)
    engine.check()
    after = engines.answer(engine, Request("after", (PROMPT,), max_tokens=3, sampling=GREEDY, stop=LONG))
    assert isinstance(after[-1], Ended)
    engine.close()


def test_a_deadline_ends_a_request_that_is_still_running(engine: Engine) -> None:
    request = Request("d", (PROMPT,), sampling=GREEDY, stop=LONG, deadline=time.monotonic() + 0.05)
    events = engines.answer(engine, request)
    assert isinstance(events[-1], Failed) and isinstance(events[-1].error, DeadlineExceeded)
    engine.check()


def test_a_full_queue_refuses_with_a_time_to_come_back() -> None:
    engine = engines.start("llama", limits=EngineLimits(max_sequences=1, max_queue=2))
    running = engine.generate(Request("run", (PROMPT,), sampling=GREEDY, stop=LONG))
    read_some(running)
    for number in range(2):
        engine.generate(Request(f"wait{number}", (PROMPT,), max_tokens=1, sampling=GREEDY))
    with pytest.raises(Overloaded) as refused:
        engine.generate(Request("more", (PROMPT,), max_tokens=1, sampling=GREEDY))
    assert refused.value.retry_after is not None and refused.value.retry_after >= 1
    engine.close()
    with pytest.raises(Unavailable):
        engine.generate(Request("late", (PROMPT,), max_tokens=1))


def test_status_tells_what_runs_and_what_waits() -> None:
    engine = engines.start("llama", limits=EngineLimits(max_sequences=1))
    running = engine.generate(Request("run", (PROMPT,), sampling=GREEDY, stop=LONG))
    read_some(running)
    engine.generate(Request("wait", (PROMPT,), max_tokens=1, sampling=GREEDY))
    phases = {status.id: status.phase for status in engine.status()}
    assert phases == {"run": "decode", "wait": "queued"}
    health = engine.health()
    assert health.alive and health.ready and health.running == 1 and health.queued == 1
    engine.close()
    assert not engine.health().alive


def test_a_step_that_fails_fails_its_requests_and_not_the_engine(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ingot.engine.runner import Runner

    def broken(*_: object) -> None:
        raise RuntimeError("device lost")

    with monkeypatch.context() as patch:
        patch.setattr(Runner, "launch", broken)
        events = engines.answer(engine, Request("x", (PROMPT,), max_tokens=5, sampling=GREEDY))
    assert isinstance(events[-1], Failed) and "device lost" not in events[-1].error.message
    after = engines.answer(engine, Request("y", (PROMPT,), max_tokens=5, sampling=GREEDY, stop=LONG))
    assert isinstance(after[-1], Ended)
    engine.check()


def test_states_are_given_back_when_nothing_runs(engine: Engine) -> None:
    engines.answer(engine, Request("z", ((1,) * 500,), max_tokens=5, sampling=GREEDY))
    engine.check()
    engine.check()  # the first one may come before the engine found itself idle
    rows = engines.runner_of(engine).rows
    held = sum(group.pages.kept * group.page_bytes for group in rows.groups)
    assert rows.nbytes <= 1.25 * held + rows.slot_bytes + 4 * sum(group.page_bytes for group in rows.groups)
    engine.kept.clear("")
    engine.check()
    engine.check()
    assert rows.nbytes <= rows.slot_bytes


def test_many_threads_may_open_and_cancel_at_once(engine: Engine) -> None:
    def work(number: int) -> None:
        for round_ in range(6):
            request = Request(f"t{number}-{round_}", ((number + 1,) * (number + 1),), max_tokens=20, sampling=GREEDY)
            stream = engine.generate(request)
            if (number + round_) % 3 == 0:
                engine.cancel(request.id)
            last = list(stream)[-1][-1]
            assert isinstance(last, Ended | Failed)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    engine.check()
    assert engine.status() == []


def test_a_request_is_looked_at_beside_the_loop_and_one_that_nobody_waits_for_any_more_is_not_run(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_the_door, let_in = threading.Event(), threading.Event()
    enter = Admission.enter

    def slow(self: Admission, request: Request, reader: EventSink) -> ActiveRequest:
        at_the_door.set()
        assert let_in.wait(WAIT_S)
        return enter(self, request, reader)

    monkeypatch.setattr(Admission, "enter", slow)

    async def leave_early() -> None:
        opening = asyncio.ensure_future(engine.open(Request("gone", (PROMPT,), sampling=GREEDY, stop=LONG)))
        await asyncio.to_thread(at_the_door.wait, WAIT_S)  # the loop goes on meanwhile
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
        let_in.set()

    asyncio.run(leave_early())  # waits for the threads that it began
    engine.check()  # after which the engine has read its mail
    assert not engine.status()


def test_a_slow_step_is_logged(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("ingot.engine.telemetry.SLOW_STEP_S", 0.0)
    engines.answer(engine, Request("slow", (PROMPT,), max_tokens=2, sampling=GREEDY, stop=LONG))
    assert "a step took 0.0 s: 0 rows decoding, 3 prompt tokens of 1 sequence," in caplog.text
