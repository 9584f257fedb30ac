"""`ingot service`: what it writes, and what it asks of the system."""

from __future__ import annotations

import plistlib
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ingot.cli import service
from ingot.cli.service import make_service
from ingot.errors import ConfigError, IngotError

PYTHON = Path("/opt/ingot/bin/python")


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """The commands that the system was asked to run."""
    found: list[tuple[str, ...]] = []
    monkeypatch.setattr(service, "_run_system_command", found.append)
    monkeypatch.setattr("sys.platform", "linux")
    return found


def test_a_unit_starts_the_server_with_its_settings_and_lets_it_reload(home: Path) -> None:
    config = home / "100 %.toml"
    config.write_text("port = 8001\n")
    unit = make_service("linux", "ingot", PYTHON, config)
    assert unit.path == home / ".config/systemd/user/ingot.service"
    assert f'ExecStart=/opt/ingot/bin/python -m ingot serve --config "{home}/100 %%.toml"\n' in unit.text
    assert "ExecReload=/bin/kill -HUP $MAINPID\n" in unit.text and "WantedBy=default.target\n" in unit.text
    assert unit.start == (
        ("systemctl", "--user", "daemon-reload"),
        ("systemctl", "--user", "enable", "--now", "ingot.service"),
    )


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not here")
def test_systemd_understands_the_unit(tmp_path: Path) -> None:
    path = tmp_path / "ingot.service"
    path.write_text(make_service("linux", "ingot", Path("/bin/true"), None).text)
    done = subprocess.run(["systemd-analyze", "verify", str(path)], capture_output=True, text=True, check=False)
    assert "ingot.service" not in done.stderr


def test_a_plist_says_the_same_to_launchd(home: Path) -> None:
    agent = make_service("darwin", "mine", PYTHON, None)
    definition = plistlib.loads(agent.text.encode())
    assert agent.path == home / "Library/LaunchAgents/mine.plist"
    assert definition["ProgramArguments"] == [str(PYTHON), "-m", "ingot", "serve"]
    assert definition["Label"] == "mine" and definition["KeepAlive"] == {"SuccessfulExit": False}
    assert agent.start[0][:2] == ("launchctl", "bootstrap") and agent.stop[0][2].endswith("/mine")


def test_a_service_is_installed_shown_and_removed(
    called: list[tuple[str, ...]], home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert service.run_service(["show"]) == 0
    shown = capsys.readouterr().out
    path = home / ".config/systemd/user/ingot.service"
    assert not path.exists() and not called
    assert service.run_service(["install"]) == 0
    assert path.read_text() == shown and called[-1][-3:] == ("enable", "--now", "ingot.service")
    assert service.run_service(["install"]) == 0  # the same again changes nothing
    assert service.run_service(["uninstall"]) == 0
    assert not path.exists() and called[-1][-3:] == ("disable", "--now", "ingot.service")


@pytest.fixture
def unit_path(home: Path) -> Path:
    path = home / ".config/systemd/user/ingot.service"
    path.parent.mkdir(parents=True)
    return path


@pytest.fixture
def no_bus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine on which systemd has no session of this user's."""
    systemctl = tmp_path / "bin" / "systemctl"
    systemctl.parent.mkdir()
    systemctl.write_text("#!/bin/sh\necho 'Failed to connect to bus: No medium found' >&2\nexit 1\n")
    systemctl.chmod(0o755)
    monkeypatch.setenv("PATH", f"{systemctl.parent}:/usr/bin:/bin")
    monkeypatch.setattr("sys.platform", "linux")


@pytest.mark.parametrize("platform", ["linux", "darwin"])
def test_ingots_own_definition_is_known_with_other_settings_and_from_before_it_was_marked(
    platform: str, called: list[tuple[str, ...]], home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.platform", platform)
    (home / "other.toml").write_text("port = 8001\n")
    service.run_service(["install", "--config", str(home / "other.toml")])
    with pytest.raises(ConfigError, match="uninstall it first"):
        service.run_service(["install"])
    service.run_service(["uninstall"])
    service.run_service(["install"])
    path = make_service(platform, "ingot", PYTHON, None).path
    unmarked = [line for line in path.read_text().splitlines(keepends=True) if service.SERVICE_MARK not in line]
    path.write_text("".join(unmarked))
    service.run_service(["uninstall"])
    assert not path.exists()


def test_an_install_that_fails_over_a_definition_that_was_there_leaves_that(no_bus: None, unit_path: Path) -> None:
    unit_path.write_text(make_service("linux", "ingot", Path(sys.executable), None).text)
    with pytest.raises(IngotError, match="Failed to connect to bus"):
        service.run_service(["install"])
    assert unit_path.exists()


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["instal"], "did you mean install"),
        (["show", "--name", "../evil"], "is not a valid name"),
        (["show", "--config", "/nowhere.toml"], "/nowhere.toml does not exist"),
        (["uninstall"], "no service of that name is installed"),
    ],
)
def test_what_cannot_be_is_refused_in_words(called: list[tuple[str, ...]], arguments: list[str], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        service.run_service(arguments)


def test_what_the_system_says_is_told() -> None:
    with pytest.raises(IngotError, match=r"`false` failed: exit code 1"):
        service._run_system_command(("false",))
    with pytest.raises(IngotError, match="cannot run no-such-program"):
        service._run_system_command(("no-such-program",))
