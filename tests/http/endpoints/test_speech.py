"""`/v1/audio/speech` and `/v1/audio/voices` over HTTP, by a mouth that says what it is told."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import wave
from typing import Any

import av
import pytest

from ingot.errors import BadRequest
from ingot.http.endpoints.table import build_app
from tests.http.asgi import Call
from tests.http.scripted import ScriptedEngine, settings
from tests.http.scripted_speaking import SAMPLES, SpeakingEngine
from tests.speaking import VOICES

SPEECH = "/v1/audio/speech"
TEXT = "The quick brown fox jumps over the lazy dog. It did so yesterday, too, and nobody knows why it did."


async def asked(engine: ScriptedEngine, body: dict[str, Any], path: str = SPEECH, method: str = "POST") -> Call:
    app = build_app(engine, settings())  # type: ignore[arg-type]
    async with Call(app, method=method, path=path, body=json.dumps(body).encode() if method == "POST" else b"") as call:
        await call.done()
    return call


def told(engine: ScriptedEngine | None = None, **body: Any) -> Call:
    return asyncio.run(asked(engine or SpeakingEngine(), {"input": TEXT, **body}))


def test_pcm_is_every_sample_and_nothing_else() -> None:
    engine = SpeakingEngine()
    call = told(engine, response_format="pcm", voice="af_heart")
    assert call.status == 200 and call.headers["content-type"] == "audio/pcm"
    assert call.body == SAMPLES * len(engine.asked[0].pieces) and len(engine.asked[0].pieces) > 1


@pytest.mark.parametrize(
    ("format", "media", "container"),
    [
        ("mp3", "audio/mpeg", "mp3"),
        ("opus", "audio/ogg", "ogg"),
        ("aac", "audio/aac", "aac"),
        ("flac", "audio/flac", "flac"),
        ("wav", "audio/wav", "wav"),
    ],
)
def test_each_format_is_a_file_that_can_be_read(format: str, media: str, container: str) -> None:
    engine = SpeakingEngine()
    call = told(engine, response_format=format)
    assert call.status == 200 and call.headers["content-type"] == media
    with av.open(io.BytesIO(call.body)) as file:
        sound = file.streams.audio[0]
        seconds = sum(frame.samples for frame in file.decode(sound)) / sound.rate
        assert file.format.name == container and sound.channels == 1
    exact = 2560 * len(engine.asked[0].pieces) / 24_000
    # Codecs that cut sound into frames fill the last one, and look ahead.
    assert seconds == exact if format in ("flac", "wav") else exact <= seconds < exact + 0.1


def test_mp3_is_what_is_sent_where_nothing_is_asked_for() -> None:
    assert told().headers["content-type"] == "audio/mpeg"


def test_a_wav_file_is_read_by_plain_readers_too() -> None:
    with wave.open(io.BytesIO(told(response_format="wav").body)) as file:
        assert (file.getframerate(), file.getnchannels(), file.getsampwidth()) == (24_000, 1, 2)
        assert file.readframes(2560) == SAMPLES


def test_events_tell_the_sound_and_then_what_it_took() -> None:
    engine = SpeakingEngine()
    call = told(engine, response_format="pcm", stream_format="sse")
    assert call.headers["content-type"].startswith("text/event-stream")
    *deltas, done = [json.loads(line[6:]) for line in call.body.decode().splitlines() if line.startswith("data: {")]
    assert {event["type"] for event in deltas} == {"speech.audio.delta"}
    pieces = engine.asked[0].pieces
    assert b"".join(base64.b64decode(event["audio"]) for event in deltas) == SAMPLES * len(pieces)
    assert done["type"] == "speech.audio.done"
    read, made = sum(map(len, pieces)), 2560 * len(pieces) * 40 // 24_000
    assert done["usage"] == {"input_tokens": read, "output_tokens": made, "total_tokens": read + made}
    assert done["ingot"]["timing"] == {"queue_s": 0.25, "compute_s": 1.5}


@pytest.mark.parametrize("format", ["mp3", "opus", "aac", "flac", "wav", "pcm"])
def test_there_is_sound_before_all_of_it_is_spoken(format: str) -> None:
    async def begun() -> None:
        engine = SpeakingEngine(held=True)
        app = build_app(engine, settings())  # type: ignore[arg-type]
        body = json.dumps({"input": TEXT, "response_format": format}).encode()
        async with Call(app, path=SPEECH, body=body) as call:
            await call.until(lambda: len(call.body) > 0)
            call.leave()
            await call.done()
        assert engine.ended == [engine.asked[0].id]

    asyncio.run(begun())


def test_what_is_asked_for_reaches_the_engine() -> None:
    engine = SpeakingEngine()
    assert told(engine, voice={"id": "bf_emma"}, speed=2, model="toy-mouth").status == 200
    (request,) = engine.asked
    assert (request.voice, request.speed) == ("bf_emma", 2.0) and request.deadline is not None
    assert "".join(request.pieces).startswith("ðə kwˈɪk")


def test_a_voice_may_be_called_by_what_is_its_own() -> None:
    engine = SpeakingEngine()
    assert told(engine, voice="echo").status == told(engine).status == 200
    assert [request.voice for request in engine.asked] == ["am_echo", "af_heart"]


def test_what_fails_before_there_is_sound_has_its_status() -> None:
    broken = BadRequest("it is too long.", param="input")
    call = told(SpeakingEngine(fails=broken))
    assert call.status == 400 and json.loads(call.body)["error"]["message"] == "it is too long."
    events = told(SpeakingEngine(fails=broken), stream_format="sse")
    assert b"it is too long." in events.body and b"[DONE]" not in events.body


@pytest.mark.parametrize(
    ("body", "status", "param", "says"),
    [
        ({"model": "tts-1"}, 404, "model", "toy-mouth"),
        ({"input": ""}, 400, "input", "1 to 4096"),
        ({"input": "a" * 4097}, 400, "input", "1 to 4096"),
        ({"input": "?!…"}, 400, "input", "no word"),
        ({"input": "Привет"}, 400, "input", "English"),
        ({"voice": "shimmer"}, 400, "voice", "af_heart"),
        ({"voice": {"id": "nobody"}}, 400, None, "af_heart"),
        ({"voice": 3}, 400, "voice", "expected"),
        ({"response_format": "midi"}, 400, "response_format", "flac"),
        ({"speed": 0.2}, 400, "speed", "0.25 to 4"),
        ({"speed": 4.5}, 400, "speed", "0.25 to 4"),
        ({"instructions": "Whisper."}, 400, "instructions", "voice"),
        ({"stream_format": "ws"}, 400, "stream_format", "sse"),
        ({"inputs": "a"}, 400, "inputs", "did you mean 'input'"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(
    body: dict[str, Any], status: int, param: str | None, says: str
) -> None:
    call = told(**body)
    error = json.loads(call.body)["error"]
    assert call.status == status and says in error["message"]
    assert param is None or error["param"] == param


def test_without_a_model_that_speaks_the_way_to_one_is_told() -> None:
    call = told(ScriptedEngine())
    assert call.status == 404 and "--speech-model" in json.loads(call.body)["error"]["message"]


def test_voices_are_listed_with_their_language() -> None:
    listed = json.loads(asyncio.run(asked(SpeakingEngine(), {}, "/v1/audio/voices", "GET")).body)["data"]
    assert [voice["id"] for voice in listed] == list(VOICES)
    assert (listed[0]["language"], listed[2]["language"]) == ("en-US", "en-GB")
    assert json.loads(asyncio.run(asked(ScriptedEngine(), {}, "/v1/audio/voices", "GET")).body)["data"] == []


def test_the_model_is_listed_with_its_voices() -> None:
    listed = json.loads(asyncio.run(asked(SpeakingEngine(), {}, "/v1/models", "GET")).body)["data"]
    (mouth,) = [model for model in listed if model["id"] == "toy-mouth"]
    assert mouth["output_modalities"] == ["audio"] and mouth["voices"] == list(VOICES)
