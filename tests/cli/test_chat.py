from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ingot.cli.chat import (
    CHAT_COMMANDS,
    AnswerScreen,
    ChatSession,
    CommandOutcome,
    _show_answer,
    parse_sampling_value,
    printable_text,
    read_message,
    run_chat_command,
    shows_styles,
)
from ingot.cli.client import ServerClient, cut_short
from ingot.errors import ConfigError
from tests.cli.scripted import Answer, Script, environment, scripted_server
from tests.processes import INGOT, run
from tests.waiting import WAIT_S


def pipe(script: Script, home: Path, question: str, *flags: str, **extra: str) -> subprocess.CompletedProcess[str]:
    command = [INGOT, "chat", script.url, *flags]
    env = environment(home, **extra)
    return run(command, input=question, capture_output=True, text=True, timeout=60, env=env)


class Terminal:
    """A chat in a pseudo-terminal: what it showed so far, and a keyboard."""

    def __init__(self, script: Script, home: Path, *flags: str, through: tuple[str, ...] = (), **extra: str) -> None:
        self.master, slave = pty.openpty()
        command = [*through, INGOT, "chat", script.url, *flags]
        env = environment(home, **extra)
        self.process = subprocess.Popen(
            command, stdin=slave, stdout=slave, stderr=slave, env=env, start_new_session=True
        )
        os.close(slave)
        self.shown = ""

    def until(self, text: str) -> None:
        """Wait until `text` is shown after what earlier calls waited for."""
        while text not in self.shown:
            ready, _, _ = select.select([self.master], [], [], 30)
            assert ready, f"{text!r} never came; shown: {self.shown!r}"
            self.shown += os.read(self.master, 4096).decode()
        self.shown = self.shown.partition(text)[2]

    def type(self, line: str) -> None:
        os.write(self.master, line.encode() + b"\n")


@contextmanager
def terminal(
    script: Script, home: Path, *flags: str, through: tuple[str, ...] = (), **extra: str
) -> Iterator[Terminal]:
    """`through` is a program that starts the chat."""
    screen = Terminal(script, home, *flags, through=through, **extra)
    try:
        screen.until("> ")
        yield screen
    finally:
        screen.process.kill()
        screen.process.wait()
        os.close(screen.master)


def questions(script: Script) -> list[str]:
    return [body["messages"][-1]["content"] for body in script.bodies]


def test_a_piped_question_is_answered_on_stdout(tmp_path: Path) -> None:
    with scripted_server(Script()) as script:
        done = pipe(script, tmp_path, "two\nlines\n", "--system", "be brief", "--temperature", "0.2", "--top-k", "5")
    assert (done.returncode, done.stdout, done.stderr) == (0, "Hello there\n", "")
    assert script.bodies == [
        {
            "model": "scripted",
            "stream": True,
            "temperature": 0.2,
            "top_k": 5,
            "messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "two\nlines"}],
        }
    ]


def test_a_failed_answer_to_a_piped_question_is_exit_code_1(tmp_path: Path) -> None:
    refusal = Answer(status=400, body=b'{"error": {"message": "temperature is too hot"}}')
    with scripted_server(Script(answer=lambda _: refusal)) as script:
        done = pipe(script, tmp_path, "hi")
    assert (done.returncode, done.stderr) == (1, "ingot chat: temperature is too hot (HTTP 400)\n")


def test_an_empty_pipe_is_wrong_usage(tmp_path: Path) -> None:
    with scripted_server(Script()) as script:
        assert pipe(script, tmp_path, "").returncode == 2


def test_the_key_and_the_name_are_sent(tmp_path: Path) -> None:
    with scripted_server(Script()) as script:
        pipe(script, tmp_path, "hi", "--name", "other", INGOT_API_KEY="sesame")
    assert script.bodies[0]["model"] == "other"
    assert script.headers[0]["authorization"] == "Bearer sesame"


@pytest.mark.parametrize("flags", [("--context", "100"), ("--memory", "1GB"), ("--offline",)])
def test_flags_for_running_a_model_here_are_refused_with_a_url(tmp_path: Path, flags: tuple[str, ...]) -> None:
    with scripted_server(Script()) as script:
        done = pipe(script, tmp_path, "hi", *flags)
    assert done.returncode == 2
    assert flags[0] in done.stderr
    assert script.bodies == []


def test_a_conversation_goes_on_turn_by_turn(tmp_path: Path) -> None:
    with scripted_server(Script()) as script, terminal(script, tmp_path) as screen:
        screen.type("one")
        screen.until("Hello there")
        screen.until("> ")
        screen.type("/set seed 7")
        screen.until("seed is 7")
        screen.type("two\\")
        screen.until(". ")
        screen.type("more")
        screen.until("Hello there")
        screen.type("/quit")
        assert screen.process.wait(WAIT_S) == 0
    assert questions(script) == ["one", "two\nmore"]
    assert [message["content"] for message in script.bodies[1]["messages"]] == ["one", "Hello there", "two\nmore"]
    assert script.bodies[1]["seed"] == 7


def test_ctrl_c_stops_the_answer_and_not_the_program(tmp_path: Path) -> None:
    script = Script(answer=lambda body: Answer(pieces=("Once",), hangs=len(body["messages"]) == 1))
    with scripted_server(script), terminal(script, tmp_path) as screen:
        screen.type("tell me a story")
        screen.until("Once")
        screen.process.send_signal(signal.SIGINT)
        screen.until("(stopped)")
        assert script.left.wait(WAIT_S), "the server was not told to stop"
        screen.until("> ")
        screen.type("go on")
        screen.until("Once")
        screen.until("> ")
        screen.process.send_signal(signal.SIGINT)
        screen.type("")  # readline may notice a signal that comes with its prompt only at the next key
        screen.until("/quit exits")
        screen.type("/quit")
        assert screen.process.wait(WAIT_S) == 0
    assert [message["content"] for message in script.bodies[1]["messages"]] == ["tell me a story", "Once", "go on"]


def test_ctrl_c_stops_the_answer_of_a_chat_that_was_started_to_ignore_it(tmp_path: Path) -> None:
    script = Script(answer=lambda _: Answer(pieces=("Once",), hangs=True))
    ignoring = ("/bin/sh", "-c", 'trap \'\' INT; exec "$0" "$@"')
    with scripted_server(script), terminal(script, tmp_path, through=ignoring) as screen:
        screen.type("tell me a story")
        screen.until("Once")
        screen.process.send_signal(signal.SIGINT)
        screen.until("(stopped)")
        assert script.left.wait(WAIT_S), "the server was not told to stop"


def test_ctrl_c_ends_a_read_that_it_does_not_interrupt(capsys: pytest.CaptureFixture[str]) -> None:
    """One that begins just as it comes, for which stands here a handler that raises nothing."""
    script = Script(answer=lambda _: Answer(pieces=("Once",), hangs=True))
    before = signal.signal(signal.SIGINT, lambda number, frame: None)
    presses = threading.Thread(target=press_ctrl_c, args=(script,))
    presses.start()
    try:
        with scripted_server(script):
            client = ServerClient(script.url, timeout=WAIT_S)
            _show_answer(client, ChatSession("scripted"), "tell me a story", AnswerScreen(rendered=False))
            assert script.left.wait(WAIT_S), "the server was not told to stop"
    finally:
        presses.join()
        signal.signal(signal.SIGINT, before)
    assert "was silent" not in capsys.readouterr().err


def press_ctrl_c(script: Script) -> None:
    assert script.hangs.wait(WAIT_S)
    os.kill(os.getpid(), signal.SIGINT)


def test_a_failed_answer_is_said_and_can_be_retried(tmp_path: Path) -> None:
    answers = iter([Answer(status=503, body=b"asleep"), Answer()])
    with scripted_server(Script(answer=lambda _: next(answers))) as script, terminal(script, tmp_path) as screen:
        screen.type("hi")
        screen.until("asleep (HTTP 503)")
        screen.type("/retry")
        screen.until("Hello there")
        screen.type("/quit")
        assert screen.process.wait(WAIT_S) == 0
    assert questions(script) == ["hi", "hi"]


def test_what_was_typed_is_remembered_by_the_next_chat(tmp_path: Path) -> None:
    history = tmp_path / ".local/state/ingot/history"
    with scripted_server(Script()) as script:
        with terminal(script, tmp_path) as screen:
            screen.type("remember me")
            screen.until("Hello there")
            screen.type("/quit")
            assert screen.process.wait(WAIT_S) == 0
        assert "remember me" in history.read_text()
        assert history.stat().st_mode & 0o077 == 0
        with terminal(script, tmp_path) as screen:
            os.write(screen.master, b"\x10\x10\n")  # Ctrl-P twice: past /quit, to the question
            screen.until("Hello there")
            screen.type("/quit")
            assert screen.process.wait(WAIT_S) == 0
    assert questions(script) == ["remember me", "remember me"]


def test_control_characters_of_a_model_never_reach_the_terminal(tmp_path: Path) -> None:
    assert printable_text("a\x1b[2Jb\x07\x9b\r\n\tc") == "a[2Jb\n\tc"
    with (
        scripted_server(Script(answer=lambda _: Answer(pieces=("x\x1b]0;evil\x07y",)))) as script,
        terminal(script, tmp_path) as screen,
    ):
        screen.type("hi")
        screen.until("x]0;evily")
        screen.type("/quit")
        assert screen.process.wait(WAIT_S) == 0


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["hello"], "hello"),
        (["a\\", "b\\", "c"], "a\nb\nc"),
        (['"""', "def f():", "    pass", '"""'], "def f():\n    pass"),
        (['"""one', 'two"""'], "one\ntwo"),
        (['"""one line"""'], "one line"),
        (["  indented"], "  indented"),
    ],
)
def test_a_message_may_span_lines(lines: list[str], message: str) -> None:
    left = iter(lines)
    assert read_message(lambda _: next(left)) == message
    assert list(left) == []


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def test_a_request_holds_the_system_prompt_the_turns_and_the_parameters() -> None:
    chat = ChatSession("m", system="be brief", sampling={"temperature": 0.5})
    chat.ask("one")
    chat.add_answer("1")
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
    chat.add_answer("first")
    chat.ask("hi")  # fails
    assert chat.retry() == "hi"
    assert chat.messages == [user("hi"), assistant("first")]
    chat.ask("hi")
    chat.add_answer("second")
    assert chat.retry() == "hi"
    assert chat.messages == [user("hi"), assistant("first")]


def test_clear_keeps_the_system_prompt() -> None:
    chat = ChatSession("m", system="s")
    chat.ask("hi")
    chat.add_answer("ho")
    chat.clear()
    assert chat.messages == [{"role": "system", "content": "s"}]
    assert chat.retry() is None


def test_a_saved_conversation_never_overwrites_a_file(tmp_path: Path) -> None:
    chat = ChatSession("m")
    chat.ask("hi")
    chat.add_answer("ho\n")
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
        parse_sampling_value(name, text)


@pytest.fixture
def chat() -> ChatSession:
    return ChatSession("m")


def test_system_sets_shows_and_removes_the_system_prompt(chat: ChatSession) -> None:
    assert run_chat_command(chat, "/system").say == "no system prompt is set"
    run_chat_command(chat, "/system speak like a pirate")
    assert chat.system == "speak like a pirate"
    assert run_chat_command(chat, "/system").say == "speak like a pirate"
    run_chat_command(chat, "/system none")
    assert chat.system is None


def test_set_changes_shows_and_resets_a_parameter(chat: ChatSession) -> None:
    assert run_chat_command(chat, "/set temperature 0.2").say == "temperature is 0.2"
    assert chat.sampling == {"temperature": 0.2}
    assert "temperature 0.2" in run_chat_command(chat, "/set").say
    assert "top_p default" in run_chat_command(chat, "/set").say
    run_chat_command(chat, "/set temperature default")
    assert chat.sampling == {}


@pytest.mark.parametrize("line", ["/set temprature 1", "/set temperature hot", "/set nothing", "/save", "/retry"])
def test_a_mistake_is_said_and_changes_nothing(chat: ChatSession, line: str) -> None:
    assert run_chat_command(chat, line).say
    assert chat == ChatSession("m")


def test_an_unknown_command_is_answered_with_the_nearest(chat: ChatSession) -> None:
    assert run_chat_command(chat, "/quti").say == "unknown command /quti; did you mean /quit?"


def test_retry_asks_the_last_question_again(chat: ChatSession) -> None:
    chat.ask("hi")
    assert run_chat_command(chat, "/retry") == CommandOutcome(ask="hi")


def test_quit_leaves(chat: ChatSession) -> None:
    assert run_chat_command(chat, "/quit") == CommandOutcome(leave=True)


def test_help_lists_every_command(chat: ChatSession) -> None:
    text = run_chat_command(chat, "/help").say
    assert all(command.usage in text and command.help in text for command in CHAT_COMMANDS.values())


def test_save_says_why_it_cannot(chat: ChatSession, tmp_path: Path) -> None:
    assert run_chat_command(chat, f"/save {tmp_path / 'x.md'}").say.startswith("saved")
    assert "File exists" in run_chat_command(chat, f"/save {tmp_path / 'x.md'}").say


def test_an_answer_is_rendered_on_a_terminal_and_plain_in_a_pipe(tmp_path: Path) -> None:
    script = Script(answer=lambda _: Answer(pieces=("# Ti", "tle\n**bo", "ld**")))
    with scripted_server(script), terminal(script, tmp_path, TERM="xterm") as screen:
        screen.type("hi")
        screen.until("\x1b[0;1;4mTitle\x1b[0m\r\n\x1b[0;1mbold\x1b[0m\r\n")
        assert pipe(script, tmp_path, "hi", TERM="xterm").stdout == "# Title\n**bold**\n"


@pytest.mark.parametrize(
    ("terminal", "variables", "styled"),
    [
        (True, {"TERM": "xterm"}, True),
        (True, {"TERM": "xterm", "NO_COLOR": ""}, True),
        (True, {"TERM": "xterm", "NO_COLOR": "1"}, False),
        (True, {"TERM": "dumb"}, False),
        (False, {"TERM": "xterm"}, False),
    ],
)
def test_answers_are_plain_where_a_terminal_shows_no_styles_or_the_user_wants_none(
    terminal: bool, variables: dict[str, str], styled: bool
) -> None:
    assert shows_styles(terminal, variables) == styled


def test_a_plain_answer_is_shown_as_it_comes(capsys: pytest.CaptureFixture[str]) -> None:
    screen = AnswerScreen(rendered=False)
    for reasoning, text in (("*Hm*", ""), ("", "# Title\n"), ("", "**bo"), ("", "ld**")):
        screen.show(reasoning, text)
    screen.end()
    assert capsys.readouterr().out == "*Hm*\n# Title\n**bold**\n"


def test_an_answer_that_is_not_complete_says_why(tmp_path: Path) -> None:
    for chunk, said in (
        ({"finish_reason": "length", "stop_reason": "repetition_detected"}, "repeated itself without end"),
        ({"finish_reason": "length"}, "reached its limit of tokens"),
        ({"finish_reason": "stop"}, ""),
        ({"delta": {"content": "hi"}}, ""),
    ):
        assert said in cut_short({"choices": [chunk]}) and bool(said) == bool(cut_short({"choices": [chunk]}))
    assert cut_short({"choices": []}) == ""


def test_model_lists_and_changes_the_model_that_answers() -> None:
    chat = ChatSession("small", list_models=lambda: ["small", "large"])
    assert run_chat_command(chat, "/model").say == "* small\n  large"
    assert run_chat_command(chat, "/model lrge").say == "no model lrge is served; did you mean large?"
    assert run_chat_command(chat, "/model nothing").say == "no model nothing is served; served are: small, large"
    assert chat.model == "small"
    run_chat_command(chat, "/model large")
    assert chat.ask("hi")["model"] == "large"


def test_an_image_goes_with_the_next_question_and_stays_in_the_conversation(chat: ChatSession, tmp_path: Path) -> None:
    file = tmp_path / "a photo.png"
    file.write_bytes(b"\x89PNG")
    for name, problem in (("", "no image"), ("notes.txt", "not named like an image"), ("none.png", "No such file")):
        assert problem in run_chat_command(chat, f"/image {tmp_path / name if name else ''}").say
    assert "a photo.png goes with" in run_chat_command(chat, f"/image '{file}'").say
    asked = [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw=="}},
        {"type": "text", "text": "what is it?"},
    ]
    assert chat.ask("what is it?")["messages"][-1]["content"] == asked
    chat.add_answer("a photo")
    assert chat.ask("are you sure?")["messages"] == [
        {"role": "user", "content": asked},
        assistant("a photo"),
        user("are you sure?"),
    ]
    chat.save(tmp_path / "a.md")
    assert "(an image)\n\nwhat is it?" in (tmp_path / "a.md").read_text()


def test_an_image_is_asked_again_with_its_question(chat: ChatSession, tmp_path: Path) -> None:
    (tmp_path / "a.jpg").write_bytes(b"jpeg")
    run_chat_command(chat, f"/image {tmp_path / 'a.jpg'}")
    first = chat.ask("what is it?")
    assert run_chat_command(chat, "/retry").ask == "what is it?"
    assert chat.ask("what is it?") == first
    run_chat_command(chat, f"/image {tmp_path / 'a.jpg'}")
    assert run_chat_command(chat, "/image").say == "a.jpg"
    run_chat_command(chat, "/image none")
    assert chat.ask("and now?")["messages"][-1] == user("and now?")
