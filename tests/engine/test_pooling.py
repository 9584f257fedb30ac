"""Encoders in the engine's loop, without mlx: a clock that the test moves, and models that count."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingot.engine.pooling import UNMEASURED_TOKENS, PoolingWorkload
from ingot.engine.request import PoolingOutput, PoolingRequest
from ingot.errors import BadRequest, Cancelled, DeadlineExceeded, IngotError, InputTooLong, Overloaded
from ingot.text.tokenizer.encoder_inputs import EncoderInput
from tests.encoders import LENGTH, VOCAB, CountingEncoder, offered, row_of


class World:
    """The desk with a clock; each part of an encoder's work takes as long as its batch has tokens, padding included."""

    def __init__(self, *, max_queue: int = 100, parts: int = 4, target_ms: float = 100.0, ms_a_token: float = 1.0):
        self.now = 0.0
        self.mail: list[Callable[[], None]] = []
        self.ms_a_token = ms_a_token
        self.model = CountingEncoder(parts)
        self.model.meanwhile = self.pass_time
        self.desk = PoolingWorkload(
            offered("embedding", self.model), self.mail.append, max_queue, target_ms, clock=lambda: self.now
        )
        self.answers: dict[str, PoolingOutput | IngotError] = {}

    def pass_time(self) -> None:
        batch = self.model.batches[-1]
        padded = len(batch) * max(len(row) for row in batch)
        self.now += padded * self.ms_a_token / 1000 / self.model.parts

    def ask(self, id: str, *lengths: int, deadline: float | None = None) -> PoolingRequest:
        inputs = tuple(EncoderInput(tuple(range(1, length + 1))) for length in lengths)
        request = PoolingRequest(id, "embedding", inputs, deadline=deadline, arrived=self.now)

        def reply(answer: PoolingOutput | IngotError) -> None:
            assert id not in self.answers, "answered twice"
            self.answers[id] = answer

        self.desk.accept(request, reply)
        return request

    def turn(self, step_s: float = 0.0, *, streaming: bool = False) -> float:
        """One turn of the engine's loop; the seconds that the encoders took of it."""
        while self.mail:
            self.mail.pop(0)()
        began = self.now
        self.desk.expire(self.now)
        self.desk.advance(step_s, lambda: streaming)
        self.desk.check()
        return self.now - began

    def finish(self) -> None:
        for _ in range(10_000):
            if not self.desk.busy:
                return
            self.turn()
        raise AssertionError("encodings are left over")

    def rows(self, id: str) -> list[Any]:
        answer = self.answers[id]
        assert isinstance(answer, PoolingOutput), answer
        return list(answer.rows)


def test_rows_come_back_in_the_order_of_the_inputs() -> None:
    world = World()
    request = world.ask("a", 3, 40, 1, 7, 40)
    world.finish()
    assert world.rows("a") == [row_of(piece.tokens) for piece in request.inputs]
    answer = world.answers["a"]
    assert isinstance(answer, PoolingOutput) and answer.tokens == 91 and answer.compute_s > 0


def test_inputs_of_like_length_are_computed_together_whoever_sent_them() -> None:
    world = World()
    world.ask("a", 20)
    world.ask("b", 21, 60, 22)
    world.finish()
    assert [sorted(map(len, batch)) for batch in world.model.batches] == [[20, 21, 22], [60]]


def test_a_batch_never_exceeds_the_token_budget_with_its_padding() -> None:
    world = World()
    for number in range(30):
        world.ask(str(number), *(random.Random(number).randint(1, LENGTH) for _ in range(9)))
    world.finish()
    for batch in world.model.batches:
        assert len(batch) * max(map(len, batch)) <= 256


def test_a_very_short_text_does_not_pad_a_long_one() -> None:
    world = World()
    world.ask("a", 60, 3, 60, 3)
    world.finish()
    assert [sorted(map(len, batch)) for batch in world.model.batches] == [[60, 60], [3, 3]]


def test_between_two_steps_of_a_stream_encoders_take_what_the_step_left_of_the_target() -> None:
    world = World(parts=10)
    world.ask("warm", 10)
    world.finish()
    world.ask("library", *[10] * 200)
    taken = [world.turn(0.03, streaming=True) for _ in range(20)]
    assert max(taken) <= 0.08 and sum(taken) >= 20 * 0.05, taken


def test_an_input_longer_than_a_turn_is_computed_over_several() -> None:
    world = World(parts=10, ms_a_token=10.0)
    world.ask("long", LENGTH)
    taken = []
    while world.desk.busy:
        taken.append(world.turn(0.03, streaming=True))
    assert len(taken) > 3 and all(seconds <= 0.14 for seconds in taken)
    assert world.rows("long")


def test_encoders_go_on_beside_steps_that_take_longer_than_the_target() -> None:
    world = World(parts=4)
    world.ask("warm", 10)
    world.finish()
    world.ask("a", *[10] * 40)
    assert 0.1 <= world.turn(0.4, streaming=True) <= 0.22


def test_where_nobody_streams_a_turn_takes_a_second_at_most() -> None:
    world = World(parts=4)
    world.ask("warm", 10)
    world.finish()
    world.ask("library", *[50] * 300)
    assert max(world.turn() for _ in range(10)) <= 1.0


def test_a_question_gets_past_a_library_and_the_library_is_still_done() -> None:
    world = World(parts=1)
    world.ask("library", *[50] * 400)
    world.turn()
    world.turn()
    world.ask("question", 8)
    for _ in range(3):
        world.turn()
    assert "question" in world.answers and "library" not in world.answers
    world.finish()
    assert len(world.rows("library")) == 400


def test_questions_that_never_stop_do_not_starve_the_library() -> None:
    world = World(parts=1)
    world.ask("library", *[60] * 20)
    for number in range(400):
        world.ask(f"question {number}", 8)
        world.turn()
        if "library" in world.answers:
            return
    raise AssertionError("the library was never done")


def test_before_anything_was_measured_a_batch_is_small() -> None:
    world = World()
    world.ask("a", *[60] * 100)
    world.turn(streaming=True)
    assert len(world.model.batches[0]) * 60 <= UNMEASURED_TOKENS


def test_a_cancelled_encoding_ends_at_once_and_its_work_is_dropped() -> None:
    world = World(parts=100, ms_a_token=1000.0)
    world.ask("a", 30)
    world.turn(streaming=True)
    assert world.desk.cancel("a")
    world.turn(streaming=True)
    assert isinstance(world.answers["a"], Cancelled) and not world.desk.busy
    assert not world.desk.cancel("a")


def test_a_cancel_leaves_the_others_of_its_batch_alone() -> None:
    world = World(parts=100, ms_a_token=100.0)
    world.ask("a", 30)
    world.ask("b", 30)
    world.turn(streaming=True)
    world.desk.cancel("a")
    world.finish()
    assert isinstance(world.answers["a"], Cancelled) and world.rows("b")


def test_a_deadline_ends_an_encoding_that_waits_or_runs() -> None:
    world = World(parts=100, ms_a_token=100.0)
    world.ask("runs", 30, deadline=0.5)
    world.turn(streaming=True)
    world.ask("waits", 30, deadline=0.5)
    world.now = 0.6
    world.turn(streaming=True)
    assert isinstance(world.answers["runs"], DeadlineExceeded) and isinstance(world.answers["waits"], DeadlineExceeded)


def test_a_full_queue_refuses_with_a_time_to_come_back() -> None:
    world = World(max_queue=2)
    for number in range(3):
        world.ask(str(number), 10)
    with pytest.raises(Overloaded, match="at most 2") as refused:
        world.ask("more", 10)
    assert refused.value.retry_after is not None and refused.value.retry_after >= 1
    world.finish()
    world.ask("later", 10)


def test_a_model_that_fails_fails_its_batch_and_not_the_engine() -> None:
    world = World()
    world.model.failure = RuntimeError("device lost")
    world.ask("a", 10)
    world.finish()
    failed = world.answers["a"]
    assert isinstance(failed, IngotError) and "device lost" not in failed.message
    world.model.failure = None
    world.ask("b", 10)
    world.finish()
    assert world.rows("b")


def test_beginning_anew_ends_everybody_and_drops_the_work() -> None:
    world = World(parts=10, ms_a_token=10.0)
    for id in ("running", "waiting"):
        world.ask(id, LENGTH, LENGTH)
    world.turn(0.03, streaming=True)
    failed = IngotError("the encoders failed")
    world.desk.reset_after_fault(failed)
    assert world.answers == {"running": failed, "waiting": failed}
    world.desk.rest()  # which checks the books
    world.ask("next", 5)
    world.finish()
    assert world.rows("next")


def test_numbers_that_are_none_are_an_error() -> None:
    world = World()
    run = world.model.run

    def broken(tokens: Any, types: Any) -> Any:
        rows = yield from run(tokens, types)
        rows[0][0] = float("nan")
        return rows

    world.model.run = broken  # type: ignore[method-assign]
    world.ask("a", 10)
    world.finish()
    assert isinstance(world.answers["a"], IngotError)


@pytest.mark.parametrize(
    ("tokens", "error"),
    [((), BadRequest), ((VOCAB,), BadRequest), ((-1,), BadRequest), ((1,) * (LENGTH + 1), InputTooLong)],
)
def test_what_cannot_be_computed_is_refused_at_once(tokens: tuple[int, ...], error: type[Exception]) -> None:
    world = World()
    with pytest.raises(error):
        world.desk.accept(PoolingRequest("x", "embedding", (EncoderInput((1,)), EncoderInput(tokens))), lambda _: None)
    with pytest.raises(BadRequest):
        world.desk.accept(PoolingRequest("x", "embedding", ()), lambda _: None)
    assert not world.desk.busy


def test_status_says_how_far_an_encoding_is() -> None:
    world = World(parts=1)
    world.ask("a", 60, 60, 60, 60, 60, 60, 60, 60, 60)
    assert [status.phase for status in world.desk.status(0.0)] == ["queued"]
    world.turn()
    (status,) = world.desk.status(world.now)
    assert (status.phase, status.prompt_tokens, status.prefilled_tokens) == ("prefill", 540, 240)


def test_resting_gives_back_what_was_used_and_only_that() -> None:
    world = World()
    world.ask("a", 10)
    world.finish()
    world.desk.rest()
    world.desk.rest()
    assert world.model.rested == 1


async def _until_queued(world: World) -> None:
    while not world.desk.busy:
        await asyncio.sleep(0.001)


async def _leaving(world: World) -> None:
    waiting = asyncio.ensure_future(world.desk.encode(PoolingRequest("a", "embedding", (EncoderInput((1,)),))))
    await _until_queued(world)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)


def test_a_coroutine_that_stops_waiting_cancels_the_work() -> None:
    world = World()
    asyncio.run(_leaving(world))
    world.turn()
    assert not world.desk.busy


async def _answered(world: World) -> PoolingOutput:
    waiting = asyncio.ensure_future(
        world.desk.encode(PoolingRequest("a", "embedding", (EncoderInput((1, 2)),), arrived=0.0))
    )
    await _until_queued(world)
    world.finish()
    return await waiting


def test_a_coroutine_gets_the_numbers() -> None:
    assert list(asyncio.run(_answered(World())).rows) == [row_of((1, 2))]


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), st.lists(st.integers(1, LENGTH), min_size=1, max_size=12), st.none()),
        st.tuples(st.just("turn"), st.floats(0, 0.3), st.booleans()),
        st.tuples(st.just("cancel"), st.integers(0, 30), st.none()),
    ),
    max_size=60,
)


@given(actions=ACTIONS)
def test_whatever_comes_everybody_is_answered_once_and_rightly(actions: list[tuple[str, Any, Any]]) -> None:
    world = World(max_queue=1000)
    asked: dict[str, PoolingRequest] = {}
    for kind, what, how in actions:
        if kind == "ask":
            id = str(len(asked))
            asked[id] = world.ask(id, *what)
        elif kind == "turn":
            world.turn(what, streaming=how)
        else:
            world.desk.cancel(str(what))
    world.finish()
    world.desk.check()
    assert set(world.answers) == set(asked)
    for id, request in asked.items():
        if isinstance(world.answers[id], PoolingOutput):
            assert world.rows(id) == [row_of(piece.tokens) for piece in request.inputs]
