"""OpenAI's Python client's transcriptions against the real server on a socket."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from tests.hearing import tone, wav
from tests.http.running import running
from tests.http.scripted import settings
from tests.http.scripted_hearing import HearingEngine
from tests.waiting import WAIT_S

SOUND = ("speech.wav", wav(tone(1.5)), "audio/wav")
TEXT = "Hello, you. <Good> --> bye & é."


@pytest.fixture
def engine() -> HearingEngine:
    return HearingEngine()


@pytest.fixture
def client(engine: HearingEngine) -> Iterator[openai.OpenAI]:
    with (
        running(engine, settings()) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=WAIT_S) as made,
    ):
        yield made


def test_a_transcription_is_typed_in_every_format(client: openai.OpenAI) -> None:
    create = client.audio.transcriptions.create
    plain = create(file=SOUND, model="toy-ears")
    assert plain.text == TEXT and plain.usage is not None and plain.usage.type == "duration"
    verbose = create(file=SOUND, model="toy-ears", response_format="verbose_json")
    assert verbose.duration == 3662.504 and verbose.segments is not None and verbose.segments[1].end == 3662.5
    assert create(file=SOUND, model="toy-ears", response_format="text") == TEXT + "\n"
    assert create(file=SOUND, model="toy-ears", response_format="srt").startswith("1\n00:00:00,000 --> 00:00:01,000\n")
    assert create(file=SOUND, model="toy-ears", response_format="vtt").startswith("WEBVTT\n\n")


def test_words_prompts_and_languages_are_taken(client: openai.OpenAI, engine: HearingEngine) -> None:
    made = client.audio.transcriptions.create(
        file=SOUND,
        model="toy-ears",
        response_format="verbose_json",
        timestamp_granularities=["word", "segment"],
        language="de",
        prompt="Ann",
        temperature=0.2,
    )
    assert made.words is not None and [(one.word, one.start) for one in made.words] == [("Hello,", 0.0), ("you.", 0.5)]
    (request,) = engine.heard
    assert (request.language, request.prompt, request.temperature, request.words) == ("de", "Ann", 0.2, True)


def test_a_stream_is_typed_and_ends_once(client: openai.OpenAI) -> None:
    events = list(client.audio.transcriptions.create(file=SOUND, model="toy-ears", stream=True, include=["logprobs"]))
    assert [event.type for event in events] == ["transcript.text.delta"] * 2 + ["transcript.text.done"]
    last = events[-1]
    assert last.type == "transcript.text.done" and last.text == TEXT
    assert last.usage is not None and last.usage.output_tokens == 7
    first = events[0]
    assert first.type == "transcript.text.delta" and first.logprobs is not None and first.logprobs[0].logprob == -0.1


def test_a_translation_is_typed(client: openai.OpenAI, engine: HearingEngine) -> None:
    assert client.audio.translations.create(file=SOUND, model="toy-ears").text == TEXT
    assert engine.heard[0].task == "translate"


def test_refusals_are_the_clients_own_exceptions(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="toy-ears"):
        client.audio.transcriptions.create(file=SOUND, model="whisper-1")
    with pytest.raises(openai.BadRequestError, match="not audio of a known format") as refused:
        client.audio.transcriptions.create(file=("a.wav", b"no sound"), model="toy-ears")
    assert (refused.value.code, refused.value.param) == ("invalid_media", "file")
