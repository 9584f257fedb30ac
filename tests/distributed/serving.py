"""A running group, of stand-ins or of the real engine: clients for it, and a look at its processes."""

from __future__ import annotations

import http.client
import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from tests.processes import ROOT, start

PATIENCE_S = 60.0
"""For what has to come, however busy the machine is."""
LOADED_S = 4 * PATIENCE_S
"""For ranks that have a model."""
BODY = {
    "model": "default",
    "messages": [{"role": "user", "content": "Count."}],
    "ignore_eos": True,
    "stream": True,
}
PORT = re.compile(r"^(?:ready: http://[^:]+:)?(\d+)")


@dataclass
class Group:
    parent: subprocess.Popen[str]
    port: int

    def get(self, path: str) -> tuple[int, str]:
        """The status and the body; 0 where the connection breaks."""
        return self._ask("GET", path, None)

    def ask(self, tokens: int = 40) -> tuple[int, str]:
        """For an answer of so many tokens; stand-ins give one of forty."""
        return self._ask("POST", "/v1/chat/completions", json.dumps({**BODY, "max_tokens": tokens}))

    def _ask(self, method: str, path: str, body: str | None) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        deadline = time.monotonic() + PATIENCE_S
        said = ""
        try:
            connection.request(method, path, body, {"content-type": "application/json"})
            answer = connection.getresponse()
            while piece := answer.read1(65536):
                said += piece.decode()
                assert time.monotonic() < deadline, "signs of life, and no end of the answer"
            return answer.status, said
        except (OSError, http.client.HTTPException):
            return 0, said
        finally:
            connection.close()

    def await_ready(self) -> None:
        wait_until(lambda: self.get("/health")[0] == 200, LOADED_S)

    @property
    def ranks(self) -> list[int]:
        """The processes that the parent started."""
        return children(self.parent.pid)

    def health(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.get("/health")[1])
        return found

    def ranks_told(self) -> list[dict[str, Any]]:
        """How each stands, as health says."""
        found: list[dict[str, Any]] = self.health()["ranks"]
        return found


def children(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # a thread may end while it is looked at
            found += map(int, (task / "children").read_text().split())
    return sorted(found)


def is_gone(pid: int) -> bool:
    """A zombie is: whoever is to reap it is not always quick."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):  # the latter where it goes while it is read
        return True


def wait_until(reached: Callable[[], bool], within: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + within
    while not reached():
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.02)


@contextmanager
def started(command: Sequence[str], environment: dict[str, str] | None = None) -> Iterator[Group]:
    ours = {name: value for name, value in os.environ.items() if not name.startswith("INGOT_TEST_")}
    env = {**ours, "PYTHONPATH": str(ROOT), "INGOT_CONFIG": os.devnull, **(environment or {})}
    parent = start(
        [sys.executable, *command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        env=env,
        cwd=ROOT,
    )
    said: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(parent.stdout, said), daemon=True).start()
    try:
        group = Group(parent, _port(said))
        group.await_ready()
        yield group
    finally:
        parent.kill()
        parent.wait(PATIENCE_S)


def _port(said: queue.SimpleQueue[str]) -> int:
    """That a stand-in prints first, and the real server in its ready line."""
    while line := said.get(timeout=LOADED_S):
        if found := PORT.match(line):
            return int(found[1])
    raise AssertionError("the group ended before it said its port")


def _read(stream: IO[str], said: queue.SimpleQueue[str]) -> None:
    """To its end, so that whoever writes does not have to wait; an empty line is put behind the last."""
    for line in stream:
        said.put(line)
    said.put("")


def standins(size: int | str, stall_s: float = PATIENCE_S) -> list[str]:
    return ["-m", "tests.distributed.standin", "parent", str(size), "0", str(stall_s)]


def engines(folder: Path, size: int | str, stall_s: float = PATIENCE_S) -> list[str]:
    """`ingot serve` itself, with the model that lies there."""
    wanted = {"--hosts": size, "--rank-stall-s": stall_s, "--port": 0, "--memory": "500MB"}
    return ["-m", "ingot", "serve", str(folder), *(str(word) for pair in wanted.items() for word in pair)]


def is_whole(answer: tuple[int, str]) -> bool:
    status, said = answer
    return status == 200 and said.endswith("data: [DONE]\n\n") and '"error"' not in said


def stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
