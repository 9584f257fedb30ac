"""`ingot launch`, with programs in place of the clients that tell what they were started with."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ingot.agents.registry import AGENTS
from ingot.config import DEFAULT_MODEL, load
from ingot.models.files.model_store import is_kept
from ingot.models.files.packaged import find
from tests.cli.conftest import Done
from tests.cli.scripted import INGOT, Script, environment, scripted_server

CONTEXT = 40_960
Launched = Callable[..., Done]
TELLS = """#!{python}
import json, os, pathlib, sys
files = [word for word in sys.argv if os.path.isfile(word) and word != sys.argv[0]]
told = {{"words": sys.argv[1:], "env": dict(os.environ), "files": {{name: open(name).read() for name in files}}}}
print(json.dumps(told))
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
    return subprocess.run([INGOT, "launch", *words], capture_output=True, text=True, timeout=120, env=env)


@pytest.fixture
def launched(run_here: Callable[..., Done], monkeypatch: pytest.MonkeyPatch) -> Launched:
    """The same without the price of a process."""

    def launch(env: dict[str, str], *words: str) -> Done:
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        return run_here("launch", *words)

    return launch


def told(done: Done | subprocess.CompletedProcess[str]) -> Any:
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
    assert told(done)["words"][-4:] == ["--url", "theirs", "--", "x"]
    assert server.url in done.stdout and "scripted" in done.stdout
    assert str(CONTEXT) in done.stdout or str(CONTEXT * 3 // 4) in done.stdout, "a prompt leaves room for an answer"
    assert not [name for name in told(done)["files"] if Path(name).exists()]


def test_claude_code_is_told_by_settings_that_overrule_the_users_own(
    launched: Launched, server: Script, tmp_path: Path
) -> None:
    made = told(launched(installed(tmp_path, "claude", TELLS), "claude", "--url", f"{server.url}/v1/"))
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
        made = told(launched(env, client, "--url", server.url))
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
        (("claude", "--url", "http://127.0.0.1:9"), 1, "no server answers at http://127.0.0.1:9. Start one with"),
        (("claude", "--url", "http://127.0.0.1:9", "--model", "x"), 2, "--url is about a running server"),
        (("claude", "--context", "100"), 2, "--context says how to run a model: it goes with --model"),
        (("claude", "--print", "--model", "x"), 2, "--print is about a running server"),
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
    assert done.returncode == 1 and "it is no ingot server" in done.stderr


def test_a_model_of_another_name_is_refused_with_those_there_are(
    launched: Launched, server: Script, tmp_path: Path
) -> None:
    done = launched(installed(tmp_path, "aider", TELLS), "aider", "--url", server.url, "--name", "other")
    assert done.returncode == 2 and "serves scripted, and no other" in done.stderr


def test_being_told_to_end_is_passed_on(server: Script, tmp_path: Path) -> None:
    command = [INGOT, "launch", "aider", "--url", server.url]
    env = installed(tmp_path, "aider", WAITS)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env)
    try:
        assert process.stdout is not None and process.stdout.readline() == "up\n"
        process.send_signal(signal.SIGINT)  # the terminal's, which the client gets from there
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 9
    finally:
        process.kill()
        process.wait()


def test_a_server_is_started_for_a_client_and_ends_with_it(tmp_path: Path) -> None:
    shelf = load({}, os.environ).settings.models_dir
    model = find(DEFAULT_MODEL)
    if model is None or not is_kept(shelf / DEFAULT_MODEL, model.origin):
        pytest.skip("the default model is not here: run `ingot pull`")
    env = installed(tmp_path, "opencode", ASKS) | {"TMPDIR": str(tmp_path)}
    words = ("--model", DEFAULT_MODEL, "--models-dir", str(shelf), "--offline", "--context", "512")
    done = in_a_process(env, "opencode", *words)
    assert (done.returncode, done.stdout) == (0, f"{DEFAULT_MODEL} {DEFAULT_MODEL}\n"), done.stderr
    (log,) = tmp_path.glob("ingot-launch-*.log")
    assert str(log) in done.stderr
