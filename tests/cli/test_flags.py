from __future__ import annotations

from pathlib import Path

import pytest

from ingot.cli.flags import CommandParser, add_settings, settings_from_arguments
from ingot.errors import ConfigError


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


def test_every_command_that_takes_a_flag_of_another_server_says_what_is_always_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    parser = CommandParser("chat", "")
    add_settings(parser)
    with caplog.at_level("INFO", logger="ingot.cli"):
        settings_from_arguments(parser.parse(["--enable-prefix-caching", "--trust-remote-code"]))
    [line] = caplog.messages
    assert line.startswith("--trust-remote-code: ")


@pytest.mark.parametrize("word", ["auto", None])
def test_auto_is_the_default_of_a_setting_that_has_choices_and_none_of_that_name(word: str | None) -> None:
    parser = CommandParser("serve", "")
    add_settings(parser)
    words = ["--dtype", word] if word else []
    assert settings_from_arguments(parser.parse(words)).settings.dtype is None
    with pytest.raises(ConfigError, match="float32, bfloat16, float16"):
        settings_from_arguments(parser.parse(["--dtype", "fp8"]))


@pytest.mark.parametrize(
    ("words", "value"),
    [
        ("here", "off"),
        ("--specprefill here", "on"),
        ("here --specprefill", "on"),
        ("--specprefill auto here", "auto"),
        ("here --specprefill=auto", "auto"),
        ("--specprefill true here", "on"),
        ("--no-specprefill here", "off"),
        ("--specprefill off here", "off"),
    ],
)
def test_a_switch_may_have_a_word_and_never_takes_the_model_for_one(words: str, value: str) -> None:
    parser = CommandParser("serve", "about")
    parser.add_argument("model", nargs="?")
    add_settings(parser)
    settings = settings_from_arguments(parser.parse(words.split())).settings
    assert (settings.model, settings.specprefill) == ("here", value)


def test_a_switch_with_another_word_is_refused() -> None:
    parser = CommandParser("serve", "about")
    add_settings(parser)
    with pytest.raises(ConfigError, match="did you mean auto"):
        settings_from_arguments(parser.parse(["--specprefill=aut"]))
