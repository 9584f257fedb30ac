"""Speech beside steps: turns, bounded time, and one end for each."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import numpy as np
import pytest

from ingot.engine.speech_request import SpeechAudio, SpeechEnded, SpeechEvent, SpeechRequest
from ingot.engine.text_to_speech import SpeechWorkload
from ingot.errors import Cancelled, DeadlineExceeded, IngotError, Overloaded
from tests.speaking import ScriptedMouth, offered

PART_S = 0.02


class World:
    """A desk whose clock goes on with each part of work."""

    def __init__(self, *, max_queue: int = 8, parts: int = 4) -> None:
        self.mouth, self.now, self.mail = ScriptedMouth(parts), 100.0, list[Callable[[], None]]()
        self.mouth.meanwhile = self._pass_time
        self.desk = SpeechWorkload(offered(self.mouth), self.mail.append, max_queue, 50.0, lambda: self.now)
        self.told: dict[str, list[SpeechEvent]] = {}

    def _pass_time(self) -> None:
        self.now += PART_S

    def ask(self, name: str, *pieces: str, deadline: float | None = None) -> None:
        request = SpeechRequest(name, pieces, "af_heart", deadline=deadline, arrived=self.now)
        self.desk.accept(request, self.told.setdefault(name, []).extend)

    def turn(self, spent_s: float = 0.03, *, streaming: bool = True) -> None:
        mail, self.mail[:] = list(self.mail), []
        for letter in mail:
            letter()
        self.desk.expire(self.now)
        self.desk.advance(spent_s, lambda: streaming)
        self.desk.check()

    def finish(self) -> None:
        while self.desk.busy or self.mail:
            self.turn()
        self.desk.rest()


def test_pieces_are_told_as_they_are_spoken_and_then_the_end() -> None:
    world = World()
    world.ask("one", "abc", "de")
    world.finish()
    first, second, ended = world.told["one"]
    assert isinstance(first, SpeechAudio) and isinstance(second, SpeechAudio)
    assert np.frombuffer(first.samples, "<i2").tolist() == [0] * 10 + [327] * 10 + [655] * 10
    assert isinstance(ended, SpeechEnded) and (ended.phonemes, ended.samples) == (5, 50)
    assert world.mouth.rested == 1


def test_a_turn_takes_what_the_step_left_of_the_target() -> None:
    world = World(parts=100)
    world.ask("one", "abc")
    before = world.now
    world.turn(0.03)
    assert world.now - before == pytest.approx(PART_S)
    before = world.now
    world.turn(streaming=False)
    assert world.now - before == pytest.approx(1.0, abs=PART_S)


def test_of_several_each_has_a_piece_in_turn() -> None:
    world = World()
    world.ask("one", "aa", "bb")
    world.ask("two", "cc", "dd")
    world.finish()
    assert [piece for piece, _, _ in world.mouth.spoken] == ["aa", "cc", "bb", "dd"]


def test_a_cancel_ends_within_a_part() -> None:
    world = World(parts=100)
    world.ask("one", "abc")
    world.turn()
    assert world.desk.cancel("one") and not world.desk.cancel("two")
    before = world.now
    world.turn()
    (end,) = world.told["one"]
    assert isinstance(end, Cancelled) and world.now == before and not world.desk.busy


def test_deadlines_end_it() -> None:
    world = World(parts=100)
    world.ask("one", "abc", deadline=100.05)
    world.finish()
    assert isinstance(world.told["one"][-1], DeadlineExceeded)


def test_a_fault_belongs_to_its_request() -> None:
    world = World()
    world.ask("one", "abc")
    world.ask("two", "abc")

    def fail() -> None:
        world.mouth.meanwhile = world._pass_time
        raise RuntimeError("the device is on fire")

    world.mouth.meanwhile = fail
    world.finish()
    assert type(world.told["one"][-1]) is IngotError and isinstance(world.told["two"][-1], SpeechEnded)


def test_a_full_queue_refuses() -> None:
    world = World(max_queue=0)
    world.ask("one", "abc")
    with pytest.raises(Overloaded, match="texts to speak wait"):
        world.ask("two", "abc")


def test_a_stream_that_is_closed_cancels() -> None:
    async def leave() -> None:
        world = World(parts=100)
        stream = world.desk.open(SpeechRequest("one", ("abc",), "af_heart"))
        world.turn()
        stream.close()
        world.turn()
        assert not world.desk.busy

    asyncio.run(leave())
