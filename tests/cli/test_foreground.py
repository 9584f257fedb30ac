from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from typing import Any

import pytest

from ingot.cli import foreground

ENDED_BY_SIGTERM = 128 + signal.SIGTERM


def test_a_signal_that_comes_while_the_program_is_started_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def told_to_end(*arguments: Any, **how: Any) -> subprocess.Popen[bytes]:
        program = start(*arguments, **how)
        os.kill(os.getpid(), signal.SIGTERM)
        return program

    start = subprocess.Popen
    monkeypatch.setattr(foreground.subprocess, "Popen", told_to_end)
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    assert foreground.run_in_foreground(command, os.environ) == ENDED_BY_SIGTERM


def test_a_signal_that_another_thread_takes_is_passed_on_at_once() -> None:
    """As the system does with a second one that comes before this thread has dealt with the first."""
    tells = "import os, signal, time; os.kill(os.getppid(), signal.SIGTERM)"
    waits = "signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM]); time.sleep(30)"
    over = threading.Event()
    other = threading.Thread(target=over.wait)
    other.start()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    try:
        command = [sys.executable, "-c", f"{tells}; {waits}"]
        assert foreground.run_in_foreground(command, os.environ) == ENDED_BY_SIGTERM
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        over.set()
        other.join()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_what_this_program_was_started_to_ignore_the_other_ignores_too(number: signal.Signals) -> None:
    """As under `nohup`: else it would be ended by what its user had said shall not end it."""
    check = f"import signal, sys; sys.exit(9 * (signal.getsignal({number.value}) == signal.SIG_IGN))"
    before = signal.signal(number, signal.SIG_IGN)
    try:
        assert foreground.run_in_foreground([sys.executable, "-c", check], os.environ) == 9
        assert signal.getsignal(number) == signal.SIG_IGN
    finally:
        signal.signal(number, before)
