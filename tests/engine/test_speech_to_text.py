"""Transcription in the engine's loop, without mlx: a clock that the test moves, ears that say what they are told."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

import pytest

from ingot.engine.hearing.jobs import TranscriptJobs
from ingot.engine.speech_request import Segment, Transcribed, TranscriptEvent, TranscriptionRequest
from ingot.errors import BadRequest, Cancelled, DeadlineExceeded, IngotError, Overloaded
from ingot.media import worker
from ingot.media.audio import Sound
from tests.hearing import ScriptedEars, offered, timed, tone, wav

SHORT, LONG = wav(tone(3)), wav(tone(95))
PART_MS = 10.0


class Readers(Executor):
    """Sounds are read when the test says so, in its own thread: at once, or after `hold` when it is let go on."""

    def __init__(self) -> None:
        self._held: list[Callable[[], None]] | None = None

    def submit(self, read: Callable[..., Any], /, *arguments: Any, **named: Any) -> Future[Any]:
        future: Future[Any] = Future()

        def run() -> None:
            try:
                future.set_result(read(*arguments, **named))
            except Exception as error:
                future.set_exception(error)

        run() if self._held is None else self._held.append(run)
        return future

    def hold(self) -> None:
        self._held = []

    def go_on(self) -> None:
        held, self._held = self._held or [], None
        for run in held:
            run()


class World:
    """The desk with a clock; each part of the ears' work takes ten milliseconds."""

    def __init__(self, *scripts: list[int], max_queue: int = 100, target_ms: float = 100.0) -> None:
        self.readers = Readers()
        self.now = 0.0
        self.mail: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.ears = ScriptedEars(*(scripts or (timed(0.0, " Hello.", 3.0),)))
        self.ears.meanwhile = self._pass_time
        self.desk = TranscriptJobs(
            offered(self.ears), self.mail.put, max_queue, target_ms, clock=lambda: self.now, readers=self.readers
        )
        self.events: dict[str, list[TranscriptEvent]] = {}

    def _pass_time(self) -> None:
        self.now += PART_MS / 1000

    def ask(self, id: str, sound: bytes = SHORT, **asked: object) -> None:
        events = self.events[id] = []
        self.desk.accept(TranscriptionRequest(id, Sound(sound), language="en", **asked), events.extend)  # type: ignore[arg-type]

    def turn(self, step_s: float = 0.0, *, streaming: bool = False) -> float:
        """One turn of the engine's loop, which waits for mail where it has nothing else to do; the seconds it took."""
        if not self.desk.busy:
            self.desk.rest()
            self.mail.get(timeout=1)()
        while not self.mail.empty():
            self.mail.get()()
        began = self.now
        self.desk.expire(self.now)
        self.desk.advance(step_s, lambda: streaming)
        self.desk.check()
        return self.now - began

    def until_heard(self) -> None:
        """The first window is begun, and no more than that."""
        while not self.ears.windows:
            self.turn(self.desk._target_ms / 1000, streaming=True)

    def until_all_ended(self) -> None:
        for _ in range(1000):
            if not self.desk.status(self.now):
                return
            self.turn()
        raise AssertionError("it does not end")


def texts(events: list[TranscriptEvent]) -> list[str]:
    return [event.text for event in events if isinstance(event, Segment)]


def test_a_transcript_ends_once_with_its_length_and_its_times() -> None:
    world = World()
    world.ask("a")
    world.until_all_ended()
    *segments, last = world.events["a"]
    assert texts(segments) == [" Hello."]
    assert isinstance(last, Transcribed) and last.seconds == 3.0 and last.language == "en" and last.tokens > 5
    assert last.compute_s > 0


def test_beside_a_stream_it_works_for_what_a_step_leaves_of_the_target() -> None:
    world = World(timed(0.0, " All that is said here is long enough for a few turns.", 3.0))
    world.ask("a")
    world.until_heard()
    took = [world.turn(0.060, streaming=True) for _ in range(3)]
    assert max(took) == pytest.approx(0.040, abs=PART_MS / 1000)
    assert world.turn(0.400, streaming=True) == pytest.approx(0.200, abs=PART_MS / 1000)


def test_a_cancelled_sound_gives_its_worker_back() -> None:
    world = World()
    world.ask("a", LONG)
    world.until_heard()
    assert worker.samples.booked > 0
    world.desk.cancel("a")
    world.turn(0.060, streaming=True)
    assert worker.samples.booked == 0


def test_a_cancel_is_felt_within_a_window() -> None:
    world = World()
    world.ask("a")
    world.until_heard()
    assert world.events["a"] == []
    assert world.desk.cancel("a")
    world.turn(0.060, streaming=True)
    assert [type(event) for event in world.events["a"]] == [Cancelled]
    assert not world.desk.cancel("a") and world.desk.status(0.0) == []


def test_a_short_sound_gets_past_a_long_one() -> None:
    """It waits for the window that is under way and for no other: it is read meanwhile."""
    world = World(timed(0.0, " One.", 30.0), timed(0.0, " Short.", 3.0), timed(0.0, " Two.", 30.0))
    world.ask("long", LONG)
    world.until_heard()
    world.ask("short")
    world.until_all_ended()
    assert texts(world.events["short"]) == [" Short."]
    assert texts(world.events["long"])[:2] == [" One.", " Two."]


def test_a_sound_that_is_still_to_be_read_keeps_nobody_from_going_on() -> None:
    world = World(timed(0.0, " One.", 30.0), timed(0.0, " Two.", 30.0), timed(0.0, " Short.", 3.0))
    world.ask("long", LONG)
    world.until_heard()
    world.readers.hold()
    world.ask("short")
    while len(world.ears.windows) < 2:
        world.turn(0.09, streaming=True)
    assert {state.id: state.phase for state in world.desk.status(world.now)} == {"short": "decode", "long": "decode"}
    world.readers.go_on()
    world.until_all_ended()
    assert texts(world.events["short"]) == [" Short."]
    assert texts(world.events["long"])[:2] == [" One.", " Two."]


def test_who_waits_for_a_first_turn_is_queued_though_its_sound_is_read() -> None:
    world = World()
    world.ask("first")
    world.until_heard()
    world.ask("second")
    world.turn(0.09, streaming=True)
    assert {state.id: state.phase for state in world.desk.status(world.now)} == {"first": "decode", "second": "queued"}


def test_a_late_one_ends_with_its_deadline_and_others_go_on() -> None:
    world = World()
    world.ask("late", deadline=0.05)
    world.ask("other")
    world.now = 1.0
    world.until_all_ended()
    assert isinstance(world.events["late"][-1], DeadlineExceeded)
    assert isinstance(world.events["other"][-1], Transcribed)


def test_a_full_queue_and_an_id_that_runs_already_are_refused() -> None:
    world = World(max_queue=1)
    world.ask("a")
    with pytest.raises(BadRequest, match="already running"):
        world.ask("a")
    world.ask("b")
    with pytest.raises(Overloaded, match="queue is full"):
        world.ask("c")


def test_a_model_that_fails_ends_one_request_and_the_others_go_on(caplog: pytest.LogCaptureFixture) -> None:
    world = World()
    world.ask("a")
    world.turn()

    def fail() -> None:
        world.ears.meanwhile = world._pass_time
        raise RuntimeError("the device is gone")

    world.ears.meanwhile = fail
    world.ask("b")
    world.until_all_ended()
    ends = [type(events[-1]) for events in world.events.values()]
    assert sorted(end.__name__ for end in ends) == ["IngotError", "Transcribed"]
    assert "the device is gone" in caplog.text


def test_idle_ears_give_back_their_memory_once() -> None:
    world = World()
    world.ask("a")
    world.until_all_ended()
    world.desk.rest()
    world.desk.rest()
    assert world.ears.rested == 1


def test_nobody_waits_for_ever_when_the_loop_ends() -> None:
    world = World()
    world.ask("a")
    world.turn()
    world.desk.farewell(IngotError("gone"))
    assert [str(event) for event in world.events["a"]] == ["gone"]
    world.desk.close()


def test_a_coroutine_reads_segments_and_its_leaving_cancels() -> None:
    async def read() -> list[str]:
        world = World()
        stream = world.desk.open(TranscriptionRequest("a", Sound(SHORT), language="en"))
        await asyncio.to_thread(world.until_all_ended)
        heard = [type(event).__name__ async for event in stream]
        stream.close()
        left = world.desk.open(TranscriptionRequest("b", Sound(SHORT), language="en"))
        left.close()
        await asyncio.to_thread(world.turn)
        assert world.desk.status(0.0) == []
        return heard

    assert asyncio.run(read()) == ["Segment", "Transcribed"]
