from __future__ import annotations

from pathlib import Path

import pytest

from ingot.cli.flags import CommandParser, add_settings, settings_from_arguments


@pytest.fixture(autouse=True)
def nothing_of_the_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))


@pytest.mark.parametrize(
    "arguments",
    [
        ["--alias", "claude-*=default,gpt-*=default"],
        ["--alias", "claude-*=default", "--alias", "gpt-*=default"],
        ["--alias=claude-*=default", "--alias=gpt-*=default"],
    ],
)
def test_a_list_is_given_at_once_or_one_by_one(arguments: list[str]) -> None:
    parser = CommandParser("serve", "")
    add_settings(parser)
    config = settings_from_arguments(parser.parse(arguments))
    assert config.settings.alias == ("claude-*=default", "gpt-*=default")
    assert config.origins["alias"] == "flag --alias"


def test_flags_of_other_servers_stand_for_ours(tmp_path: Path) -> None:
    parser = CommandParser("serve", "")
    add_settings(parser)
    namespace = parser.parse(["--ssd-cache-dir", str(tmp_path), "--ssd-cache-max-gb", "3"])
    settings = settings_from_arguments(namespace).settings
    assert (settings.cache_dir, settings.cache_disk_gb) == (tmp_path, 3.0)
