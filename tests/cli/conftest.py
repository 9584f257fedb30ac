"""Commands without the price of a process."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from ingot.cli.main import main
from tests.cli.scripted import environment


@dataclass(frozen=True)
class Done:
    """As `subprocess.run` would tell it."""

    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def run_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[..., Done]:
    """Runs a command in this process, where seconds' worth of imports are there already, for a user whose home is
    `tmp_path` and whose cache of the hub is empty."""
    env = environment(tmp_path)
    for name in os.environ.keys() - env.keys():
        monkeypatch.delenv(name)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("ingot.cli.models.list_hub_cache", lambda: iter(()))

    def run(*words: str | Path) -> Done:
        capfd.readouterr()
        code = main([str(word) for word in words])
        captured = capfd.readouterr()
        return Done(code, captured.out, captured.err)

    return run
