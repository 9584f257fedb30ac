"""Another program in this one's terminal: signals reach it, and its exit code becomes ours."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

from ingot.errors import IngotError
from ingot.process import heeded

# The terminal sends these to the program as well, which may do with them what it likes; this one stays.
BY_TERMINAL = (signal.SIGINT, signal.SIGQUIT)
PASSED_ON = (signal.SIGTERM, signal.SIGHUP)


def run_in_foreground(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """The program's exit code, or 128 and the number of the signal that ended it. Raises IngotError."""
    started: list[subprocess.Popen[bytes]] = []
    early: list[int] = []  # signals that came while it was being started

    def pass_on(number: int, frame: FrameType | None) -> None:
        if started:
            started[0].send_signal(number)
        else:
            early.append(number)

    def stay(number: int, frame: FrameType | None) -> None:
        pass

    stays, passed = (*heeded(*BY_TERMINAL), signal.SIGCHLD), heeded(*PASSED_ON)
    handlers = {**dict.fromkeys(stays, stay), **dict.fromkeys(passed, pass_on)}
    with _handling(handlers), _bell() as bell:
        try:
            program = subprocess.Popen(command, env=environment)
        except OSError as error:
            raise IngotError(f"cannot start {command[0]}: {error.strerror}") from error
        started.append(program)
        for number in early:
            program.send_signal(number)
        while (code := program.poll()) is None:
            bell.recv(1024)
    return code if code >= 0 else 128 - code


@contextlib.contextmanager
def _bell() -> Iterator[socket.socket]:
    """Something to read whenever a signal has come: one that another thread takes, or that comes just before this one
    goes to sleep, does not wake it."""
    ours, rings = socket.socketpair()
    with ours, rings:
        rings.setblocking(False)
        before = signal.set_wakeup_fd(rings.fileno(), warn_on_full_buffer=False)
        try:
            yield ours
        finally:
            signal.set_wakeup_fd(before)


@contextlib.contextmanager
def _handling(handlers: Mapping[signal.Signals, Callable[[int, FrameType | None], Any]]) -> Iterator[None]:
    """Handlers, unlike signals that are ignored, are not inherited: the program starts with its own, and ignores what
    this one was started to ignore."""
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
