"""Progress: one line that moves on a terminal, a few lines elsewhere."""

import io
import logging
import threading
from contextvars import copy_context

import pytest

from ingot.models.files.progress import REPORT_S, TerminalProgress, format_bytes
from ingot.observe.logs import LineAwareHandler, report_step, reporting_steps


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_terminal_gets_one_line_that_is_rewritten() -> None:
    stream, clock = Terminal(), Clock()
    progress = TerminalProgress(stream, clock)
    for done in (0, 500, 1000):
        progress("fetching", done, 1000)
        clock.now += 1
    assert stream.getvalue().count("\n") == 1
    assert stream.getvalue().endswith("fetching: 1.0 kB of 1.0 kB (100 %)\n")


def test_a_terminal_is_not_redrawn_for_every_byte() -> None:
    stream = Terminal()
    progress = TerminalProgress(stream, Clock())
    for done in range(100):
        progress("fetching", done, 1000)
    assert stream.getvalue().count("\r") == 1


def test_a_new_message_starts_a_new_line() -> None:
    stream = Terminal()
    progress = TerminalProgress(stream, Clock())
    progress("fetching", 1, 2)
    progress("converting", 1, 2)
    progress.finish()
    assert [line.rpartition("K")[2] for line in stream.getvalue().strip().split("\n")] == [
        "fetching: 1 B of 2 B (50 %)",
        "converting: 1 B of 2 B (50 %)",
    ]


def test_a_log_gets_a_line_at_the_start_now_and_then_and_at_the_end() -> None:
    stream, clock = io.StringIO(), Clock()
    progress = TerminalProgress(stream, clock)
    for done in range(11):
        progress("fetching", done, 10)
        clock.now += REPORT_S / 4
    lines = stream.getvalue().splitlines()
    assert lines[0].startswith("fetching: 0 B") and lines[-1].endswith("(100 %)")
    assert 3 <= len(lines) <= 5


def test_work_of_unknown_length_is_shown_without_a_share() -> None:
    stream = io.StringIO()
    progress = TerminalProgress(stream)
    progress("looking")
    progress("fetching", 1_500_000)
    assert stream.getvalue() == "looking\nfetching: 1.5 MB\n"


def test_a_step_of_unknown_length_shows_its_seconds_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks: list[threading.Timer] = []
    monkeypatch.setattr(threading.Timer, "start", lambda timer: ticks.append(timer))
    stream, clock = Terminal(), Clock()
    progress = TerminalProgress(stream, clock)
    progress("probing")
    clock.now = 2.0
    ticks[-1].function()
    assert stream.getvalue().endswith("probing (2 s)") and len(ticks) == 2
    progress("ready")
    ticks[1].function()  # too late: another step has begun
    assert stream.getvalue().endswith("ready") and "\n" not in stream.getvalue()  # one line, whatever the step
    progress.finish()
    assert ticks[-1].finished.is_set()


def test_a_note_replaces_the_last_line_on_a_terminal_and_is_written_once_elsewhere() -> None:
    terminal, log = Terminal(), io.StringIO()
    for stream in (terminal, log):
        progress = TerminalProgress(stream)
        progress.note("stopping: 2 requests running")
        progress.note("stopping: 1 request running")
        progress.finish()
    assert "\n" not in terminal.getvalue() and terminal.getvalue().endswith("1 request running\r\x1b[2K")
    assert log.getvalue() == "stopping: 2 requests running\n"


def test_a_log_line_takes_the_place_of_a_line_that_is_being_rewritten() -> None:
    stream = Terminal()
    handler = LineAwareHandler(stream)
    progress = TerminalProgress(stream)
    progress("fetching", 1, 4)
    handler.emit(logging.makeLogRecord({"msg": "something happened"}))
    progress("fetching", 4, 4)
    assert stream.getvalue().split("\r\x1b[2K") == [
        "", "fetching: 1 B of 4 B (25 %)", "something happened\n", "fetching: 4 B of 4 B (100 %)\n",
    ]  # fmt: skip
    handler.emit(logging.makeLogRecord({"msg": "later"}))
    assert stream.getvalue().endswith("(100 %)\nlater\n")


def test_steps_are_told_to_whoever_shows_them_also_from_another_thread() -> None:
    told: list[str] = []
    report_step("to nobody")
    with reporting_steps(told.append):
        context = copy_context()
    thread = threading.Thread(target=context.run, args=(report_step, "compiling"))
    thread.start()
    thread.join()
    assert told == ["compiling"]


def test_sizes_are_short() -> None:
    assert [format_bytes(size) for size in (0, 999, 1000, 92_900_000, 150_000_000, 4_200_000_000)] == [
        "0 B", "999 B", "1.0 kB", "92.9 MB", "150 MB", "4.2 GB",
    ]  # fmt: skip
