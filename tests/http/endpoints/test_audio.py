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

from ingot.errors import BadMedia, BadRequest
from tests.hearing import tone, wav
from tests.http.asgi import Call
from tests.http.scripted import ScriptedEngine, build_app, settings
from tests.http.scripted_hearing import HearingEngine
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


SOUND = wav(tone(1.5))
TRANSCRIPTIONS, TRANSLATIONS = "/v1/audio/transcriptions", "/v1/audio/translations"


def form(sound: bytes | None = SOUND, **fields: str | list[str]) -> bytes:
    parts = [(f'name="{name}"', value) for name, told in fields.items() if isinstance(told, str) for value in [told]]
    parts += [(f'name="{name}[]"', value) for name, told in fields.items() if isinstance(told, list) for value in told]
    body = b"".join(
        f"--b\r\ncontent-disposition: form-data; {head}\r\n\r\n{value}\r\n".encode() for head, value in parts
    )
    if sound is not None:
        body += b'--b\r\ncontent-disposition: form-data; name="file"; filename="a.wav"\r\n\r\n' + sound + b"\r\n"
    return body + b"--b--\r\n"


async def asked_of_transcriptions(
    engine: ScriptedEngine, body: bytes, path: str = TRANSCRIPTIONS, **configured: Any
) -> Call:
    app = build_app(engine, settings(**configured))  # type: ignore[arg-type]
    async with Call(app, path=path, body=body, headers={"content-type": "multipart/form-data; boundary=b"}) as call:
        await call.done()
    return call


def told_of_transcriptions(
    body: bytes, path: str = TRANSCRIPTIONS, engine: ScriptedEngine | None = None, **configured: Any
) -> Call:
    return asyncio.run(asked_of_transcriptions(engine or HearingEngine(), body, path, **configured))


def test_json_has_the_text_and_what_was_heard_of_it() -> None:
    call = told_of_transcriptions(form(model="toy-ears"))
    body = json.loads(call.body)
    assert call.status == 200 and body["text"] == "Hello, you. <Good> --> bye & é."
    assert body["usage"] == {"type": "duration", "seconds": 3662.504}
    assert body["ingot"]["timing"] == {"queue_s": 0.25, "compute_s": 1.5}


def test_text_is_text() -> None:
    call = told_of_transcriptions(form(response_format="text"))
    assert call.body.decode() == "Hello, you. <Good> --> bye & é.\n"
    assert call.headers["content-type"].startswith("text/plain")


def test_verbose_json_has_segments_or_words_as_asked() -> None:
    body = json.loads(told_of_transcriptions(form(response_format="verbose_json")).body)
    assert (body["task"], body["language"], body["duration"]) == ("transcribe", "english", 3662.504)
    assert body["segments"][0] == {
        **{"id": 0, "seek": 0, "start": 0.0, "end": 1.0, "text": " Hello, you.", "tokens": [1, 2], "temperature": 0.0},
        **{"avg_logprob": -0.2, "compression_ratio": 1.1, "no_speech_prob": 0.01},
    }
    assert "words" not in body
    body = json.loads(
        told_of_transcriptions(form(response_format="verbose_json", timestamp_granularities=["word"])).body
    )
    assert body["words"] == [{"word": "Hello,", "start": 0.0, "end": 0.4}, {"word": "you.", "start": 0.5, "end": 1.0}]
    assert "segments" not in body


def test_what_is_asked_for_reaches_the_engine_of_transcriptions() -> None:
    engine = HearingEngine()
    asked_for = form(
        response_format="verbose_json",
        timestamp_granularities=["word"],
        language="German",
        prompt="Ann",
        temperature="0.5",
    )
    assert told_of_transcriptions(asked_for, engine=engine).status == 200
    (request,) = engine.heard
    assert (request.task, request.language, request.prompt, request.temperature) == ("transcribe", "de", "Ann", 0.5)
    assert request.words and request.audio.seconds == 1.5 and request.deadline is not None


def test_a_translation_is_asked_for_as_one() -> None:
    engine = HearingEngine()
    body = json.loads(told_of_transcriptions(form(response_format="verbose_json"), TRANSLATIONS, engine).body)
    assert body["task"] == "translate" and engine.heard[0].task == "translate"


def test_a_stream_tells_segments_and_then_the_whole() -> None:
    call = told_of_transcriptions(form(stream="true", include=["logprobs"]))
    events = [json.loads(line[6:]) for line in call.body.decode().splitlines() if line.startswith("data: {")]
    assert [event["type"] for event in events] == ["transcript.text.delta"] * 2 + ["transcript.text.done"]
    assert events[0]["delta"] == "Hello, you."
    assert "".join(event["delta"] for event in events[:2]) == events[2]["text"]
    assert events[0]["logprobs"] == [{"token": " Hello", "logprob": -0.1, "bytes": list(b" Hello")}]
    assert events[2]["usage"]["output_tokens"] == 7
    assert call.body.endswith(b"data: [DONE]\n\n")


def test_a_stream_that_fails_ends_in_words() -> None:
    broken = BadMedia("the sound cannot be unpacked: it is damaged.")
    call = told_of_transcriptions(form(stream="true"), engine=HearingEngine(fails=broken))
    assert call.status == 200 and b'"code":"invalid_media"' in call.body and b"[DONE]" not in call.body
    whole = told_of_transcriptions(form(), engine=HearingEngine(fails=broken))
    assert whole.status == 400 and json.loads(whole.body)["error"]["message"].endswith("it is damaged.")


def test_a_client_that_leaves_ends_the_work() -> None:
    async def leave() -> HearingEngine:
        engine = HearingEngine(held=True)
        app = build_app(engine, settings())  # type: ignore[arg-type]
        headers = {"content-type": "multipart/form-data; boundary=b"}
        async with Call(app, path=TRANSCRIPTIONS, body=form(stream="true"), headers=headers) as call:
            await call.until(lambda: b"Hello" in call.body)
            call.leave()
            await call.done()
        assert app.state.service.shared_state.bodies.held == 0
        return engine

    engine = asyncio.run(leave())
    assert engine.ended == [engine.heard[0].id]


@pytest.mark.parametrize(
    ("body", "status", "param", "says"),
    [
        (form(model="whisper-1"), 404, "model", "toy-ears"),
        (form(None, model="default"), 400, "file", "required"),
        (form(None, file="a text"), 400, "file", "expected a file"),
        (form(b"no sound"), 400, "file", "known format"),
        (form(b""), 400, "file", "is empty"),
        (form(response_format="xml"), 400, "response_format", "verbose_json"),
        (form(response_format="diarized_json"), 400, "response_format", "speakers"),
        (form(timestamp_granularities=["word"]), 400, "timestamp_granularities", "verbose_json"),
        (form(response_format="verbose_json", timestamp_granularities=["letter"]), 400, None, "segment"),
        (form(stream="true", response_format="vtt"), 400, "stream", "json and text"),
        (form(stream="maybe"), 400, "stream", "true or false"),
        (form(include=["logprobs"], response_format="text"), 400, "include", "json"),
        (form(temperature="nan"), 400, "temperature", "0 to 1"),
        (form(temperature="1.5"), 400, "temperature", "0 to 1"),
        (form(language="klingon"), 400, "language", "en"),
        (form(languag="en"), 400, "languag", "did you mean 'language'"),
        (form(chunking_strategy="server_vad"), 400, "chunking_strategy", "30 seconds"),
        (b"no form", 400, None, "broken"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name_of_transcriptions(
    body: bytes, status: int, param: str | None, says: str
) -> None:
    call = told_of_transcriptions(body)
    error = json.loads(call.body)["error"]
    assert call.status == status and says in error["message"]
    assert param is None or error["param"] == param


def test_without_a_model_that_hears_the_way_to_one_is_told() -> None:
    call = told_of_transcriptions(form(), engine=ScriptedEngine())
    assert call.status == 404 and "--audio-model" in json.loads(call.body)["error"]["message"]


def test_a_sound_may_be_as_large_as_the_settings_say() -> None:
    assert told_of_transcriptions(form(wav(tone(40))), max_audio_upload_mb=1).status == 413
    assert (
        told_of_transcriptions(
            form(wav(tone(20))), audio_model="toy", max_audio_upload_mb=1, max_body_bytes=1000
        ).status
        == 200
    )


def test_models_that_hear_are_listed() -> None:
    async def listed() -> Any:
        async with Call(build_app(HearingEngine(), settings()), "GET", "/v1/models") as call:  # type: ignore[arg-type]
            await call.done()
        return json.loads(call.body)

    found = {one["id"]: one for one in asyncio.run(listed())["data"]}
    assert found["toy-ears"]["input_modalities"] == ["audio"] and "en" in found["toy-ears"]["languages"]


def chatting(
    *contents: Any, engine: ScriptedEngine, path: str = "/v1/chat/completions", **configured: Any
) -> list[Call]:
    """A chat for each of the contents, one after another at one server."""

    async def asked() -> list[Call]:
        app, calls = build_app(engine, settings(**configured)), []  # type: ignore[arg-type]
        for content in contents:
            said = [{"role": "user", "content": content}]
            body = {"input": said} if path == "/v1/responses" else {"messages": said}
            async with Call(app, path=path, body=json.dumps(body).encode()) as call:
                await call.done()
            calls.append(call)
        return calls

    return asyncio.run(asked())


def spoken(sound: bytes = SOUND) -> dict[str, Any]:
    return {"type": "input_audio", "input_audio": {"data": base64.b64encode(sound).decode(), "format": "wav"}}


@pytest.mark.parametrize(
    ("path", "text"), [("/v1/chat/completions", "text"), ("/v1/responses", "input_text")], ids=["chat", "responses"]
)
def test_a_sound_in_a_chat_is_written_down_once_and_the_receipt_says_so(path: str, text: str) -> None:
    engine = HearingEngine()
    content = [{"type": text, "text": "What does she say?"}, spoken()]
    for call in chatting(content, content, engine=engine, path=path):
        assert call.status == 200, call.body
        assert json.loads(call.body)["ingot"]["prompt"]["adapted"] == ["audio-transcribed"]
    prompts = [bytes(token for token in request.prompts[0] if token < 256).decode() for request in engine.requests]
    assert len(prompts) == 2 and all("Hello, you. <Good> --> bye & é." in prompt for prompt in prompts)
    assert len(engine.heard) == 1, "the next turn sends it again"


def test_a_sound_that_cannot_be_heard_is_refused_with_its_place() -> None:
    [damaged] = chatting([spoken(b"nothing")], engine=HearingEngine())
    assert damaged.status == 400
    assert json.loads(damaged.body)["error"]["param"].startswith("messages.0.content.0.input_audio")
    [failed] = chatting([spoken()], engine=HearingEngine(fails=BadMedia("the sound breaks off.")))
    assert failed.status == 400 and b"breaks off" in failed.body
    [deaf] = chatting([spoken()], engine=ScriptedEngine())
    assert deaf.status == 400 and b"--audio-model" in deaf.body
