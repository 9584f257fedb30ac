"""Servers under measurement: each a process of its own on a loopback port, which may be stopped, killed and started
again on the same files."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Self

from ingot.cli.client import ServerClient, ServerError
from ingot.cli.peers.table import OURS, PROBE_S, Peer, fast_blas, modelfile, threads

START_S: Final = 300.0
POLL_S: Final = 0.1
STOP_S: Final = 15.0
DYING_S: Final = 1.0
"""Between the end of a process's connections and its own."""
SAMPLE_S: Final = 0.25
"""Between two looks at a server's memory."""
LAST_LINES: Final = 20
UNCOMPILED: Final = "PYTHONDONTWRITEBYTECODE"
"""With it a server that runs from its sources, as ingot does in a clone, is compiled at every start, and others, which
pip compiled, are not."""
KEPT_VARIABLES: Final = ("INGOT_THREADS", "INGOT_ISA", "INGOT_KERNELS")
"""Of ours, those about the machine; others would set one of the servers up differently."""


@dataclass(frozen=True, slots=True)
class Placement:
    """On what a server is started: the model in its form, how much at once, and folders of its own."""

    weights: Path  # a folder or a GGUF file
    name: str
    streams: int
    context: int
    scratch: Path
    flags: tuple[str, ...] = ()

    def filled(self, program: Path, port: int) -> dict[str, str]:
        """What stands for the words in braces of a command."""
        return {
            "program": str(program),
            "model": str(self.weights),
            "models": str(self.weights.parent),
            "name": self.name,
            "port": str(port),
            "streams": str(self.streams),
            "context": str(self.context),
            "contexts": str(self.context * min(self.streams, 8)),
            "threads": threads(),
            "cache": str(self.scratch / "cache"),
        }


class Server:
    """A peer on this machine, as often as it is started. Use it in a `with` block, which stops it at its end."""

    def __init__(self, peer: Peer, program: Path, placement: Placement) -> None:
        self.peer, self.program, self.placement = peer, program, placement
        self.name = peer.name
        port = free_port()
        self._words = placement.filled(program, port)
        self.model = fill(peer.model, self._words)
        self.client = ServerClient(f"http://127.0.0.1:{port}")
        self.log = placement.scratch / "log"
        self.command = [*(fill(word, self._words) for word in peer.command), *placement.flags]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def environment(self) -> dict[str, str]:
        """What it has besides what every server has."""
        own = {name: fill(text, self._words) for name, text in self.peer.environment.items()}
        return own | fast_blas(self.peer)

    @property
    def shown(self) -> str:
        """The command for people, without folders and ports that are others tomorrow."""
        here = {"program": self.program.name, "model": self.placement.weights.name}
        words = self._words | here | {"models": "FOLDER", "port": "PORT", "cache": "CACHE"}
        command = [fill(word, words) for word in self.peer.command]
        if self.peer.name == OURS:  # `python -m ingot`
            command[:3] = [OURS]
        before = [f"{name}={fill(text, words)}" for name, text in self.peer.environment.items()]
        before += ["(with ingot's BLAS)"] if fast_blas(self.peer) else []
        return " ".join([*before, *command, *self.placement.flags])

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> float:
        """Returns the seconds until it answers. Raises ServerError with the end of its log if it does not."""
        self.placement.scratch.mkdir(parents=True, exist_ok=True)
        began = time.perf_counter()
        self._process = start_process(self.command, self.log, self.environment, group=True)
        try:
            wait_until_ready(self.name, self._process, self.log, lambda: answers(self.client, self.peer.ready))
            self._run_beside(self.peer.before)
        except BaseException:  # also of a user who does not want to wait: no `with` block stops it yet
            self.stop()
            raise
        return time.perf_counter() - began

    def _run_beside(self, commands: Sequence[Sequence[str]]) -> None:
        for command in commands:
            words = dict(self._words)
            if "{modelfile}" in command:
                words["modelfile"] = str(modelfile(self.placement.weights))
            filled = [fill(word, words) for word in command]
            done = subprocess.run(
                filled,
                capture_output=True,
                text=True,
                timeout=START_S,
                env=environment() | self.environment,
                check=False,
            )
            if done.returncode:
                raise ServerError(f"{' '.join(filled)} failed: {(done.stderr or done.stdout).strip()[-400:]}")

    @property
    def dead(self) -> str | None:
        """How it ended, if it did not by our doing."""
        code = None if self._process is None else self._process.poll()
        if code is None:
            return None
        return f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"

    @property
    def running(self) -> bool:
        return self._process is not None

    def dead_soon(self) -> str | None:
        """The same, a moment after a connection broke: a process that dies closes its sockets first."""
        with suppress(subprocess.TimeoutExpired):
            if self._process is not None:
                self._process.wait(DYING_S)
        return self.dead

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def stop(self) -> None:
        """As a user stops it."""
        if self._process is None:
            return
        if self.peer.after:
            with suppress(OSError, subprocess.TimeoutExpired):
                command = [fill(word, self._words) for word in self.peer.after]
                subprocess.run(command, capture_output=True, timeout=PROBE_S, check=False)
        end_process(self._process, group=True)
        self._process = None

    def kill(self) -> None:
        """As a lack of memory does it: without a last word."""
        assert self._process is not None
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._process = None

    def forget(self) -> None:
        """Remove what it has on disk, so that the next start knows nothing."""
        shutil.rmtree(self.placement.scratch / "cache", ignore_errors=True)

    def ask(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """A request's body, with what this server calls the model."""
        return {"model": self.model, "temperature": 0, **body}


def fill(text: str, words: Mapping[str, str]) -> str:
    return re.sub(r"\{(\w+)\}", lambda found: words.get(found[1], found[0]), text)


def ready_url(said: str) -> str | None:
    """The address in ingot's ready line, once it is there."""
    found = re.search(r"^ready: (\S+)", said, re.MULTILINE)
    return found[1] if found else None


def environment() -> dict[str, str]:
    """This process's, without what would set ingot up differently, or have it compiled anew at each start."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("INGOT_", UNCOMPILED))}
    machine = {name: value for name, value in os.environ.items() if name in KEPT_VARIABLES}
    return kept | machine | {"INGOT_CONFIG": os.devnull}


def start_process(
    command: Sequence[str],
    log: Path,
    more: Mapping[str, str] = MappingProxyType({}),
    *,
    folder: Path | None = None,
    group: bool = False,
) -> subprocess.Popen[bytes]:
    """`group`: its children end with it, also when it is killed."""
    with log.open("ab") as output:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env=environment() | dict(more),
            start_new_session=group,
        )


def end_process(process: subprocess.Popen[bytes], *, group: bool = False) -> None:
    process.terminate()
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if group:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)


def wait_until_ready(name: str, process: subprocess.Popen[bytes], log: Path, ready: Callable[[], str | None]) -> str:
    """What `ready` returns, once it returns anything. Raises ServerError if the process ends, or takes too long."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        if found := ready():
            return found
        time.sleep(POLL_S)
    last = "\n".join(log.read_text(errors="replace").splitlines()[-LAST_LINES:])
    raise ServerError(f"{name} did not start; the end of what it said:\n{last}")


def answers(client: ServerClient, path: str) -> str | None:
    try:
        client.get(path)
    except ServerError as error:
        # Some answer a probe with a word and not with JSON, which is an answer.
        return client.url if error.answered is None and "with JSON" in error.message else None
    return client.url


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
        return port


def tree_bytes(pid: int, listing: str | None = None) -> int:
    """Resident memory of a process and of all that came of it, by `ps`."""
    if listing is None:
        command = ["ps", "-A", "-o", "pid=,ppid=,rss="]
        listing = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    rows = [tuple(map(int, line.split())) for line in listing.splitlines() if len(line.split()) == 3]
    known, before = {pid}, 0
    while len(known) > before:
        before = len(known)
        known |= {child for child, parent, _ in rows if parent in known}
    return sum(1024 * kilobytes for process, _, kilobytes in rows if process in known)


class MemoryWatch:
    """The most memory that a server and its children have, while a `with` block runs."""

    def __init__(self, pid: int) -> None:
        self._pid, self.peak = pid, tree_bytes(pid)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def _watch(self) -> None:
        while not self._over.wait(SAMPLE_S):
            self.peak = max(self.peak, tree_bytes(self._pid))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
