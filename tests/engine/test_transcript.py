"""Sounds written down window by window, by ears that say what they are told."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

import numpy as np
import pytest

from ingot.engine.hearing.frames import WINDOW, Frames, frames_of
from ingot.engine.speech_request import Segment, TranscriptionRequest
from ingot.engine.speech_to_text import Transcript
from ingot.engine.whisper_decoding import WARMER, Hears, WindowWriter
from ingot.errors import BadMedia
from ingot.media.audio import Sound
from ingot.text.tokenizer.whisper import WhisperVocabulary
from tests.hearing import ScriptedEars, timed, tone, vocabulary, wav

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
    ears: Hears, sound: bytes, vocabulary: WhisperVocabulary = BYTES, **asked: object
) -> tuple[list[Segment], Transcript]:
    mail: list[Callable[[], None]] = []
    request = TranscriptionRequest("a", Sound(sound), **{"language": "en", **asked})  # type: ignore[arg-type]
    frames = Frames(request.sound, 80, AtOnce(), mail.append)  # type: ignore[arg-type]
    transcript = Transcript(request, frames, ears, vocabulary, WindowWriter(ears, vocabulary))
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
    assert ears.windows[0].shape == (WINDOW, 80)


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
    assert [one.temperature for one in segments] == [WARMER[-1]]
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
    assert b"".join(one.bytes for one in segments[0].heard).decode() == " Hé"
    assert all(-0.1 < one.logprob <= 0 for one in segments[0].heard)


def test_a_sound_that_breaks_off_ends_the_transcript_with_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Sound):  # type: ignore[no-untyped-def]
        yield tone(2)
        raise BadMedia("the sound cannot be unpacked: it is damaged.")

    monkeypatch.setattr(Sound, "samples", broken)
    with pytest.raises(BadMedia, match="damaged"):
        transcribed(ScriptedEars(timed(0.0, " Hello.", 2.0)), wav(tone(40)))


def test_frames_come_about_a_window_at_a_time() -> None:
    pieces = list(frames_of(Sound(wav(tone(70))), 80))
    assert sum(map(len, pieces)) == 7000 and max(map(len, pieces)) < 1.2 * WINDOW
