"""Another program in this one's terminal: signals reach it, and its exit code becomes ours."""

from __future__ import annotations

import contextlib
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

from ingot.errors import IngotError

# The terminal sends these to the program as well, which may do with them what it likes; this one stays.
BY_TERMINAL = (signal.SIGINT, signal.SIGQUIT)
PASSED_ON = (signal.SIGTERM, signal.SIGHUP)


def run_in_foreground(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """The program's exit code, or 128 and the number of the signal that ended it. Raises IngotError."""
    started: list[subprocess.Popen[bytes]] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        for program in started:
            program.send_signal(number)

    def stay(number: int, frame: FrameType | None) -> None:
        pass

    with _handling({**dict.fromkeys(BY_TERMINAL, stay), **dict.fromkeys(PASSED_ON, pass_on)}):
        try:
            started.append(subprocess.Popen(command, env=environment))
        except OSError as error:
            raise IngotError(f"cannot start {command[0]}: {error.strerror}") from error
        code = started[0].wait()
    return code if code >= 0 else 128 - code


@contextlib.contextmanager
def _handling(handlers: Mapping[signal.Signals, Callable[[int, FrameType | None], Any]]) -> Iterator[None]:
    """Handlers, unlike signals that are ignored, are not inherited: the program starts with its own."""
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
