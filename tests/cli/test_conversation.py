from __future__ import annotations

import json
from pathlib import Path

import pytest

from ingot.cli.conversation import ChatSession, sampling_value
from ingot.errors import ConfigError


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def test_a_request_holds_the_system_prompt_the_turns_and_the_parameters() -> None:
    chat = ChatSession("m", system="be brief", sampling={"temperature": 0.5})
    chat.ask("one")
    chat.answered("1")
    assert chat.ask("two") == {
        "model": "m",
        "stream": True,
        "temperature": 0.5,
        "messages": [{"role": "system", "content": "be brief"}, user("one"), assistant("1"), user("two")],
    }


def test_a_question_without_an_answer_is_not_kept() -> None:
    chat = ChatSession("m")
    chat.ask("lost")
    assert chat.ask("next")["messages"] == [user("next")]


def test_retry_forgets_the_last_answer_and_nothing_else() -> None:
    chat = ChatSession("m")
    chat.ask("hi")
    chat.answered("first")
    chat.ask("hi")  # fails
    assert chat.retry() == "hi"
    assert chat.messages == [user("hi"), assistant("first")]
    chat.ask("hi")
    chat.answered("second")
    assert chat.retry() == "hi"
    assert chat.messages == [user("hi"), assistant("first")]


def test_clear_keeps_the_system_prompt() -> None:
    chat = ChatSession("m", system="s")
    chat.ask("hi")
    chat.answered("ho")
    chat.clear()
    assert chat.messages == [{"role": "system", "content": "s"}]
    assert chat.retry() is None


def test_a_saved_conversation_never_overwrites_a_file(tmp_path: Path) -> None:
    chat = ChatSession("m")
    chat.ask("hi")
    chat.answered("ho\n")
    chat.save(tmp_path / "a.json")
    chat.save(tmp_path / "a.md")
    assert json.loads((tmp_path / "a.json").read_text())["messages"] == [user("hi"), assistant("ho\n")]
    assert (tmp_path / "a.md").read_text() == "## user\n\nhi\n\n## assistant\n\nho\n\n"
    with pytest.raises(FileExistsError):
        chat.save(tmp_path / "a.md")


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("temprature", "1", "did you mean temperature"),
        ("temperature", "warm", "not a number"),
        ("temperature", "nan", "finite"),
        ("top_k", "1.5", "whole number"),
    ],
)
def test_a_parameter_of_the_wrong_name_or_type_is_refused(name: str, text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        sampling_value(name, text)
