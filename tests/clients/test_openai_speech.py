"""OpenAI's Python client's speech against the real server on a socket."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from tests.http.running import running
from tests.http.scripted import settings
from tests.http.scripted_speaking import SAMPLES, SpeakingEngine
from tests.waiting import WAIT_S

TEXT = "Hello there. This is read aloud, sentence by sentence."


@pytest.fixture
def engine() -> SpeakingEngine:
    return SpeakingEngine()


@pytest.fixture
def client(engine: SpeakingEngine) -> Iterator[openai.OpenAI]:
    with (
        running(engine, settings()) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=WAIT_S) as made,
    ):
        yield made


def test_speech_is_every_sample_whether_read_at_once_or_as_it_comes(
    client: openai.OpenAI, engine: SpeakingEngine, tmp_path: Path
) -> None:
    whole = client.audio.speech.create(model="toy-mouth", voice="bf_emma", input=TEXT, response_format="pcm", speed=1.5)
    (request,) = engine.asked
    assert (request.voice, request.speed) == ("bf_emma", 1.5)
    assert whole.content == SAMPLES * len(request.pieces)
    streamed = client.audio.speech.with_streaming_response
    with streamed.create(model="toy-mouth", voice="bf_emma", input=TEXT, response_format="pcm", speed=1.5) as coming:
        coming.stream_to_file(tmp_path / "speech.pcm")
    assert (tmp_path / "speech.pcm").read_bytes() == whole.content


def test_refusals_are_the_clients_own_exceptions(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="toy-mouth"):
        client.audio.speech.create(model="tts-1", voice="bf_emma", input=TEXT)
    with pytest.raises(openai.BadRequestError, match="bf_emma") as refused:
        client.audio.speech.create(model="toy-mouth", voice="nobody", input=TEXT)
    assert refused.value.param == "voice"
