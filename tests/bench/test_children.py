"""What a measuring process said counts, however it ended."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from bench.children import Outcome, hear


def heard(program: str) -> tuple[list[str], Outcome]:
    lines: list[str] = []
    return lines, hear([sys.executable, "-c", program], {"SAID": "this"}, 30, lines.append)


def test_one_that_comes_to_its_end_says_all() -> None:
    lines, outcome = heard("import os; print(os.environ['SAID']); print('that')")
    assert lines == ["this", "that"] and outcome == Outcome(None, ())


def test_one_that_takes_too_long_loses_only_what_it_did_not_come_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its time is up as soon as it has said something."""
    lines: list[str] = []
    spoken, wait = threading.Event(), subprocess.Popen.wait

    def told(line: str) -> None:
        lines.append(line)
        spoken.set()

    def hurried(process: subprocess.Popen[str], timeout: float | None = None) -> int:
        if timeout is None:
            return wait(process)
        assert spoken.wait(timeout)
        raise subprocess.TimeoutExpired(process.args, timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", hurried)
    program = "print('this', flush=True)\nwhile True: pass"
    outcome = hear([sys.executable, "-c", program], {}, 30, told)
    assert lines == ["this"] and outcome.wrong == "took more than 30 s"


def test_one_that_fails_says_why(capfd: pytest.CaptureFixture[str]) -> None:
    lines, outcome = heard("print('this', flush=True); raise SystemExit('no such device')")
    assert lines == ["this"] and outcome == Outcome("ended with 1", ("no such device",))
    assert "no such device" in capfd.readouterr().err


def test_one_that_a_signal_ended_says_which() -> None:
    lines, outcome = heard("import os; print('this', flush=True); os.abort()")
    assert lines == ["this"] and outcome.wrong == "was ended by SIGABRT"
