from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ingot.cli.peers import processes
from ingot.cli.peers.processes import Placement, Server, environment, ready_url, tree_bytes
from ingot.cli.peers.table import Peer


def test_a_server_is_stopped_when_waiting_for_it_is_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[subprocess.Popen[bytes]] = []

    def interrupted(name: str, process: subprocess.Popen[bytes], *_: Any) -> str:
        started.append(process)
        raise SystemExit(143)

    monkeypatch.setattr(processes, "wait_until_ready", interrupted)
    peer = Peer("waits", sys.executable, ("folder",), ("{program}", "-c", "import signal; signal.pause()"))
    server = Server(peer, Path(sys.executable), Placement(tmp_path, "m", 1, 64, tmp_path / "scratch"))
    with pytest.raises(SystemExit), server:
        pass
    assert not server.running and started[0].poll() is not None


def test_the_address_is_taken_from_the_ready_line() -> None:
    said = "loading x\nready: http://127.0.0.1:4711 | x (float32) | cpu\ntry: curl http://127.0.0.1:4711/v1\n"
    assert ready_url(said) == "http://127.0.0.1:4711"
    assert ready_url("loading x\nnot ready: soon") is None


def test_settings_of_the_user_do_not_reach_the_servers_but_the_number_of_threads_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("INGOT_MAX_SEQUENCES", "1")
    monkeypatch.setenv("INGOT_CONFIG", "mine.toml")
    monkeypatch.setenv("INGOT_THREADS", "2")
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    found = environment()
    assert "PYTHONDONTWRITEBYTECODE" not in found
    assert "INGOT_MAX_SEQUENCES" not in found
    assert found["INGOT_CONFIG"] == os.devnull
    assert found["INGOT_THREADS"] == "2"
    assert found["PATH"] == os.environ["PATH"]


def test_memory_is_that_of_a_process_and_of_all_that_came_of_it_whatever_their_numbers() -> None:
    listing = " 50 1 10\n 7 50 20\n 90 7 30\n 8 1 1000\n"
    assert tree_bytes(50, listing) == 60 * 1024
    assert tree_bytes(8, listing) == 1000 * 1024
    assert tree_bytes(4, listing) == 0
