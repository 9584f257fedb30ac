"""A server with several models that is killed while one is loaded, or makes room for another, starts again as if it had
not been: nothing of the cache is damaged, nothing half-written stays, no lock is held.

`INGOT_TEST_KILLS=50 pytest -m slow tests/cli/test_serve_killed.py` kills 50 of them.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import httpx
import pytest

from bench import random_models
from bench.servers import ready_url
from foundry.package import MODELS
from ingot.cache.disk.survey import FolderSurvey
from ingot.cli import serve
from ingot.cli.client import ServerClient
from ingot.cli.flags import CommandParser, add_settings, settings_from_arguments
from ingot.cli.serve import (
    MOST_RESTARTS,
    RESTART_WINDOW_S,
    RESTARTS_VARIABLE,
    _LostDevice,
    ready_record,
    restart_process,
)
from ingot.config import DEFAULT_MODEL, Settings, load_config
from ingot.distributed.place import LISTEN_VARIABLE
from ingot.engine.loading.fleet_models import find_model_files
from ingot.engine.request import ModelCard
from ingot.errors import ConfigError, DeviceLost, IngotError, Unsupported
from ingot.http.server import Listener
from ingot.models.files.model_store import is_stored
from ingot.models.files.packaged import find_packaged_model
from ingot.protocol.openai.chat import read_chat
from ingot.protocol.openai.completions import read_completion
from ingot.protocol.served import ServedModel
from ingot.text.tool_formats.registry import FoundFormat, find_format, format_by_name
from tests.cli.conftest import Done
from tests.cli.scripted import environment
from tests.http import scripted as toy
from tests.processes import INGOT, run, start
from tests.waiting import WAIT_S

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
    folder = load_config({}, os.environ).settings.models_dir
    model = find_packaged_model(DEFAULT_MODEL)
    if model is None or not is_stored(folder / DEFAULT_MODEL, model.origin):
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
    found = FoundFormat(format_by_name("qwen"), "template")
    assert ready_record("http://127.0.0.1:8000", CARD, found, needs_key=True).splitlines() == [
        "ready: http://127.0.0.1:8000 | tiny (float32) | some chip (cpu) | context 4096 tokens | memory budget 3.5 GB"
        " | tool format qwen",
        "note: no compiler: slower",
        "try: curl http://127.0.0.1:8000/v1/chat/completions"
        " -H \"Authorization: Bearer $INGOT_API_KEY\" -H 'Content-Type: application/json'"
        ' -d \'{"model": "default", "messages": [{"role": "user", "content": "How do plants make food?"}]}\'',
    ]
    assert "Authorization" not in ready_record("http://127.0.0.1:8000", CARD, found, needs_key=False)


def test_the_ready_record_says_how_tokens_are_sampled_where_requests_say_nothing() -> None:
    found, sampling = FoundFormat(format_by_name("qwen"), "template"), {"temperature": 0.2, "top_p": 0.9}
    line = ready_record("http://x", CARD, found, needs_key=False, sampling=sampling).splitlines()[0]
    assert line.endswith(" | sampling: temperature 0.2, top_p 0.9")


def test_the_ready_record_says_what_numbers_are() -> None:
    formats = "weights Q4_K_M, activations 8-bit, states float16"
    found = FoundFormat(format_by_name("qwen"), "template")
    assert f"| tiny ({formats}) |" in ready_record("http://x", replace(CARD, formats=formats), found, needs_key=False)


def test_the_ready_record_says_who_guesses_ahead() -> None:
    found = FoundFormat(format_by_name("qwen"), "template")
    guessing = replace(CARD, proposers=("forced", "lookup"))
    line = ready_record("http://x", guessing, found, needs_key=False).splitlines()[0]
    assert line.endswith(" | speculation: forced, lookup")
    assert "guessing" not in ready_record("http://x", CARD, found, needs_key=False)


def test_the_ready_record_says_what_was_compiled() -> None:
    found = FoundFormat(format_by_name("qwen"), "template")
    compiled = replace(CARD, kernels="3 compiled, in 1.2 s")
    line = ready_record("http://x", compiled, found, needs_key=False).splitlines()[0]
    assert line.endswith(" | kernels: 3 compiled, in 1.2 s")
    assert "kernels" not in ready_record("http://x", CARD, found, needs_key=False)


def test_the_ready_record_says_when_the_format_of_calls_is_a_guess() -> None:
    guess = find_format("{{ messages }}", "unheard_of")
    line, *notes = ready_record("http://x", CARD, guess, needs_key=False).splitlines()
    assert line.endswith("| tool format hermes (a guess)")
    assert any("hermes is a guess" in note and "--tool-format" in note for note in notes)
    by_type = find_format("{{ messages }}", "llama")
    line, *notes = ready_record("http://x", CARD, by_type, needs_key=False).splitlines()
    assert line.endswith("| tool format llama (a guess)")
    assert any("llama is a guess: by the model's type" in note for note in notes)
    told = find_format("<|python_tag|>", "llama")
    assert "guess" not in ready_record("http://x", CARD, told, needs_key=False)


def test_the_ready_record_says_why_a_response_template_is_not_used() -> None:
    found = find_format("<|python_tag|>", "llama", {"version": 7, "fields": {}})
    notes = ready_record("http://x", CARD, found, needs_key=False).splitlines()
    assert "note: the checkpoint's response_template is not used: its version is 7" in notes


def test_a_model_that_cannot_chat_is_tried_with_a_text_and_says_how_it_could() -> None:
    told = find_format(None, "llama")
    line, *notes, curl = ready_record("http://x", CARD, told, needs_key=False, chats=False).splitlines()
    assert "tool format" not in line
    assert any("--chat-template" in note for note in notes)
    assert curl.startswith("try: curl http://x/v1/completions ")
    body = json.loads(curl.split(" -d ")[1].strip("'"))
    served = ServedModel.of(toy.CARD, toy.ByteTokenizer(None), toy.settings())  # type: ignore[arg-type]
    assert read_completion(body, served, "one").request.prompts
    with pytest.raises(Unsupported, match="--chat-template"):
        read_chat({"messages": [{"role": "user", "content": "Hi"}]}, served, "one")


def test_a_served_model_answers_what_the_ready_record_says_is_listed_and_ctrl_c_ends_it(
    serving: tuple[subprocess.Popen[str], list[str]], tmp_path: Path
) -> None:
    process, lines = serving
    facts = lines[0].split(" | ")
    assert facts[0].startswith("ready: http://127.0.0.1:")
    assert facts[1].startswith(DEFAULT_MODEL) and facts[3] == "context 256 tokens"
    url = facts[0].removeprefix("ready: ")
    body = json.loads(lines[-1].split(" -d ")[1].strip("'"))
    answer = ServerClient(url).post("chat/completions", body | {"max_tokens": 2})
    assert answer["choices"][0]["message"]["content"]
    (listed,) = (tmp_path / ".local/state/ingot/servers").iterdir()
    record = json.loads(listed.read_text())
    assert (record["pid"], record["url"], record["state"]) == (process.pid, url, "ready")
    assert record["models"] == [[DEFAULT_MODEL, "loaded"]]
    process.send_signal(signal.SIGINT)
    assert process.wait(WAIT_S) == 0
    assert not listed.exists()


def test_a_model_runs_inside_the_chat_when_no_server_is_named(models: Path, tmp_path: Path) -> None:
    command = [INGOT, "chat", str(models / "small"), "--max-tokens", "2", "--temperature", "0"]
    env = environment(tmp_path)
    done = run(command, input="hi", capture_output=True, text=True, timeout=LONGEST_START_S, env=env)
    assert (done.returncode, done.stdout.strip() != "") == (0, True)


def test_a_start_that_fails_once_the_model_is_loaded_ends_in_a_line_and_no_abort(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.json"
    prompts.write_text(json.dumps(["word " * 400]))
    command = [INGOT, "serve", str(MODELS / "dense"), "--port", "0", "--context", "256"]
    command += ["--warm-prompts", str(prompts)]
    env = environment(tmp_path)
    done = run(command, capture_output=True, text=True, timeout=LONGEST_START_S, env=env)
    assert done.returncode == 2, done.stderr
    assert done.stderr.splitlines()[-1].startswith(f"ingot serve: {prompts}")
    assert "terminate" not in done.stderr


def test_a_taken_port_is_known_before_the_model_is_loaded(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        command = [INGOT, "serve", "no/such-model", "--port", port]
        done = run(command, capture_output=True, text=True, timeout=60, env=environment(tmp_path))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"ingot serve: Port {port} on 127.0.0.1 is in use. Choose another with --port, or 0 for any free one.\n"
    )


def test_a_model_that_is_not_there_is_one_line_and_exit_code_1(tmp_path: Path) -> None:
    command = [INGOT, "serve", "smollm2-135n", "--port", "0", "--offline"]
    done = run(command, capture_output=True, text=True, timeout=60, env=environment(tmp_path))
    assert done.returncode == 1
    assert done.stderr.startswith("ingot serve: there is no model 'smollm2-135n'. Did you mean 'smollm2-135m'?")
    assert done.stderr.count("\n") == 1


def test_pull_says_where_the_model_is(shelf: str, run_here: Callable[..., Done]) -> None:
    done = run_here("pull", "--offline", "--models-dir", shelf)
    assert (done.returncode, done.stdout) == (0, f"{shelf}/{DEFAULT_MODEL}\n")


KILLS = int(os.environ.get("INGOT_TEST_KILLS", "4"))
NAMES = ("dense", "window")
PATIENCE_S = 120
LONGEST_S = 0.5
"""From when a model is seen on its way to the kill."""


@pytest.fixture
def tables(tmp_path: Path) -> Path:
    """Two models with room for one, and a folder for what they compute."""
    lines = ["lazy = true", 'memory = "260MB"', "min_residency_s = 0", f'cache_dir = "{tmp_path / "cache"}"']
    lines += [*("cache_disk_gb = 0.1", "cache_disk_free_gb = 0")]
    for name in NAMES:
        lines += [f"[models.{name}]", f'path = "{MODELS / name}"', 'memory = "200MB"', "context = 1024"]
    file = tmp_path / "tables.toml"
    file.write_text("\n".join(lines))
    return file


@contextmanager
def serving_of_serve_killed(tables: Path, home: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    command = [sys.executable, "-m", "ingot", "serve", "--config", str(tables), "--port", "0"]
    log = home / "log"
    with log.open("wb") as output:
        process = start(command, stdout=output, stderr=subprocess.STDOUT, env=environment(home))
    try:
        yield process, wait_for(process, log)
        process.terminate()
        process.wait(PATIENCE_S)
    finally:
        process.kill()
        process.wait()
    assert b"Traceback" not in log.read_bytes()


def wait_for(process: subprocess.Popen[bytes], log: Path) -> str:
    pause = threading.Event()
    for _ in range(10 * PATIENCE_S):
        if url := ready_url(log.read_text(errors="replace")):
            return url
        assert process.poll() is None, log.read_text(errors="replace")
        pause.wait(0.1)
    raise AssertionError("the server was never ready")


def ask(url: str, model: str) -> str:
    body = {"model": model, "prompt": "the river runs past an old mill " * 20, "max_tokens": 4, "temperature": 0}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE_S)
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["text"]
    return text


def kill_on_the_way(process: subprocess.Popen[bytes], url: str, model: str, after_s: float) -> None:
    """Ask for a model, and kill the server so long after it was first seen to be loaded for that."""

    def asked() -> None:
        with pytest.raises(httpx.HTTPError):
            httpx.post(f"{url}/v1/completions", json={"model": model, "prompt": "x"}, timeout=PATIENCE_S)

    client = threading.Thread(target=asked)
    client.start()
    pause = threading.Event()
    for _ in range(100 * PATIENCE_S):
        standing = httpx.get(f"{url}/v1/models/{model}").json()
        if standing["state"] == "loading":
            break
        pause.wait(0.01)
    pause.wait(after_s)
    process.send_signal(signal.SIGKILL)
    process.wait()
    client.join()


def check(folder: Path) -> None:
    """As a person's `ingot cache verify` would, and that no writer's lock is left."""
    survey = FolderSurvey.of(folder)
    assert list(survey.problems()) == [] and survey.damaged == []


@pytest.mark.slow
def test_a_server_that_is_killed_in_a_load_or_a_swap_starts_again(tables: Path, tmp_path: Path) -> None:
    dice = random.Random(0)
    with serving_of_serve_killed(tables, tmp_path) as (_, url):
        told = {name: ask(url, name) for name in NAMES}
    for kill in range(KILLS):
        swaps = kill % 2 == 0
        with serving_of_serve_killed(tables, tmp_path) as (process, url):
            if swaps:
                assert ask(url, NAMES[0]) == told[NAMES[0]]
            kill_on_the_way(process, url, NAMES[1], dice.random() * LONGEST_S)
        check(tmp_path / "cache")
    with serving_of_serve_killed(tables, tmp_path) as (_, url):
        assert {name: ask(url, name) for name in NAMES} == told
        cached = httpx.get(f"{url}/v1/cache", params={"model": NAMES[1]}).json()
        assert cached["disk"]["records"] > 0 and cached["totals"]["disk"]["hits"] > 0, json.dumps(cached)
    left = [file.name for file in (tmp_path / "cache").rglob("*") if file.suffix == ".part"]
    assert left == []


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for name in ("large", "small"):
        random_models.write(folder / name, "dispatch")
    return folder


def helpers(models: Path, **changes: Any) -> dict[str, Path]:
    _, found = find_model_files(Settings(model=str(models / "large"), **changes), "chat")
    return {role: folder.path for role, folder in found.items()}


@pytest.mark.parametrize("proposer", ["draft", "eagle"])
def test_a_proposers_model_is_found_like_any_other(models: Path, proposer: str) -> None:
    assert helpers(models, speculate=f"lookup,{proposer}:{models / 'small'}") == {proposer: models / "small"}


def test_without_one_there_is_none(models: Path) -> None:
    assert helpers(models) == {}


def test_a_model_that_scores_prompts_is_found_too(models: Path) -> None:
    small = models / "small"
    assert helpers(models, specprefill=True, specprefill_draft_model=str(small)) == {"scorer": small}


def test_a_draft_model_that_is_not_there_is_one_line_and_exit_code_1(models: Path, tmp_path: Path) -> None:
    command = [INGOT, "serve", str(models / "large"), "--port", "0", "--offline", "--draft-model", "smollm2-135n"]
    done = run(command, capture_output=True, text=True, timeout=60, env=environment(tmp_path))
    assert done.returncode == 1 and "Did you mean 'smollm2-135m'?" in done.stderr


def test_all_models_of_a_folder_are_served_lazily_and_each_for_what_it_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    served: list[Any] = []
    monkeypatch.setattr(serve, "_serve_fleet", lambda entries, *_, **__: served.extend(entries))
    for name in ("hybrid", "rerank"):
        (tmp_path / name).symlink_to(MODELS / name)
    assert serve.run_serve(["--models-dir", str(tmp_path), "--all"]) == 0
    assert {entry.name: (entry.kind, entry.preload, entry.path) for entry in served} == {
        "hybrid": ("chat", False, str(tmp_path / "hybrid")),
        "rerank": ("rerank", False, str(tmp_path / "rerank")),
    }


@pytest.mark.parametrize(
    ("words", "said"),
    [(["smollm2-135m"], "do not give model, too"), ([], "there are no models in")],
)
def test_all_models_of_a_folder_are_not_served_beside_one_nor_where_there_are_none(
    words: list[str], said: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=said):
        serve.run_serve([*words, "--models-dir", str(tmp_path), "--all"])


def test_flags_of_other_servers_are_flags_of_serve(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    parser = CommandParser("serve", "")
    add_settings(parser)
    settings = settings_from_arguments(
        parser.parse(["--enable-mtp", "--draft-model", "a/b", "--mtp-num-draft-tokens", "2"])
    ).settings
    assert (settings.speculate, settings.speculate_tokens) == ("mtp,draft:a/b", 2)
    assert "--no-enable-mtp" not in parser.flags


DRIVER = """
import sys
from pathlib import Path
from ingot.cli.main import main
from ingot.models.adapter import ModelAdapter

trigger, run = Path(sys.argv[1]), ModelAdapter.run

def failing(self, *given, **asked):
    if trigger.exists():
        trigger.unlink()
        raise RuntimeError("cudaStreamSynchronize(stream) failed: unspecified launch failure")
    return run(self, *given, **asked)

ModelAdapter.run = failing
sys.exit(main(sys.argv[2:]))
"""
PROMPT = "the river runs past an old mill " * 20


class Served:
    """A server's process, which loses its device when it is told to."""

    def __init__(self, home: Path, *flags: str) -> None:
        self._home, self.log = home, home / "log"
        (home / "driver.py").write_text(DRIVER)
        command = [sys.executable, str(home / "driver.py"), str(home / "trigger"), "serve", *flags, "--port", "0"]
        with self.log.open("wb") as output:
            self.process = start(command, stdout=output, stderr=subprocess.STDOUT, env=environment(home))

    @property
    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def await_ready(self, times: int) -> str:
        """Until it has said so that many times; gives its address."""
        self.until(lambda: self.said.count("\nready: ") + self.said.startswith("ready: ") == times)
        url = ready_url(self.said)
        assert url is not None and self.said.count(f"ready: {url} ") == times, "it is at the same port"
        return url

    def until(self, holds: Callable[[], bool]) -> None:
        pause = threading.Event()
        for _ in range(20 * PATIENCE_S):
            if holds():
                return
            assert self.process.poll() is None, self.said
            pause.wait(0.05)
        raise AssertionError(self.said)

    def lose(self) -> None:
        (self._home / "trigger").touch()


@contextmanager
def served(home: Path, *flags: str) -> Iterator[Served]:
    made = Served(home, *flags)
    try:
        yield made
    finally:
        made.process.kill()
        made.process.wait()


def ask_of_serve_lost_device(url: str, **more: Any) -> httpx.Response:
    body = {"prompt": PROMPT, "max_tokens": 4, "temperature": 0, **more}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE_S)


@pytest.mark.parametrize(
    "lazy", [pytest.param(False, id="one model"), pytest.param(True, id="a fleet", marks=pytest.mark.slow)]
)
def test_a_server_that_loses_its_device_answers_again_from_what_is_on_disk(lazy: bool, tmp_path: Path) -> None:
    flags = [str(MODELS / "dense"), "--cache-dir", str(tmp_path / "cache"), "--cache-disk-free-gb", "0"]
    with served(tmp_path, *flags, *(["--lazy"] if lazy else [])) as server, ThreadPoolExecutor() as clients:
        url = server.await_ready(1)
        before = ask_of_serve_lost_device(url).json()
        server.until(lambda: any((tmp_path / "cache").rglob("*.safetensors")))
        long = [
            clients.submit(ask_of_serve_lost_device, url, prompt=f"{number}", max_tokens=3000, ignore_eos=True)
            for number in range(2)
        ]
        server.until(lambda: httpx.get(f"{url}/health").json()["running"] == 2)
        server.lose()
        for answer in [each.result(PATIENCE_S) for each in long]:
            assert answer.status_code == 503 and answer.json()["error"]["code"] == "device_lost", answer.text
        server.await_ready(2)
        server.until(lambda: httpx.get(f"{url}/health").status_code == 200)
        after = ask_of_serve_lost_device(url).json()
        assert after["choices"] == before["choices"]
        assert (before["ingot"]["cache"]["matched_tokens"], after["ingot"]["cache"]["tier"]) == (0, "disk")
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(PATIENCE_S) == 0, server.said
    assert "double free" not in server.said and "terminate" not in server.said


class Left(Exception):
    """The process has ended, or is another one."""


@pytest.fixture
def left(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The files that it handed on, and then what it ended with, or became."""
    handed: list[int] = []
    found: list[Any] = [handed]

    def leave(*given: Any) -> NoReturn:
        found.extend(given)
        raise Left

    monkeypatch.setattr(serve.os, "_exit", leave)
    monkeypatch.setattr(serve.os, "execv", leave)
    monkeypatch.setattr(serve.os, "set_inheritable", lambda file, inherits: handed.append(file) if inherits else None)
    monkeypatch.delenv(RESTARTS_VARIABLE, raising=False)
    monkeypatch.delenv(LISTEN_VARIABLE, raising=False)
    yield found
    os.environ.pop(RESTARTS_VARIABLE, None)
    os.environ.pop(LISTEN_VARIABLE, None)


def test_the_same_command_is_run_again_with_the_same_sockets_and_no_other_file(left: list[Any]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        with pytest.raises(Left):
            restart_process([listening])
        handed, program, words = left
        assert (program, words[1:]) == (sys.executable, sys.orig_argv[1:])
        assert handed == [listening.fileno()] and os.environ[LISTEN_VARIABLE] == str(listening.fileno())


def test_a_device_that_is_lost_too_often_is_the_end(
    left: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 1_000_000.0
    monkeypatch.setattr(serve.time, "time", lambda: now)
    for _ in range(MOST_RESTARTS):
        with pytest.raises(Left):
            restart_process([])
        assert left[1] == sys.executable
        del left[1:]
        now += 1
    with pytest.raises(Left):
        restart_process([])
    assert left[1:] == [DeviceLost.exit_code]
    assert "the device was lost 4 times within 10 minutes; the server is not started again" in capsys.readouterr().err
    del left[1:]
    now += RESTART_WINDOW_S
    with pytest.raises(Left):
        restart_process([])
    assert left[1] == sys.executable, "what was long ago does not count"


class Stopping:
    """A server that is told to end."""

    def __init__(self, listening: socket.socket, *, stopped: bool) -> None:
        self.listener = Listener((listening,), "127.0.0.1", listening.getsockname()[1])
        self.stopped, self.fatal_error = stopped, threading.Event()

    def give_up(self, error: IngotError) -> None:
        assert isinstance(error, DeviceLost)
        self.fatal_error.set()


@pytest.mark.parametrize(("stopped", "alone"), [(True, True), (False, False)], ids=["it was stopping", "a rank"])
def test_who_was_stopping_and_who_has_a_parent_ends_and_does_not_start_again(
    stopped: bool, alone: bool, left: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve, "LOST_DEVICE_GRACE_S", PATIENCE_S)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = Stopping(listening, stopped=stopped)
        lost = _LostDevice(server, alone=alone)  # type: ignore[arg-type]
        lost()
        assert server.fatal_error.is_set()
        with pytest.raises(Left):
            lost.leave()
        assert left[1:] == [DeviceLost.exit_code]
        for one in lost._listening:
            one.close()


def test_a_server_that_cannot_end_its_requests_is_started_again_nevertheless(
    left: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    again = threading.Event()
    monkeypatch.setattr(serve, "LOST_DEVICE_GRACE_S", 0.0)
    monkeypatch.setattr(serve, "restart_process", lambda listening: [one.close() for one in listening] and again.set())
    with socket.create_server(("127.0.0.1", 0)) as listening:
        _LostDevice(Stopping(listening, stopped=False))()  # type: ignore[arg-type]
        assert again.wait(PATIENCE_S)
