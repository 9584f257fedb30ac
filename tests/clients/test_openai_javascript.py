"""The official JavaScript client against the real server on a socket."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ingot.engine.request import TextDelta
from ingot.errors import Overloaded
from tests.http.running import running
from tests.http.scripted import ScriptedEngine, failing, settings
from tests.http.scripted_hearing import HearingEngine
from tests.http.scripted_speaking import SAMPLES, SpeakingEngine
from tests.waiting import WAIT_S

HERE = Path(__file__).parent
KEY = "sk-testing"

pytestmark = [
    pytest.mark.clients,
    pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed"),
    pytest.mark.skipif(
        not (HERE / "node_modules" / "openai").is_dir(), reason="the client is not installed: run `make test-clients`"
    ),
]

Run = Callable[[str], Any]


@pytest.fixture
def engine() -> ScriptedEngine:
    return HearingEngine()


@pytest.fixture
def run(engine: ScriptedEngine) -> Iterator[Run]:
    with running(engine, settings(api_key=KEY)) as url:

        def run(task: str) -> Any:
            command = ["node", str(HERE / "openai_client.mjs"), f"{url}/v1", KEY, task]
            made = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
            assert made.returncode == 0, made.stderr
            return json.loads(made.stdout)

        yield run


def test_a_chat_is_answered(run: Run) -> None:
    made = run("chat")
    assert made["text"] == "Hello, world"
    assert made["id"] == made["header"]


def test_a_chat_is_streamed_with_its_usage(run: Run) -> None:
    assert run("stream") == {"text": "Hello, world", "finishes": ["stop"], "tokens": 3}


def test_the_clients_own_stream_helper_understands_the_stream(run: Run) -> None:
    assert run("helper") == {"text": "Hello, world"}


def test_a_text_is_completed(run: Run) -> None:
    assert run("completion") == {"text": "aHello, world", "tokens": ["<bos>", "a", "Hello", ", ", "world"]}


def test_speech_is_written_down_in_every_format_and_streamed(run: Run) -> None:
    made, text = run("transcription"), "Hello, you. <Good> --> bye & é."
    assert (made["text"].strip(), made["words"]) == (text, 2)
    assert made["events"] == ["transcript.text.delta"] * 2 + ["transcript.text.done"]
    assert made["srt"].startswith("1\n00:00:00,000") and made["vtt"].startswith("WEBVTT\n\n")


def test_models_are_listed_and_retrieved(run: Run) -> None:
    assert run("models") == {"listed": ["org/toy", "toy-ears"], "retrieved": "org/toy"}


def test_an_error_in_mid_stream_is_thrown(run: Run, engine: ScriptedEngine) -> None:
    engine.script = failing(Overloaded("Out of memory."))
    error = run("broken")["error"]
    assert (error["name"], error["code"]) == ("APIError", "overloaded")


def test_a_refusal_is_the_clients_own_exception(run: Run) -> None:
    error = run("refused")["error"]
    assert (error["name"], error["status"], error["param"]) == ("BadRequestError", 400, "temperature")


def test_leaving_the_loop_ends_the_request(run: Run, engine: ScriptedEngine) -> None:
    engine.script = lambda request: [[TextDelta(0, "Hello")]]
    assert run("left") == {}
    assert engine.streams[0].closed.wait(WAIT_S)


@pytest.mark.parametrize("engine", [SpeakingEngine()], ids=["speaking"])
def test_a_text_is_spoken(run: Run) -> None:
    assert run("speech") == {"type": "audio/pcm", "bytes": len(SAMPLES)}
