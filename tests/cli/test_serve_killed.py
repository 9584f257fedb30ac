"""A server with several models that is killed while one is loaded, or makes room for another, starts again as if it had
not been: nothing of the cache is damaged, nothing half-written stays, no lock is held.

`INGOT_TEST_KILLS=50 pytest -m slow tests/cli/test_serve_killed.py` kills 50 of them.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from bench.servers import ready_url
from foundry.package import MODELS
from ingot.cache.disk.survey import FolderSurvey
from tests.cli.scripted import environment

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
def serving(tables: Path, home: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    command = [sys.executable, "-m", "ingot.cli.main", "serve", "--config", str(tables), "--port", "0"]
    log = home / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment(home))
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
    with serving(tables, tmp_path) as (_, url):
        told = {name: ask(url, name) for name in NAMES}
    for kill in range(KILLS):
        swaps = kill % 2 == 0
        with serving(tables, tmp_path) as (process, url):
            if swaps:
                assert ask(url, NAMES[0]) == told[NAMES[0]]
            kill_on_the_way(process, url, NAMES[1], dice.random() * LONGEST_S)
        check(tmp_path / "cache")
    with serving(tables, tmp_path) as (_, url):
        assert {name: ask(url, name) for name in NAMES} == told
        cached = httpx.get(f"{url}/v1/cache", params={"model": NAMES[1]}).json()
        assert cached["disk"]["records"] > 0 and cached["totals"]["disk"]["hits"] > 0, json.dumps(cached)
    left = [file.name for file in (tmp_path / "cache").rglob("*") if file.suffix == ".part"]
    assert left == []
