"""Transcription in the engine's loop, without mlx: a clock that the test moves, ears that say what they are told."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

import numpy as np
import pytest

from ingot.engine.speech_request import Segment, TranscriptEvent, TranscriptionEnded, TranscriptionRequest
from ingot.engine.speech_to_text import (
    WINDOW_FRAMES,
    MelFrameReader,
    TranscriptionRun,
    TranscriptionWorkload,
    read_mel_frames,
)
from ingot.engine.whisper_decoding import TEMPERATURES, SpeechToTextModel, WindowDecoder
from ingot.errors import BadMedia, BadRequest, Cancelled, DeadlineExceeded, IngotError, Overloaded
from ingot.media import worker
from ingot.media.audio import AudioFile
from ingot.text.tokenizer.whisper import WhisperVocabulary
from tests.hearing import ScriptedEars, offered, timed, tone, vocabulary, wav

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
        self.desk = TranscriptionWorkload(
            offered(self.ears), self.mail.put, max_queue, target_ms, clock=lambda: self.now, readers=self.readers
        )
        self.events: dict[str, list[TranscriptEvent]] = {}

    def _pass_time(self) -> None:
        self.now += PART_MS / 1000

    def ask(self, id: str, sound: bytes = SHORT, **asked: object) -> None:
        events = self.events[id] = []
        self.desk.accept(TranscriptionRequest(id, AudioFile(sound), language="en", **asked), events.extend)  # type: ignore[arg-type]

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
    assert isinstance(last, TranscriptionEnded) and last.seconds == 3.0 and last.language == "en" and last.tokens > 5
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
    assert worker.audio_pool.booked > 0
    world.desk.cancel("a")
    world.turn(0.060, streaming=True)
    assert worker.audio_pool.booked == 0


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
    assert isinstance(world.events["other"][-1], TranscriptionEnded)


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
    assert sorted(end.__name__ for end in ends) == ["IngotError", "TranscriptionEnded"]
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
        stream = world.desk.open(TranscriptionRequest("a", AudioFile(SHORT), language="en"))
        await asyncio.to_thread(world.until_all_ended)
        heard = [type(event).__name__ async for event in stream]
        stream.close()
        left = world.desk.open(TranscriptionRequest("b", AudioFile(SHORT), language="en"))
        left.close()
        await asyncio.to_thread(world.turn)
        assert world.desk.status(0.0) == []
        return heard

    assert asyncio.run(read()) == ["Segment", "TranscriptionEnded"]


BYTES = vocabulary()


class AtOnce:
    """An executor that does it now; what it answers comes by mail."""

    def submit(self, work: Callable[[], object]) -> Future[object]:
        done: Future[object] = Future()
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)
        return done


def transcribed(
    ears: SpeechToTextModel, sound: bytes, vocabulary: WhisperVocabulary = BYTES, **asked: object
) -> tuple[list[Segment], TranscriptionRun]:
    mail: list[Callable[[], None]] = []
    request = TranscriptionRequest("a", AudioFile(sound), **{"language": "en", **asked})  # type: ignore[arg-type]
    frames = MelFrameReader(request.audio, 80, AtOnce(), mail.append)  # type: ignore[arg-type]
    transcript = TranscriptionRun(request, frames, ears, vocabulary, WindowDecoder(ears, vocabulary))
    segments: list[Segment] = []
    for said in transcript.work():
        segments += said or ()
        if said is None:
            assert mail, "it waits, and nothing comes"
            mail.pop(0)()
    return segments, transcript


def test_segments_have_the_times_that_were_written() -> None:
    ears = ScriptedEars(timed(0.0, " Hello.", 2.0, 2.0, " World.", 4.5))
    segments, transcript = transcribed(ears, wav(tone(5)))
    assert [(one.id, one.start, one.end, one.text) for one in segments] == [
        (0, 0.0, 2.0, " Hello."),
        (1, 2.0, 4.5, " World."),
    ]
    assert transcript.seek == 500 and len(ears.windows) == 1
    assert ears.windows[0].shape == (WINDOW_FRAMES, 80)


def test_what_is_cut_off_by_a_windows_end_is_heard_again_with_the_next() -> None:
    ears = ScriptedEars(timed(0.0, " One.", 20.0, 20.0, " Tw"), timed(0.0, " Two.", 15.0))
    segments, _ = transcribed(ears, wav(tone(35)))
    assert [(one.start, one.end, one.text, one.seek) for one in segments] == [
        (0.0, 20.0, " One.", 0),
        (20.0, 35.0, " Two.", 2000),
    ]


def test_later_windows_are_told_what_came_before_and_the_prompt() -> None:
    ears = ScriptedEars(timed(0.0, " One.", 30.0), timed(0.0, " Two.", 5.0))
    transcribed(ears, wav(tone(35)), prompt="Names: Ann")
    known = vocabulary()
    first, second = (writing.pushed for writing in ears.writings)
    assert first[: len(" Names: Ann") + 1] == [known.before, *known.encode(" Names: Ann")]
    assert second[:1] == [known.before] and known.encode(" One.") == [t for t in second if t < known.end][11:16]


def test_silence_says_nothing_and_is_not_even_listened_to() -> None:
    ears = ScriptedEars(timed(0.0, " you", 2.0))
    segments, transcript = transcribed(ears, wav(np.zeros(16_000 * 61, np.float32)))
    assert segments == [] and ears.windows == [] and transcript.seek == 6100


def test_a_guess_where_silence_is_likely_says_nothing() -> None:
    ears = ScriptedEars(timed(0.0, " you", 2.0), sureness=2.0, silence=12.0)
    segments, transcript = transcribed(ears, wav(tone(3)))
    assert segments == [] and transcript.seek == 300 and len(ears.writings) == 1


def test_text_that_goes_round_in_circles_is_tried_again_and_warmer() -> None:
    ears = ScriptedEars(timed(0.0, " no" * 60, 3.0))
    segments, _ = transcribed(ears, wav(tone(3)))
    assert [one.temperature for one in segments] == [TEMPERATURES[-1]]
    assert segments[0].compression_ratio > 2.4


def test_a_temperature_that_is_asked_for_is_the_only_one() -> None:
    ears = ScriptedEars(timed(0.0, " no" * 60, 3.0))
    segments, _ = transcribed(ears, wav(tone(3)), temperature=0.3)
    assert [one.temperature for one in segments] == [0.3]


def test_a_language_is_found_out_by_the_first_window() -> None:
    ears = ScriptedEars(timed(0.0, " Hallo.", 3.0))
    german = vocabulary().languages["de"]
    ears.opening = vocabulary().opening("de", "transcribe")
    begun = ears.write

    def write(heard: int):  # type: ignore[no-untyped-def]
        writing = begun(heard)
        push = writing.push

        def pushed(tokens, asked):  # type: ignore[no-untyped-def]
            scores = push(tokens, asked)
            scores[:, german] += 30 if list(tokens) == [vocabulary().start] else 0
            return scores

        writing.push = pushed  # type: ignore[method-assign]
        return writing

    ears.write = write  # type: ignore[method-assign]
    segments, transcript = transcribed(ears, wav(tone(3)), language=None)
    assert transcript.language == "de" and segments[0].text == " Hallo."
    assert ears.writings[0].pushed[1:3] == [german, vocabulary().transcribe]


def test_words_are_told_where_they_are_asked_for() -> None:
    ears = ScriptedEars(timed(0.0, " Oh, no.", 2.0))
    segments, _ = transcribed(ears, wav(tone(3)), words=True)
    assert [one.text for one in segments[0].words] == [" Oh,", " no."]
    begins = [one.start for one in segments[0].words]
    assert begins == sorted(begins) and all(one.start <= one.end <= 2.0 for one in segments[0].words)
    assert all(0.9 < one.probability <= 1.0 for one in segments[0].words)


def test_the_tokens_of_text_carry_their_probabilities() -> None:
    segments, _ = transcribed(ScriptedEars(timed(0.0, " Hé", 2.0)), wav(tone(3)))
    assert b"".join(one.bytes for one in segments[0].text_tokens).decode() == " Hé"
    assert all(-0.1 < one.logprob <= 0 for one in segments[0].text_tokens)


def test_a_sound_that_breaks_off_ends_the_transcript_with_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: AudioFile):  # type: ignore[no-untyped-def]
        yield tone(2)
        raise BadMedia("the sound cannot be unpacked: it is damaged.")

    monkeypatch.setattr(AudioFile, "samples", broken)
    with pytest.raises(BadMedia, match="damaged"):
        transcribed(ScriptedEars(timed(0.0, " Hello.", 2.0)), wav(tone(40)))


def test_frames_come_about_a_window_at_a_time() -> None:
    pieces = list(read_mel_frames(AudioFile(wav(tone(70))), 80))
    assert sum(map(len, pieces)) == 7000 and max(map(len, pieces)) < 1.2 * WINDOW_FRAMES
