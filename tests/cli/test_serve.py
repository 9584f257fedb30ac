from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ingot.cli.client import Client
from ingot.cli.ready import ready_record
from ingot.config import DEFAULT_MODEL, load
from ingot.engine.model_card import ModelCard
from ingot.errors import Unsupported
from ingot.models.files.model_store import is_kept
from ingot.models.files.packaged import find
from ingot.protocol.openai.chat import read_chat
from ingot.protocol.openai.completions import read_completion
from ingot.protocol.served import Served
from ingot.text.tool_formats.registry import FoundFormat, format_named, found_format
from tests.cli.conftest import Done
from tests.cli.scripted import INGOT, environment
from tests.http import scripted as toy

CARD = ModelCard(
    name="tiny",
    source="folder:tiny",
    family="llama",
    context=4096,
    vocab=96,
    device="some chip (cpu)",
    dtype="float32",
    weight_bytes=1,
    memory_budget=3_500_000_000,
    max_sequences=4,
    created=0,
    notes=("no compiler: slower",),
)
LONGEST_START_S = 120


@pytest.fixture(scope="module")
def shelf() -> str:
    folder = load({}, os.environ).settings.models_dir
    model = find(DEFAULT_MODEL)
    if model is None or not is_kept(folder / DEFAULT_MODEL, model.origin):
        pytest.skip("the default model is not here: run `ingot pull`")
    return str(folder)


@pytest.fixture
def serving(shelf: str, tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], list[str]]]:
    """`ingot serve` with the default model, and the lines it printed up to the last of its ready record."""
    command = [INGOT, "serve", "--port", "0", "--offline", "--models-dir", shelf, "--context", "256"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment(tmp_path))
    watchdog = threading.Timer(LONGEST_START_S, process.kill)
    watchdog.start()
    try:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line.rstrip("\n"))
            if line.startswith("try: "):
                break
        yield process, lines
    finally:
        watchdog.cancel()
        process.kill()
        process.communicate()


def test_the_ready_record_says_everything_and_hides_the_key() -> None:
    found = FoundFormat(format_named("qwen"), "template")
    assert ready_record("http://127.0.0.1:8000", CARD, found, needs_key=True).splitlines() == [
        "ready: http://127.0.0.1:8000 | tiny (float32) | some chip (cpu) | context 4096 tokens | memory budget 3.5 GB"
        " | tool format qwen",
        "note: no compiler: slower",
        "try: curl http://127.0.0.1:8000/v1/chat/completions"
        " -H \"Authorization: Bearer $INGOT_API_KEY\" -H 'Content-Type: application/json'"
        ' -d \'{"model": "default", "messages": [{"role": "user", "content": "Why is the sky blue?"}]}\'',
    ]
    assert "Authorization" not in ready_record("http://127.0.0.1:8000", CARD, found, needs_key=False)


def test_the_ready_record_says_what_numbers_are() -> None:
    formats = "weights Q4_K_M, activations 8-bit, states float16"
    found = FoundFormat(format_named("qwen"), "template")
    assert f"| tiny ({formats}) |" in ready_record("http://x", replace(CARD, formats=formats), found, needs_key=False)


def test_the_ready_record_says_who_guesses_ahead() -> None:
    found = FoundFormat(format_named("qwen"), "template")
    guessing = replace(CARD, proposers=("forced", "lookup"))
    line = ready_record("http://x", guessing, found, needs_key=False).splitlines()[0]
    assert line.endswith(" | guessing ahead: forced, lookup")
    assert "guessing" not in ready_record("http://x", CARD, found, needs_key=False)


def test_the_ready_record_says_what_was_compiled() -> None:
    found = FoundFormat(format_named("qwen"), "template")
    compiled = replace(CARD, kernels="3 compiled, in 1.2 s")
    line = ready_record("http://x", compiled, found, needs_key=False).splitlines()[0]
    assert line.endswith(" | kernels: 3 compiled, in 1.2 s")
    assert "kernels" not in ready_record("http://x", CARD, found, needs_key=False)


def test_the_ready_record_says_when_the_format_of_calls_is_a_guess() -> None:
    guess = found_format("{{ messages }}", "unheard_of")
    line, *notes = ready_record("http://x", CARD, guess, needs_key=False).splitlines()
    assert line.endswith("| tool format hermes (a guess)")
    assert any("hermes is a guess" in note and "--tool-format" in note for note in notes)
    by_type = found_format("{{ messages }}", "llama")
    line, *notes = ready_record("http://x", CARD, by_type, needs_key=False).splitlines()
    assert line.endswith("| tool format llama (a guess)")
    assert any("llama is a guess: by the model's type" in note for note in notes)
    told = found_format("<|python_tag|>", "llama")
    assert "guess" not in ready_record("http://x", CARD, told, needs_key=False)


def test_the_ready_record_says_why_a_response_template_is_not_used() -> None:
    found = found_format("<|python_tag|>", "llama", {"version": 7, "fields": {}})
    notes = ready_record("http://x", CARD, found, needs_key=False).splitlines()
    assert "note: the checkpoint's response_template is not used: its version is 7" in notes


def test_a_model_that_cannot_chat_is_tried_with_a_text_and_says_how_it_could() -> None:
    told = found_format(None, "llama")
    line, *notes, curl = ready_record("http://x", CARD, told, needs_key=False, chats=False).splitlines()
    assert "tool format" not in line
    assert any("--chat-template" in note for note in notes)
    assert curl.startswith("try: curl http://x/v1/completions ")
    body = json.loads(curl.split(" -d ")[1].strip("'"))
    served = Served.of(toy.CARD, toy.ByteTokenizer(None), toy.settings())  # type: ignore[arg-type]
    assert read_completion(body, served, "one").request.prompts
    with pytest.raises(Unsupported, match="--chat-template"):
        read_chat({"messages": [{"role": "user", "content": "Hi"}]}, served, "one")


def test_a_served_model_answers_what_the_ready_record_says_and_ctrl_c_ends_it(
    serving: tuple[subprocess.Popen[str], list[str]],
) -> None:
    process, lines = serving
    facts = lines[0].split(" | ")
    assert facts[0].startswith("ready: http://127.0.0.1:")
    assert facts[1].startswith(DEFAULT_MODEL) and facts[3] == "context 256 tokens"
    url = facts[0].removeprefix("ready: ")
    body = json.loads(lines[-1].split(" -d ")[1].strip("'"))
    answer = Client(url).post("chat/completions", body | {"max_tokens": 2})
    assert answer["choices"][0]["message"]["content"]
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 0


def test_a_model_runs_inside_the_chat_when_no_server_is_named(shelf: str, tmp_path: Path) -> None:
    command = [INGOT, "chat", "--offline", "--models-dir", shelf, "--max-tokens", "2", "--temperature", "0"]
    env = environment(tmp_path)
    done = subprocess.run(command, input="hi", capture_output=True, text=True, timeout=LONGEST_START_S, env=env)
    assert (done.returncode, done.stdout.strip() != "") == (0, True)


def test_a_start_that_fails_once_the_model_is_loaded_ends_in_a_line_and_no_abort(shelf: str, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.json"
    prompts.write_text(json.dumps(["word " * 400]))
    command = [INGOT, "serve", "--offline", "--models-dir", shelf, "--port", "0", "--context", "256"]
    command += ["--warm-prompts", str(prompts)]
    env = environment(tmp_path)
    done = subprocess.run(command, capture_output=True, text=True, timeout=LONGEST_START_S, env=env)
    assert done.returncode == 2, done.stderr
    assert done.stderr.splitlines()[-1].startswith(f"ingot serve: {prompts}")
    assert "terminate" not in done.stderr


def test_a_taken_port_is_known_before_the_model_is_loaded(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        command = [INGOT, "serve", "no/such-model", "--port", port]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment(tmp_path))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"ingot serve: Port {port} on 127.0.0.1 is in use. Choose another with --port, or 0 for any free one.\n"
    )


def test_a_model_that_is_not_there_is_one_line_and_exit_code_1(tmp_path: Path) -> None:
    command = [INGOT, "serve", "smollm2-135n", "--port", "0", "--offline"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment(tmp_path))
    assert done.returncode == 1
    assert done.stderr.startswith("ingot serve: there is no model 'smollm2-135n'. Did you mean 'smollm2-135m'?")
    assert done.stderr.count("\n") == 1


def test_pull_says_where_the_model_is(shelf: str, run_here: Callable[..., Done]) -> None:
    done = run_here("pull", "--offline", "--models-dir", shelf)
    assert (done.returncode, done.stdout) == (0, f"{shelf}/{DEFAULT_MODEL}\n")
