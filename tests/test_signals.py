"""Signals that were ignored when the process was started, and that no test inherits them."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ingot.process import heeded, is_ignored
from tests import conftest

HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


@pytest.fixture
def ignoring() -> Iterator[None]:
    """All of them are, for as long as the test takes."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in HANDLED}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_no_test_runs_with_signals_ignored() -> None:
    assert heeded(*HANDLED) == HANDLED


@pytest.mark.usefixtures("ignoring")
def test_who_is_started_to_ignore_signals_heeds_none_of_them() -> None:
    assert heeded(*HANDLED) == () and all(map(is_ignored, HANDLED))
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    assert heeded(*HANDLED) == (signal.SIGTERM,)


@pytest.mark.usefixtures("ignoring")
@pytest.mark.parametrize("number", HANDLED)
def test_what_tests_start_does_not_ignore_what_they_were_started_to_ignore(
    number: signal.Signals, tmp_path: Path
) -> None:
    told = [sys.executable, "-c", f"import os, signal; os.kill(os.getpid(), {number.value}); print('alive')"]
    assert b"alive" in subprocess.run(told, capture_output=True, check=False, cwd=tmp_path).stdout
    conftest.ignore_signals_alone()
    assert b"alive" not in subprocess.run(told, capture_output=True, check=False, cwd=tmp_path).stdout
    signal.raise_signal(number)  # which the tests themselves still ignore
