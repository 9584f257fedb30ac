"""Processes that measure. Their output is read line by line, so that one that fails or takes too long loses only its
remaining figures."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import IO, NamedTuple

_LAST_LINES = 12


class Outcome(NamedTuple):
    wrong: str | None  # why it did not come to its end
    last_said: tuple[str, ...]  # the end of its stderr


def hear(
    command: Sequence[str], environment: Mapping[str, str], limit_s: float, told: Callable[[str], object]
) -> Outcome:
    """Run it, for so long at most. `told` is given each line of its output as it comes, in another thread; what it says
    to stderr is passed on at once."""
    process = subprocess.Popen(
        command, env={**os.environ, **environment}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    last: deque[str] = deque(maxlen=_LAST_LINES)

    def complain(line: str) -> None:
        last.append(line)
        print(line, file=sys.stderr, flush=True)

    ears = [
        threading.Thread(target=_listen, args=heard) for heard in ((process.stdout, told), (process.stderr, complain))
    ]
    for ear in ears:
        ear.start()
    wrong = _waited(process, limit_s)
    for ear in ears:
        ear.join()
    return Outcome(wrong, tuple(last))


def _listen(source: IO[str], told: Callable[[str], object]) -> None:
    with source:
        for line in source:
            told(line.rstrip("\n"))


def _waited(process: subprocess.Popen[str], limit_s: float) -> str | None:
    try:
        code = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return f"took more than {limit_s:.0f} s"
    if code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return f"ended with {code}" if code else None
