"""`ingot extras`: the list, and what is run to add one."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ingot import extras
from ingot.extras import EXTRAS, own_requirements
from tests.cli.conftest import Done


@pytest.fixture
def installs(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands that would have installed something, with the constraints that they were given at the end."""
    ran: list[list[str]] = []

    def record(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        path = Path(command[-1].removeprefix("-c "))
        ran.append([*command[:-1], path.read_text()])
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr("ingot.cli.extras.subprocess.run", record)
    return ran


def test_every_extra_is_listed_with_its_versions(run_here: Callable[..., Done]) -> None:
    listed = json.loads(run_here("extras", "--json").stdout)
    assert [each["name"] for each in listed["extras"]] == list(EXTRAS)
    assert listed["python"] == sys.executable
    assert all(each["state"] == "installed" and all(each["packages"].values()) for each in listed["extras"])
    assert "speech-to-text" in run_here("extras").stdout


def test_only_what_is_missing_is_installed_and_what_ingot_requires_is_left_alone(
    run_here: Callable[..., Done], monkeypatch: pytest.MonkeyPatch, installs: list[list[str]]
) -> None:
    monkeypatch.setitem(sys.modules, "av", None)
    done = run_here("extras", "add", "vision", "audio")
    assert done.returncode == 0, done.stderr
    constraints = "\n".join(own_requirements())
    assert installs == [[sys.executable, "-m", "pip", "install", "av>=15,<19", "-c", constraints]]


def test_what_is_there_is_not_installed_again(run_here: Callable[..., Done], installs: list[list[str]]) -> None:
    done = run_here("extras", "add", "audio")
    assert (done.returncode, done.stdout, installs) == (0, "audio: installed\n", [])


def test_in_an_environment_of_pipx_it_keeps_the_packages(
    run_here: Callable[..., Done], monkeypatch: pytest.MonkeyPatch, installs: list[list[str]], tmp_path: Path
) -> None:
    (tmp_path / "pipx_metadata.json").write_text("{}")
    (tmp_path / "pipx").touch(mode=0o755)
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setitem(sys.modules, "av", None)
    run_here("extras", "--json")
    monkeypatch.setenv("PATH", str(tmp_path))
    run_here("extras", "add", "audio")
    assert installs[0][:5] == ["pipx", "inject", "ingot-mlx", "av>=15,<19", "--pip-args"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("add",), "say which: vision"),
        (("add", "vison"), "did you mean vision?"),
        (("remove", "vision"), "invalid choice"),
    ],
)
def test_a_mistake_installs_nothing(
    words: tuple[str, ...], said: str, run_here: Callable[..., Done], installs: list[list[str]]
) -> None:
    done = run_here("extras", *words)
    assert done.returncode == 2 and said in done.stderr and not installs


def test_without_pip_and_uv_it_says_what_to_do(
    run_here: Callable[..., Done], monkeypatch: pytest.MonkeyPatch, installs: list[list[str]]
) -> None:
    monkeypatch.setitem(sys.modules, "av", None)
    monkeypatch.setattr(extras, "installer", lambda: ["uv", "pip", "install"])
    monkeypatch.setattr("ingot.cli.extras.installer", lambda: ["uv", "pip", "install"])
    monkeypatch.setenv("PATH", "/nowhere")
    done = run_here("extras", "add", "audio")
    assert done.returncode == 1 and "-m ensurepip" in done.stderr and not installs
