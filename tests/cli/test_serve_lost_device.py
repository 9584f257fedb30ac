"""A server whose device is lost ends its requests in words and is started again, at the same port and with what is on
disk. The loss is put in from outside: a forward pass that raises what CUDA says."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import httpx
import pytest

from bench.servers import ready_url
from foundry.package import MODELS
from ingot.cli import serve
from ingot.cli.serve import MOST_RESTARTS, RESTARTS, WITHIN_S, _Lost, start_again
from ingot.distributed.place import LISTENING
from ingot.errors import DeviceLost, IngotError
from ingot.http.server import Listener
from tests.cli.scripted import environment

PATIENCE_S = 120
DRIVER = """
import sys
from pathlib import Path
from ingot.cli.main import main
from ingot.models.adapter import Adapter

trigger, run = Path(sys.argv[1]), Adapter.run

def failing(self, *given, **asked):
    if trigger.exists():
        trigger.unlink()
        raise RuntimeError("cudaStreamSynchronize(stream) failed: unspecified launch failure")
    return run(self, *given, **asked)

Adapter.run = failing
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
            self.process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment(home))

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


def ask(url: str, **more: Any) -> httpx.Response:
    body = {"prompt": PROMPT, "max_tokens": 4, "temperature": 0, **more}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE_S)


@pytest.mark.parametrize(
    "lazy", [pytest.param(False, id="one model"), pytest.param(True, id="a fleet", marks=pytest.mark.slow)]
)
def test_a_server_that_loses_its_device_answers_again_from_what_is_on_disk(lazy: bool, tmp_path: Path) -> None:
    flags = [str(MODELS / "dense"), "--cache-dir", str(tmp_path / "cache"), "--cache-disk-free-gb", "0"]
    with served(tmp_path, *flags, *(["--lazy"] if lazy else [])) as server, ThreadPoolExecutor() as clients:
        url = server.await_ready(1)
        before = ask(url).json()
        server.until(lambda: any((tmp_path / "cache").rglob("*.safetensors")))
        long = [clients.submit(ask, url, prompt=f"{number}", max_tokens=3000, ignore_eos=True) for number in range(2)]
        server.until(lambda: httpx.get(f"{url}/health").json()["running"] == 2)
        server.lose()
        for answer in [each.result(PATIENCE_S) for each in long]:
            assert answer.status_code == 503 and answer.json()["error"]["code"] == "device_lost", answer.text
        server.await_ready(2)
        server.until(lambda: httpx.get(f"{url}/health").status_code == 200)
        after = ask(url).json()
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
    monkeypatch.delenv(RESTARTS, raising=False)
    monkeypatch.delenv(LISTENING, raising=False)
    yield found
    os.environ.pop(RESTARTS, None)
    os.environ.pop(LISTENING, None)


def test_the_same_command_is_run_again_with_the_same_sockets_and_no_other_file(left: list[Any]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        with pytest.raises(Left):
            start_again([listening])
        handed, program, words = left
        assert (program, words[1:]) == (sys.executable, sys.orig_argv[1:])
        assert handed == [listening.fileno()] and os.environ[LISTENING] == str(listening.fileno())


def test_a_device_that_is_lost_too_often_is_the_end(
    left: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 1_000_000.0
    monkeypatch.setattr(serve.time, "time", lambda: now)
    for _ in range(MOST_RESTARTS):
        with pytest.raises(Left):
            start_again([])
        assert left[1] == sys.executable
        del left[1:]
        now += 1
    with pytest.raises(Left):
        start_again([])
    assert left[1:] == [DeviceLost.exit_code]
    assert "the device was lost 4 times within 10 minutes; the server is not started again" in capsys.readouterr().err
    del left[1:]
    now += WITHIN_S
    with pytest.raises(Left):
        start_again([])
    assert left[1] == sys.executable, "what was long ago does not count"


class Stopping:
    """A server that is told to end."""

    def __init__(self, listening: socket.socket, *, stopped: bool) -> None:
        self.listener = Listener((listening,), "127.0.0.1", listening.getsockname()[1])
        self.stopped, self.given_up = stopped, threading.Event()

    def give_up(self, error: IngotError) -> None:
        assert isinstance(error, DeviceLost)
        self.given_up.set()


@pytest.mark.parametrize(("stopped", "alone"), [(True, True), (False, False)], ids=["it was stopping", "a rank"])
def test_who_was_stopping_and_who_has_a_parent_ends_and_does_not_start_again(
    stopped: bool, alone: bool, left: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve, "LAST_WORDS_S", PATIENCE_S)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = Stopping(listening, stopped=stopped)
        lost = _Lost(server, alone=alone)  # type: ignore[arg-type]
        lost()
        assert server.given_up.is_set()
        with pytest.raises(Left):
            lost.leave()
        assert left[1:] == [DeviceLost.exit_code]
        for one in lost._listening:
            one.close()


def test_a_server_that_cannot_end_its_requests_is_started_again_nevertheless(
    left: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    again = threading.Event()
    monkeypatch.setattr(serve, "LAST_WORDS_S", 0.0)
    monkeypatch.setattr(serve, "start_again", lambda listening: [one.close() for one in listening] and again.set())
    with socket.create_server(("127.0.0.1", 0)) as listening:
        _Lost(Stopping(listening, stopped=False))()  # type: ignore[arg-type]
        assert again.wait(PATIENCE_S)
