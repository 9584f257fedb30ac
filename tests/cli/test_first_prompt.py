"""`ingot launch --warm`: the first session is relayed and its first prompt kept; the next ones find it computed."""

from __future__ import annotations

import json
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from ingot.agents.agent import Endpoint
from ingot.cli import first_prompt
from ingot.cli.first_prompt import FirstPrompt, answers_nothing, recording, shortened, tokens
from ingot.engine.engine import Engine
from tests import scripted
from tests.cli.conftest import Done
from tests.cli.scripted import environment
from tests.http.running import running
from tests.http.scripted import settings

KEY = "sk-testing"
SYSTEM = "You are an agent. " * 40
# Asks for a title, asks what it was asked, and goes on; every answer it gets is printed.
CLIENT = """#!{python}
import json, os, urllib.request
options = json.loads(os.environ["OPENCODE_CONFIG_CONTENT"])["provider"]["ingot"]["options"]
said = [{{"role": "system", "content": {system!r}}}, {{"role": "user", "content": "Mend it."}}]
for messages in [[said[1]], said, [*said, {{"role": "assistant", "content": "Done."}}, said[1]]]:
    body = json.dumps({{"messages": messages, "stream": True, "max_completion_tokens": 50}}).encode()
    headers = {{"Content-Type": "application/json", "Authorization": "Bearer " + options["apiKey"]}}
    asked = urllib.request.Request(options["baseURL"] + "/chat/completions", body, headers)
    print(options["baseURL"], "[DONE]" in urllib.request.urlopen(asked).read().decode())
"""


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    made = scripted.start(lambda prompt: "Hello.")
    yield made
    made.close()


@pytest.fixture(scope="module")
def url(engine: Engine) -> Iterator[str]:
    with running(engine, settings(api_key=KEY)) as made:
        yield made


def kept(home: Path) -> list[Path]:
    return sorted((home / ".cache/ingot/agents").glob("opencode-*.json"))


def test_the_first_session_is_relayed_and_the_next_ones_start_warm(
    url: str, run_here: Callable[..., Done], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program = tmp_path / "bin" / "opencode"
    program.parent.mkdir()
    program.write_text(CLIENT.format(python=sys.executable, system=SYSTEM))
    program.chmod(0o755)
    for name, value in environment(tmp_path, PATH=f"{program.parent}:/usr/bin:/bin", INGOT_API_KEY=KEY).items():
        monkeypatch.setenv(name, value)

    first = run_here("launch", "opencode", "--url", url, "--warm")
    assert first.returncode == 0, first.stderr
    assert "is taken down in this session" in first.stderr
    lines = first.stdout.split()
    assert lines[1::2] == ["True"] * 3 and f"{url}/v1" not in lines
    [file] = kept(tmp_path)
    assert file.stat().st_mode & 0o777 == 0o600
    noted = json.loads(file.read_text())
    assert (noted["path"], [one["role"] for one in noted["body"]["messages"]]) == (
        "/v1/chat/completions",
        ["system", "user"],
    )

    httpx.delete(f"{url}/v1/cache", headers={"authorization": f"Bearer {KEY}"})
    second = run_here("launch", "opencode", "--url", url, "--warm")
    assert "its first prompt has" in second.stderr and "; 0 were there" in second.stderr
    assert set(second.stdout.split()[::2]) == {f"{url}/v1"}, "the client asks the server itself"
    third = run_here("launch", "opencode", "--url", url, "--warm")
    assert "; 0 were there" not in third.stderr

    program.write_text(program.read_text() + "# a new version\n")
    assert "is taken down" in run_here("launch", "opencode", "--url", url, "--warm").stderr
    assert len(kept(tmp_path)) == 2


def test_a_relay_ends_what_its_client_has_left(tmp_path: Path) -> None:
    """A server that says nothing sees the connection closed when the client closes its own."""
    closed = threading.Event()
    listening = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        connection, _ = listening.accept()
        while connection.recv(65_536):
            pass
        closed.set()

    threading.Thread(target=serve, daemon=True).start()
    served = Endpoint(f"http://127.0.0.1:{listening.getsockname()[1]}", None, "m", 1000)
    with recording(FirstPrompt(tmp_path / "p.json"), served) as relayed:
        asked = socket.create_connection(("127.0.0.1", int(relayed.url.rpartition(":")[2])))
        asked.sendall(b"POST /v1/messages?beta=true HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n{}")
        asked.close()
        assert closed.wait(10)
    listening.close()


def test_a_relay_passes_on_what_is_no_prompt(url: str, tmp_path: Path) -> None:
    prompt = FirstPrompt(tmp_path / "p.json")
    with recording(prompt, Endpoint(url, KEY, "scripted", 1000)) as relayed:
        headers = {"authorization": f"Bearer {KEY}"}
        listed = httpx.get(f"{relayed.url}/v1/models", headers=headers)
        refused = httpx.post(f"{relayed.url}/v1/chat/completions", json={"messages": 1}, headers=headers)
        assert httpx.head(f"{relayed.url}/v1/models", headers=headers).status_code == 200
    assert listed.json()["data"][0]["id"] == "scripted"
    assert refused.status_code == 400
    assert prompt.read() == ("/v1/chat/completions", {"messages": 1})


def test_a_prompt_is_asked_with_an_answer_of_one_token() -> None:
    served = Endpoint("http://x", None, "mine", 1000)
    chat = {"model": "a", "stream": True, "stream_options": {}, "max_completion_tokens": 9, "messages": []}
    assert shortened("/v1/chat/completions", chat, served) == {
        "model": "mine",
        "stream": False,
        "max_tokens": 1,
        "messages": [],
    }
    assert shortened("/v1/messages", {"max_tokens": 9}, served)["max_tokens"] == 1
    response = shortened("/v1/responses", {"store": True, "background": True}, served)
    assert response == {"model": "mine", "stream": False, "max_output_tokens": 1, "store": False}
    assert set(first_prompt.LIMITS) == {"/v1/chat/completions", "/v1/messages", "/v1/responses"}


def test_only_a_conversation_in_which_nobody_answered_yet_is_a_first_one() -> None:
    user = {"role": "user", "content": "x"}
    assert answers_nothing({"messages": [user]}) and answers_nothing({"input": "x"})
    assert not answers_nothing({"messages": [user, {"role": "assistant", "content": "y"}]})
    assert not answers_nothing({"input": [user, {"type": "function_call", "name": "f"}]})


@pytest.mark.parametrize(
    ("usage", "told"),
    [
        ({"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 4}}, (9, 4)),
        ({"input_tokens": 9, "input_tokens_details": {"cached_tokens": 4}}, (9, 4)),
        ({"input_tokens": 3, "cache_read_input_tokens": 4, "cache_creation_input_tokens": 2}, (9, 4)),
        ({}, (0, 0)),
    ],
)
def test_usage_is_read_in_the_words_of_each_protocol(usage: dict[str, Any], told: tuple[int, int]) -> None:
    assert tokens(usage) == told
