"""`ingot launch`, with programs in place of the clients that tell what they were started with."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from foundry.package import MODELS
from ingot.agents import AGENTS, Endpoint
from ingot.cli import launch
from ingot.cli.launch import FirstPrompt, is_first_request, one_token_request, prompt_usage, recording_relay
from ingot.engine.engine import Engine
from tests import scripted
from tests.cli.conftest import Done
from tests.cli.scripted import Script, environment, scripted_server
from tests.http.running import running
from tests.http.scripted import settings
from tests.processes import INGOT, run
from tests.waiting import WAIT_S

CONTEXT = 40_960
Launched = Callable[..., Done]
TELLS = """#!{python}
import json, os, pathlib, sys
files = [word for word in sys.argv if os.path.isfile(word) and word != sys.argv[0]]
report = {{"words": sys.argv[1:], "env": dict(os.environ), "files": {{name: open(name).read() for name in files}}}}
print(json.dumps(report))
sys.exit(7)
"""
ASKS = """#!{python}
import json, os, urllib.request
config = json.loads(os.environ["OPENCODE_CONFIG_CONTENT"])["provider"]["ingot"]
url = config["options"]["baseURL"] + "/models"
print(json.load(urllib.request.urlopen(url))["data"][0]["id"], *config["models"])
"""
WAITS = """#!{python}
import signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])  # so that it may come before it is waited for
print("up", flush=True)
signal.sigwait([signal.SIGTERM])
sys.exit(9)
"""


@pytest.fixture
def server() -> Iterator[Script]:
    with scripted_server(Script(about={"max_model_len": CONTEXT})) as script:
        yield script


def installed(folder: Path, client: str, text: str) -> dict[str, str]:
    """An environment in which this is what runs as the client."""
    programs = folder / "bin"
    programs.mkdir()
    program = programs / AGENTS[client].program
    program.write_text(text.format(python=sys.executable))
    program.chmod(0o755)
    return environment(folder, PATH=f"{programs}:/usr/bin:/bin", ANTHROPIC_API_KEY="own")


def in_a_process(env: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    return run([INGOT, "launch", *words], capture_output=True, text=True, timeout=120, env=env)


@pytest.fixture
def launched(run_here: Callable[..., Done], monkeypatch: pytest.MonkeyPatch) -> Launched:
    """The same without the price of a process."""

    def launch(env: dict[str, str], *words: str) -> Done:
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        return run_here("launch", *words)

    return launch


def report_of(done: Done | subprocess.CompletedProcess[str]) -> Any:
    assert done.stdout, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("client", AGENTS)
def test_a_client_gets_its_words_after_ours_and_its_exit_code_is_ours(
    client: str, server: Script, tmp_path: Path
) -> None:
    done = in_a_process(
        installed(tmp_path, client, TELLS), client, "--url", server.url, "--", "--url", "theirs", "--", "x"
    )
    assert done.returncode == 7
    assert report_of(done)["words"][-4:] == ["--url", "theirs", "--", "x"]
    assert server.url in done.stdout and "scripted" in done.stdout
    assert str(CONTEXT) in done.stdout or str(CONTEXT * 3 // 4) in done.stdout, "a prompt leaves room for an answer"
    assert not [name for name in report_of(done)["files"] if Path(name).exists()]


def test_claude_code_is_told_by_settings_that_overrule_the_users_own(
    launched: Launched, server: Script, tmp_path: Path
) -> None:
    made = report_of(launched(installed(tmp_path, "claude", TELLS), "claude", "--url", f"{server.url}/v1/"))
    (text,) = made["files"].values()
    settings = json.loads(text)["env"]
    assert settings["ANTHROPIC_BASE_URL"] == made["env"]["ANTHROPIC_BASE_URL"] == server.url
    assert settings["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] == str(CONTEXT)
    assert settings["DISABLE_AUTO_COMPACT"] == "1", "it would compact its first prompt"
    assert settings["ANTHROPIC_API_KEY"] == "" and "ANTHROPIC_API_KEY" not in made["env"]


def test_the_key_is_passed_on_and_never_among_the_words(launched: Launched, server: Script, tmp_path: Path) -> None:
    for client in AGENTS:
        folder = tmp_path / client
        folder.mkdir()
        env = installed(folder, client, TELLS) | {"INGOT_API_KEY": "sk-secret-key"}
        made = report_of(launched(env, client, "--url", server.url))
        assert not [word for word in made["words"] if "sk-secret-key" in word]
        assert any("sk-secret-key" in value for value in made["env"].values())
    assert server.headers[-1]["authorization"] == "Bearer sk-secret-key"


def test_a_base_model_is_refused_before_the_client_starts(launched: Launched, tmp_path: Path) -> None:
    env = installed(tmp_path, "claude", TELLS)
    with scripted_server(Script(about={"max_model_len": CONTEXT, "chats": False})) as base:
        done = launched(env, "claude", "--url", base.url)
    assert (done.returncode, done.stdout) == (1, "")
    assert "scripted has no chat template" in done.stderr and "--chat-template" in done.stderr


def test_what_is_printed_holds_the_same_and_starts_nothing(launched: Launched, server: Script, tmp_path: Path) -> None:
    for client in AGENTS:
        done = launched(environment(tmp_path), client, "--url", server.url, "--print")
        assert (done.returncode, done.stderr) == (0, "")
        assert server.url in done.stdout and "scripted" in done.stdout


@pytest.mark.parametrize(
    ("words", "code", "line"),
    [
        (("claud",), 2, "unknown client claud; did you mean claude?"),
        (("claude", "--url", "http://127.0.0.1:9"), 1, "no server answers at http://127.0.0.1:9. Start a server with"),
        (("claude", "--url", "http://127.0.0.1:9", "--model", "x"), 2, "--url is for a running server"),
        (("claude", "--context", "100"), 2, "--context is for a model that is started here: it needs --model"),
        (("claude", "--print", "--model", "x"), 2, "--print is for a running server"),
        ((), 2, "the following arguments are required: CLIENT"),
    ],
)
def test_what_cannot_be_done_is_one_line_that_says_what_to_do(
    launched: Launched, words: tuple[str, ...], code: int, line: str, tmp_path: Path
) -> None:
    done = launched(installed(tmp_path, "claude", TELLS), *words)
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (code, "", 1), done.stderr
    assert done.stderr.startswith(f"ingot launch: {line}")


def test_without_a_server_the_line_names_both_ways_to_one(launched: Launched, tmp_path: Path) -> None:
    done = launched(installed(tmp_path, "codex", TELLS) | {"INGOT_PORT": "9"}, "codex")
    assert "http://127.0.0.1:9" in done.stderr
    assert "ingot serve MODEL" in done.stderr and "ingot launch codex --model MODEL" in done.stderr


def test_a_client_that_is_not_installed_comes_with_the_command_that_installs_it(
    launched: Launched, server: Script, tmp_path: Path
) -> None:
    for name, agent in AGENTS.items():
        done = launched(environment(tmp_path, PATH="/nowhere"), name, "--url", server.url)
        assert done.returncode == 1 and agent.install in done.stderr


def test_a_server_that_does_not_tell_its_context_is_refused(launched: Launched, tmp_path: Path) -> None:
    with scripted_server(Script()) as other:
        done = launched(installed(tmp_path, "aider", TELLS), "aider", "--url", other.url)
    assert done.returncode == 1 and "it is not an ingot server" in done.stderr


def test_a_model_of_another_name_is_refused_with_those_there_are(
    launched: Launched, server: Script, tmp_path: Path
) -> None:
    done = launched(installed(tmp_path, "aider", TELLS), "aider", "--url", server.url, "--name", "other")
    assert done.returncode == 2 and "serves scripted, but not other" in done.stderr


def test_being_told_to_end_is_passed_on(server: Script, tmp_path: Path) -> None:
    command = [INGOT, "launch", "aider", "--url", server.url]
    env = installed(tmp_path, "aider", WAITS)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env)
    try:
        assert process.stdout is not None and process.stdout.readline() == "up\n"
        process.send_signal(signal.SIGINT)  # the terminal's, which the client gets from there
        process.send_signal(signal.SIGTERM)
        assert process.wait(WAIT_S) == 9
    finally:
        process.kill()
        process.wait()


def test_a_server_is_started_for_a_client_and_ends_with_it(tmp_path: Path) -> None:
    env = installed(tmp_path, "opencode", ASKS) | {"TMPDIR": str(tmp_path)}
    done = in_a_process(env, "opencode", "--model", str(MODELS / "dense"), "--context", "512")
    assert (done.returncode, done.stdout) == (0, "dense dense\n"), done.stderr
    (log,) = tmp_path.glob("ingot-launch-*.log")
    assert str(log) in done.stderr


ENDED_BY_SIGTERM = 128 + signal.SIGTERM


def test_a_signal_that_comes_while_the_program_is_started_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def told_to_end(*arguments: Any, **how: Any) -> subprocess.Popen[bytes]:
        program = popen(*arguments, **how)
        os.kill(os.getpid(), signal.SIGTERM)
        return program

    popen = subprocess.Popen
    monkeypatch.setattr(launch.subprocess, "Popen", told_to_end)
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    assert launch.run_in_foreground(command, os.environ) == ENDED_BY_SIGTERM


def test_a_signal_that_another_thread_takes_is_passed_on_at_once() -> None:
    """As the system does with a second one that comes before this thread has dealt with the first."""
    tells = "import os, signal, time; os.kill(os.getppid(), signal.SIGTERM)"
    waits = "signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM]); time.sleep(30)"
    over = threading.Event()
    other = threading.Thread(target=over.wait)
    other.start()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    try:
        command = [sys.executable, "-c", f"{tells}; {waits}"]
        assert launch.run_in_foreground(command, os.environ) == ENDED_BY_SIGTERM
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        over.set()
        other.join()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_what_this_program_was_started_to_ignore_the_other_ignores_too(number: signal.Signals) -> None:
    """As under `nohup`: else it would be ended by what its user had said shall not end it."""
    check = f"import signal, sys; sys.exit(9 * (signal.getsignal({number.value}) == signal.SIG_IGN))"
    before = signal.signal(number, signal.SIG_IGN)
    try:
        assert launch.run_in_foreground([sys.executable, "-c", check], os.environ) == 9
        assert signal.getsignal(number) == signal.SIG_IGN
    finally:
        signal.signal(number, before)


KEY = "sk-testing"
SYSTEM = "You are an agent. " * 40
# Asks for a title, asks its question, and continues; prints whether every answer is complete.
CLIENT = """#!{python}
import json, os, urllib.request
options = json.loads(os.environ["OPENCODE_CONFIG_CONTENT"])["provider"]["ingot"]["options"]
messages = [{{"role": "system", "content": {system!r}}}, {{"role": "user", "content": "Mend it."}}]
for history in [[messages[1]], messages, [*messages, {{"role": "assistant", "content": "Done."}}, messages[1]]]:
    body = json.dumps({{"messages": history, "stream": True, "max_completion_tokens": 50}}).encode()
    headers = {{"Content-Type": "application/json", "Authorization": "Bearer " + options["apiKey"]}}
    request = urllib.request.Request(options["baseURL"] + "/chat/completions", body, headers)
    print(options["baseURL"], "[DONE]" in urllib.request.urlopen(request).read().decode())
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


def recorded_prompts(home: Path) -> list[Path]:
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
    assert "is recorded in this session" in first.stderr
    lines = first.stdout.split()
    assert lines[1::2] == ["True"] * 3 and f"{url}/v1" not in lines
    [file] = recorded_prompts(tmp_path)
    assert file.stat().st_mode & 0o777 == 0o600
    noted = json.loads(file.read_text())
    assert (noted["path"], [one["role"] for one in noted["body"]["messages"]]) == (
        "/v1/chat/completions",
        ["system", "user"],
    )

    httpx.delete(f"{url}/v1/cache", headers={"authorization": f"Bearer {KEY}"})
    second = run_here("launch", "opencode", "--url", url, "--warm")
    assert "its first prompt has" in second.stderr and "; 0 cached" in second.stderr
    assert set(second.stdout.split()[::2]) == {f"{url}/v1"}, "the client asks the server itself"
    third = run_here("launch", "opencode", "--url", url, "--warm")
    assert "; 0 cached" not in third.stderr

    program.write_text(program.read_text() + "# a new version\n")
    assert "is recorded" in run_here("launch", "opencode", "--url", url, "--warm").stderr
    assert len(recorded_prompts(tmp_path)) == 2


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
    with recording_relay(FirstPrompt(tmp_path / "p.json"), served) as relayed:
        connection = socket.create_connection(("127.0.0.1", int(relayed.url.rpartition(":")[2])))
        connection.sendall(b"POST /v1/messages?beta=true HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n{}")
        connection.close()
        assert closed.wait(WAIT_S)
    listening.close()


def test_a_relay_passes_on_what_is_no_prompt(url: str, tmp_path: Path) -> None:
    prompt = FirstPrompt(tmp_path / "p.json")
    with recording_relay(prompt, Endpoint(url, KEY, "scripted", 1000)) as relayed:
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
    assert one_token_request("/v1/chat/completions", chat, served) == {
        "model": "mine",
        "stream": False,
        "max_tokens": 1,
        "messages": [],
    }
    assert one_token_request("/v1/messages", {"max_tokens": 9}, served)["max_tokens"] == 1
    response = one_token_request("/v1/responses", {"store": True, "background": True}, served)
    assert response == {"model": "mine", "stream": False, "max_output_tokens": 1, "store": False}
    assert set(launch.TOKEN_LIMIT_FIELDS) == {"/v1/chat/completions", "/v1/messages", "/v1/responses"}


def test_only_a_conversation_in_which_nobody_answered_yet_is_a_first_one() -> None:
    user = {"role": "user", "content": "x"}
    assert is_first_request({"messages": [user]}) and is_first_request({"input": "x"})
    assert not is_first_request({"messages": [user, {"role": "assistant", "content": "y"}]})
    assert not is_first_request({"input": [user, {"type": "function_call", "name": "f"}]})


@pytest.mark.parametrize(
    ("usage", "counts"),
    [
        ({"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 4}}, (9, 4)),
        ({"input_tokens": 9, "input_tokens_details": {"cached_tokens": 4}}, (9, 4)),
        ({"input_tokens": 3, "cache_read_input_tokens": 4, "cache_creation_input_tokens": 2}, (9, 4)),
        ({}, (0, 0)),
    ],
)
def test_usage_is_read_in_the_words_of_each_protocol(usage: dict[str, Any], counts: tuple[int, int]) -> None:
    assert prompt_usage(usage) == counts
