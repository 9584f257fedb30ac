"""`ingot ps` and `ingot stop`, with processes that run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from ingot.cli.servers import (
    ServerRecord,
    format_duration,
    list_servers,
    process_start,
    registered_server,
    resident_bytes,
    servers_folder,
)
from tests.cli.conftest import Done
from tests.cli.scripted import environment
from tests.processes import INGOT, start
from tests.waiting import WAIT_S

KEY = "sk-ingot-" + "x" * 40


@pytest.fixture
def home(run_here: Callable[..., Done]) -> Path:
    """Where `run_here` has its state."""
    return servers_folder()


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "import time; print(flush=True); time.sleep(600)"], stdout=-1)
    assert process.stdout is not None and process.stdout.readline()
    yield process
    process.kill()
    process.wait()


def record_of(pid: int, port: int = 8000) -> ServerRecord:
    return ServerRecord(pid, process_start(pid) or "", f"http://127.0.0.1:{port}", 1.0, 5.0, "ready", [("m", "loaded")])


def enter(folder: Path, record: ServerRecord) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{record.pid}.json"
    path.write_text(json.dumps(asdict(record)))
    return path


def test_a_server_is_listed_from_its_start_to_its_end_for_its_user_alone(home: Path) -> None:
    with registered_server("http://127.0.0.1:9", ["a", "b"], 5.0) as own:
        (found,) = list_servers()
        assert (found.pid, found.port, found.state) == (os.getpid(), 9, "loading")
        path = home / f"{os.getpid()}.json"
        assert (home.stat().st_mode & 0o777, path.stat().st_mode & 0o777) == (0o700, 0o600)
        own.update(state="ready", models=[("a", "loaded")], running=1, answered=2)
        (found,) = list_servers()
        assert (found.state, found.models, found.running) == ("ready", [("a", "loaded")], 1)
    assert list_servers() == [] and not path.exists()


def test_what_does_not_change_is_not_written_again(home: Path) -> None:
    with registered_server("http://127.0.0.1:9", [], 5.0) as own:
        path = home / f"{os.getpid()}.json"
        path.unlink()
        own.update(state="loading")
        assert not path.exists()
        own.update(state="ready")
        assert path.exists()


def test_files_of_processes_that_are_gone_or_are_others_by_now_are_removed(
    home: Path, sleeper: subprocess.Popen[bytes]
) -> None:
    kept = record_of(sleeper.pid)
    enter(home, kept)
    stale = enter(home, replace(record_of(os.getpid()), process_start="another start"))
    broken = home / "77.json"
    broken.write_text('{"pid": 77}')
    assert list_servers() == [kept]
    assert not stale.exists() and not broken.exists()
    sleeper.kill()
    sleeper.wait()
    assert list_servers() == []


def test_a_folder_that_cannot_be_written_is_no_reason_not_to_serve(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    with registered_server("http://127.0.0.1:9", [], 5.0) as own:
        own.update(state="ready")
        assert list_servers() == []


def test_a_process_has_memory_and_a_start_of_its_own(sleeper: subprocess.Popen[bytes]) -> None:
    assert (resident_bytes(sleeper.pid) or 0) > 1 << 20
    assert process_start(sleeper.pid) and process_start(sleeper.pid) == process_start(sleeper.pid)
    sleeper.kill()
    sleeper.wait()
    assert process_start(sleeper.pid) is None and resident_bytes(sleeper.pid) is None


def test_without_a_server_both_say_so(run_here: Callable[..., Done]) -> None:
    done = run_here("ps")
    assert (done.returncode, done.stdout) == (0, "") and "`ingot serve` starts one" in done.stderr
    done = run_here("stop")
    assert done.returncode == 1 and "no server of yours runs" in done.stderr


@pytest.mark.parametrize("name", ["8001", "http://127.0.0.1:8001", "http://127.0.0.1:8001/"])
def test_the_server_to_stop_is_the_one_that_is_named(
    name: str, run_here: Callable[..., Done], home: Path, sleeper: subprocess.Popen[bytes]
) -> None:
    enter(home, record_of(sleeper.pid, 8001))
    enter(home, record_of(os.getpid(), 8002))
    done = run_here("stop")
    assert done.returncode == 2 and "say which, or all" in done.stderr and str(os.getpid()) in done.stderr
    done = run_here("stop", "8003")
    assert done.returncode == 2 and "no server of yours has the process, port or address 8003" in done.stderr
    done = run_here("stop", name)
    assert done.returncode == 0 and done.stdout == f"stopped {sleeper.pid} (http://127.0.0.1:8001)\n"
    assert sleeper.wait() == -signal.SIGTERM


def test_one_that_does_not_end_is_killed_where_that_is_asked_for(
    run_here: Callable[..., Done], home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ignores = "import signal; [signal.signal(n, signal.SIG_IGN) for n in (2, 15)]; print(flush=True); signal.pause()"
    process = subprocess.Popen([sys.executable, "-c", ignores], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None and process.stdout.readline()
        enter(home, record_of(process.pid))
        monkeypatch.setattr("ingot.cli.servers.HURRY_S", (0.0, 0.0))
        assert run_here("stop", "--now").returncode == 0
        assert process.wait() == -signal.SIGKILL
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(("seconds", "text"), [(5, "5 s"), (125, "2 min"), (7500, "2 h 5 min"), (3e5, "3 days")])
def test_a_duration_is_told_in_the_unit_that_fits(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


@pytest.mark.slow
def test_a_real_server_is_listed_without_its_key_and_stopped(tmp_path: Path, run_here: Callable[..., Done]) -> None:
    env = environment(tmp_path, INGOT_API_KEY=KEY)
    server = start([INGOT, "serve", "--port", "0", "--lazy"], env=env, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None and server.stdout.readline().startswith("ready: ")
        (listed,) = json.loads(run_here("ps", "--json").stdout)["servers"]
        assert (listed["pid"], listed["state"]) == (server.pid, "ready")
        assert listed["models"] == {"smollm2-135m": "unloaded"} and listed["bytes"] > 1 << 20
        assert all(KEY not in path.read_text() for path in (tmp_path / ".local/state/ingot/servers").iterdir())
        assert f"stopped {server.pid}" in run_here("stop").stdout
        assert server.wait(WAIT_S) == 0
        assert not list((tmp_path / ".local/state/ingot/servers").iterdir())
    finally:
        server.kill()
        server.wait()
