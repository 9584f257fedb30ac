from __future__ import annotations

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

from ingot.cli.chat import _show_answer, printable, read_message
from ingot.cli.client import Client
from ingot.cli.conversation import ChatSession
from tests.cli.scripted import INGOT, Answer, Script, environment, scripted_server


def pipe(script: Script, home: Path, question: str, *flags: str, **extra: str) -> subprocess.CompletedProcess[str]:
    command = [INGOT, "chat", script.url, *flags]
    env = environment(home, **extra)
    return subprocess.run(command, input=question, capture_output=True, text=True, timeout=60, env=env)


class Terminal:
    """A chat in a pseudo-terminal: what it showed so far, and a keyboard."""

    def __init__(self, script: Script, home: Path, *flags: str, through: tuple[str, ...] = ()) -> None:
        self.master, slave = pty.openpty()
        command = [*through, INGOT, "chat", script.url, *flags]
        env = environment(home)
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
def terminal(script: Script, home: Path, *flags: str, through: tuple[str, ...] = ()) -> Iterator[Terminal]:
    """`through` is a program that starts the chat."""
    screen = Terminal(script, home, *flags, through=through)
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
        assert screen.process.wait(30) == 0
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
        assert script.left.wait(30), "the server was not told to stop"
        screen.until("> ")
        screen.type("go on")
        screen.until("Once")
        screen.until("> ")
        screen.process.send_signal(signal.SIGINT)
        screen.type("")  # readline may notice a signal that comes with its prompt only at the next key
        screen.until("/quit leaves")
        screen.type("/quit")
        assert screen.process.wait(30) == 0
    assert [message["content"] for message in script.bodies[1]["messages"]] == ["tell me a story", "Once", "go on"]


def test_ctrl_c_stops_the_answer_of_a_chat_that_was_started_to_ignore_it(tmp_path: Path) -> None:
    script = Script(answer=lambda _: Answer(pieces=("Once",), hangs=True))
    ignoring = ("/bin/sh", "-c", 'trap \'\' INT; exec "$0" "$@"')
    with scripted_server(script), terminal(script, tmp_path, through=ignoring) as screen:
        screen.type("tell me a story")
        screen.until("Once")
        screen.process.send_signal(signal.SIGINT)
        screen.until("(stopped)")
        assert script.left.wait(30), "the server was not told to stop"


def test_ctrl_c_ends_a_read_that_it_does_not_interrupt(capsys: pytest.CaptureFixture[str]) -> None:
    """One that begins just as it comes, for which stands here a handler that raises nothing."""
    script = Script(answer=lambda _: Answer(pieces=("Once",), hangs=True))
    before = signal.signal(signal.SIGINT, lambda number, frame: None)
    presses = threading.Thread(target=press_ctrl_c, args=(script,))
    presses.start()
    try:
        with scripted_server(script):
            _show_answer(Client(script.url, timeout=10), ChatSession("scripted"), "tell me a story")
            assert script.left.wait(30), "the server was not told to stop"
    finally:
        presses.join()
        signal.signal(signal.SIGINT, before)
    assert "was silent" not in capsys.readouterr().err


def press_ctrl_c(script: Script) -> None:
    assert script.hangs.wait(30)
    os.kill(os.getpid(), signal.SIGINT)


def test_a_failed_answer_is_said_and_can_be_retried(tmp_path: Path) -> None:
    answers = iter([Answer(status=503, body=b"asleep"), Answer()])
    with scripted_server(Script(answer=lambda _: next(answers))) as script, terminal(script, tmp_path) as screen:
        screen.type("hi")
        screen.until("asleep (HTTP 503)")
        screen.type("/retry")
        screen.until("Hello there")
        screen.type("/quit")
        assert screen.process.wait(30) == 0
    assert questions(script) == ["hi", "hi"]


def test_what_was_typed_is_remembered_by_the_next_chat(tmp_path: Path) -> None:
    history = tmp_path / ".local/state/ingot/history"
    with scripted_server(Script()) as script:
        with terminal(script, tmp_path) as screen:
            screen.type("remember me")
            screen.until("Hello there")
            screen.type("/quit")
            assert screen.process.wait(30) == 0
        assert "remember me" in history.read_text()
        assert history.stat().st_mode & 0o077 == 0
        with terminal(script, tmp_path) as screen:
            os.write(screen.master, b"\x10\x10\n")  # Ctrl-P twice: past /quit, to the question
            screen.until("Hello there")
            screen.type("/quit")
            assert screen.process.wait(30) == 0
    assert questions(script) == ["remember me", "remember me"]


def test_control_characters_of_a_model_never_reach_the_terminal(tmp_path: Path) -> None:
    assert printable("a\x1b[2Jb\x07\x9b\r\n\tc") == "a[2Jb\n\tc"
    with (
        scripted_server(Script(answer=lambda _: Answer(pieces=("x\x1b]0;evil\x07y",)))) as script,
        terminal(script, tmp_path) as screen,
    ):
        screen.type("hi")
        screen.until("x]0;evily")
        screen.type("/quit")
        assert screen.process.wait(30) == 0


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
