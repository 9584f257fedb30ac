"""A rank's process: started here or over ssh, told who it is over its standard input, and killed with all it started.

What a rank is told never stands on a command line. Its standard input stays open for as long as the parent lives: its
end is how a rank notices, wherever it runs, that nobody would stop it any more.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from ingot.distributed.hosts import Host

COMMAND: Final = ("-P", "-m", "ingot.cli.rank")
SSH: Final = (
    *("ssh", "-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10"),
    *("-o", "ServerAliveInterval=3", "-o", "ServerAliveCountMax=3"),
)
PASSED_ON: Final = ("INGOT_", "MLX_", "HF_")  # what variables' names begin with that other machines are told, too
KILL_S: Final = 5.0


class Letter(msgspec.Struct, frozen=True):
    """What a rank is told: the words behind `ingot serve`, variables, and files whose paths are put in variables."""

    arguments: Sequence[str]
    variables: Mapping[str, str]
    files: Mapping[str, str]


class RankProcess:
    """Owns the process. To be made by a thread that lives as long as the parent does."""

    def __init__(self, host: Host, letter: Letter, inherited: Sequence[int], command: Sequence[str]) -> None:
        """`inherited` are open files that a rank on this machine is given, under their numbers."""
        self.host = host
        self.is_here = host.is_here
        if not self.is_here:
            passed = {name: value for name, value in os.environ.items() if name.startswith(PASSED_ON)}
            letter = msgspec.structs.replace(letter, variables=passed | dict(letter.variables))
        self._process = subprocess.Popen(
            [sys.executable, *command] if self.is_here else over_ssh(host, command),
            stdin=subprocess.PIPE,
            pass_fds=tuple(inherited),
            start_new_session=True,
        )
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it ended at once, which is noticed elsewhere
            self._process.stdin.write(msgspec.json.encode(letter) + b"\n")
            self._process.stdin.flush()

    def wait(self, within: float | None = None) -> int:
        """Its exit code, negative for a signal. Raises TimeoutError."""
        try:
            return self._process.wait(within)
        except subprocess.TimeoutExpired:
            raise TimeoutError from None

    def send(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    def kill(self, remote_pid: int = 0) -> None:
        """At once, with whatever it started; on another machine, too, where its number there is known."""
        with contextlib.suppress(ProcessLookupError, PermissionError):  # it is gone, or about to be
            os.killpg(self._process.pid, signal.SIGKILL)
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        if not self.is_here and remote_pid:
            _kill_there(self.host, remote_pid)


def over_ssh(host: Host, command: Sequence[str]) -> list[str]:
    """In the folder that the parent is in, where it is there: models may be named by paths from it."""
    python = host.python or sys.executable
    folder = shlex.quote(str(Path.cwd()))
    return [*SSH, host.ssh, f"cd {folder} 2>/dev/null; exec {shlex.join((python, *command))}"]


def _kill_there(host: Host, pid: int) -> None:
    with contextlib.suppress(subprocess.TimeoutExpired):
        subprocess.run(
            [*SSH, host.ssh, f"kill -9 {pid}"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=KILL_S,
            check=False,
        )
