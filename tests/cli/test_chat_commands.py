from __future__ import annotations

from pathlib import Path

import pytest

from ingot.cli.chat_commands import COMMANDS, Outcome, run_command
from ingot.cli.conversation import ChatSession


@pytest.fixture
def chat() -> ChatSession:
    return ChatSession("m")


def test_system_sets_shows_and_removes_the_system_prompt(chat: ChatSession) -> None:
    assert run_command(chat, "/system").say == "no system prompt is set"
    run_command(chat, "/system speak like a pirate")
    assert chat.system == "speak like a pirate"
    assert run_command(chat, "/system").say == "speak like a pirate"
    run_command(chat, "/system none")
    assert chat.system is None


def test_set_changes_shows_and_resets_a_parameter(chat: ChatSession) -> None:
    assert run_command(chat, "/set temperature 0.2").say == "temperature is 0.2"
    assert chat.sampling == {"temperature": 0.2}
    assert "temperature 0.2" in run_command(chat, "/set").say
    assert "top_p default" in run_command(chat, "/set").say
    run_command(chat, "/set temperature default")
    assert chat.sampling == {}


@pytest.mark.parametrize("line", ["/set temprature 1", "/set temperature hot", "/set nothing", "/save", "/retry"])
def test_a_mistake_is_said_and_changes_nothing(chat: ChatSession, line: str) -> None:
    assert run_command(chat, line).say
    assert chat == ChatSession("m")


def test_an_unknown_command_is_answered_with_the_nearest(chat: ChatSession) -> None:
    assert run_command(chat, "/quti").say == "unknown command /quti; did you mean /quit?"


def test_retry_asks_the_last_question_again(chat: ChatSession) -> None:
    chat.ask("hi")
    assert run_command(chat, "/retry") == Outcome(ask="hi")


def test_quit_leaves(chat: ChatSession) -> None:
    assert run_command(chat, "/quit") == Outcome(leave=True)


def test_help_lists_every_command(chat: ChatSession) -> None:
    text = run_command(chat, "/help").say
    assert all(command.usage in text and command.help in text for command in COMMANDS.values())


def test_save_says_why_it_cannot(chat: ChatSession, tmp_path: Path) -> None:
    assert run_command(chat, f"/save {tmp_path / 'x.md'}").say.startswith("saved")
    assert "File exists" in run_command(chat, f"/save {tmp_path / 'x.md'}").say
