"""`ingot serve` with models that guess ahead: found like any other, and handed to the engine."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

import ingot.engine.loading.language_model
from bench import random_models
from ingot.cli.flags import CommandParser, add_settings, settle
from ingot.cli.serve import start_engine
from ingot.config import Settings
from tests.cli.scripted import INGOT, environment


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for name in ("large", "small"):
        random_models.write(folder / name, "dispatch")
    return folder


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the engine was started with."""
    seen: dict[str, Any] = {}
    monkeypatch.setattr(ingot.engine.start, "start_engine", lambda settings, folder, **given: seen.update(given))
    return seen


@pytest.mark.parametrize("proposer", ["draft", "eagle"])
def test_a_proposers_model_is_found_like_any_other(models: Path, started: dict[str, Any], proposer: str) -> None:
    start_engine(Settings(model=str(models / "large"), speculate=f"lookup,{proposer}:{models / 'small'}"))
    found = {name: started[name].path if started[name] else None for name in ("draft", "eagle")}
    assert found == {"draft": None, "eagle": None} | {proposer: models / "small"}


def test_without_one_there_is_none(models: Path, started: dict[str, Any]) -> None:
    start_engine(Settings(model=str(models / "large")))
    assert started["draft"] is started["eagle"] is None


def test_a_model_that_scores_prompts_is_found_too(models: Path, started: dict[str, Any]) -> None:
    small = models / "small"
    start_engine(Settings(model=str(models / "large"), specprefill=True, specprefill_draft_model=str(small)))
    assert started["scorer"].path == small and started["draft"] is None


def test_a_draft_model_that_is_not_there_is_one_line_and_exit_code_1(models: Path, tmp_path: Path) -> None:
    command = [INGOT, "serve", str(models / "large"), "--port", "0", "--offline", "--draft-model", "smollm2-135n"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment(tmp_path))
    assert done.returncode == 1 and "Did you mean 'smollm2-135m'?" in done.stderr


def test_flags_of_other_servers_are_flags_of_serve(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    parser = CommandParser("serve", "")
    add_settings(parser)
    settings = settle(parser.parse(["--enable-mtp", "--draft-model", "a/b", "--mtp-num-draft-tokens", "2"])).settings
    assert (settings.speculate, settings.speculate_tokens) == ("mtp,draft:a/b", 2)
    assert "--no-enable-mtp" not in parser.flags
