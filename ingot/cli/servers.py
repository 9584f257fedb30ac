"""`ingot ps` and `ingot stop`: the servers of this user on this machine.

A server has a file in the state folder, `servers/PID.json`, from when its port is taken until it ends: where it
listens, and what it does. It holds no keys. A file whose process is gone, or whose number another process has by now,
is stale and removed by whoever reads it. Light to import: every server writes one.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ingot.cli.flags import CommandParser
from ingot.errors import ConfigError, IngotError
from ingot.version import __version__

if TYPE_CHECKING:
    import asyncio

ABOUT_PS: Final = "List the servers that run on this machine: address, models, memory, time, requests."
ABOUT_STOP: Final = "Stop a server: it lets running requests finish, as after Ctrl-C."
REFRESH_S: Final = 2.0
"""How often a server looks whether what its file says has changed."""
SLACK_S: Final = 15.0
"""Beyond what requests may take: to save what is cached, and to let go of the models."""
POLL_S: Final = 0.1
HURRY_S: Final = (0.5, 5.0)
"""When --now interrupts a server that does not wait, and when it kills one that is not gone by then."""


@dataclass(frozen=True, slots=True)
class ServerRecord:
    """What a server's file says. `models` are pairs of a name and a state; a count is None where nobody knows."""

    pid: int
    process_start: str  # tells the process from a later one of the same number
    url: str
    started_at: float  # seconds since the epoch
    stops_within_s: float
    state: str = "loading"
    models: list[tuple[str, str]] = field(default_factory=list)
    running: int | None = None
    answered: int | None = None
    version: str = __version__

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])


def servers_folder() -> Path:
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(state).expanduser() / "ingot" / "servers"


class RunningServer:
    """The file of this process. A folder that cannot be written to is no reason not to serve."""

    def __init__(self, url: str, models: Sequence[str], stops_within_s: float) -> None:
        own = os.getpid()
        self._path = servers_folder() / f"{own}.json"
        names = [(name, "loading") for name in models]
        self._record = ServerRecord(own, process_start(own) or "", url, time.time(), stops_within_s, models=names)
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._write(self._record)

    def update(self, **changes: Any) -> None:
        changed = replace(self._record, **changes)
        if changed != self._record:
            self._record = changed
            self._write(changed)

    def keep_updated(self, loop: asyncio.AbstractEventLoop, look: Callable[[], dict[str, Any]]) -> None:
        """Have `look` say what has changed, now and then, on the event loop."""

        def again() -> None:
            self.update(**look())
            loop.call_later(REFRESH_S, again)

        again()

    def remove(self) -> None:
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)

    def _write(self, record: ServerRecord) -> None:
        part = self._path.with_suffix(".part")
        with contextlib.suppress(OSError):
            descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(descriptor, "w") as file:
                json.dump(asdict(record), file)
            part.replace(self._path)


@contextlib.contextmanager
def registered_server(url: str, models: Sequence[str], stops_within_s: float) -> Iterator[RunningServer]:
    """This process has a file for as long as the block lasts."""
    server = RunningServer(url, models, stops_within_s)
    try:
        yield server
    finally:
        server.remove()


def process_start(pid: int) -> str | None:
    """When a process began, in the system's words; None where there is none of that number."""
    stat = Path(f"/proc/{pid}/stat")
    try:
        if Path("/proc/self/stat").exists():
            fields = stat.read_text().rpartition(")")[2].split()  # a name may hold spaces and parentheses
            return None if fields[0] == "Z" else fields[19]
        done = subprocess.run(["ps", "-o", "lstart=", "-p", str(pid)], capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout.strip() or None


def resident_bytes(pid: int) -> int | None:
    try:
        if (statm := Path(f"/proc/{pid}/statm")).exists():
            return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        done = subprocess.run(["ps", "-o", "rss=", "-p", str(pid)], capture_output=True, text=True, check=False)
        return int(done.stdout) * 1024
    except (OSError, ValueError):
        return None


def list_servers() -> list[ServerRecord]:
    """Those that run, oldest first. Removes the files of others."""
    found = []
    for path in servers_folder().glob("*.json"):
        record = _read_record(path)
        if record is None or process_start(record.pid) != record.process_start:
            with contextlib.suppress(OSError):
                path.unlink()
        else:
            found.append(record)
    return sorted(found, key=lambda record: record.started_at)


def _read_record(path: Path) -> ServerRecord | None:
    try:
        fields = json.loads(path.read_text())
        record = ServerRecord(**{**fields, "models": [(str(name), str(state)) for name, state in fields["models"]]})
        return record if record.port and str(record.pid) == path.stem else None
    except (OSError, ValueError, TypeError, KeyError):
        return None


def run_ps(arguments: list[str]) -> int:
    parser = CommandParser("ps", ABOUT_PS)
    parser.flag("--json", action="store_true", help="print the list as JSON")
    namespace = parser.parse(arguments)
    servers = list_servers()
    if "json" in vars(namespace):
        rows = [{**asdict(each), "models": dict(each.models), "bytes": resident_bytes(each.pid)} for each in servers]
        print(json.dumps({"servers": rows}, indent=2))
    elif servers:
        print(_format_servers(servers, time.time()))
    else:
        print("no server of yours runs on this machine; `ingot serve` starts one", file=sys.stderr)
    return 0


def _format_servers(servers: Sequence[ServerRecord], now: float) -> str:
    from ingot.models.files.progress import format_bytes

    rows = [("PID", "ADDRESS", "MEMORY", "UP", "REQUESTS", "MODELS")]
    for each in servers:
        size = resident_bytes(each.pid)
        requests = "" if each.running is None else f"{each.running} running, {each.answered} answered"
        models = ", ".join(name if state in ("loaded", "") else f"{name} ({state})" for name, state in each.models)
        memory, up = "" if size is None else format_bytes(size), format_duration(now - each.started_at)
        state = "" if each.state == "ready" else f" ({each.state})"
        rows.append((str(each.pid), each.url + state, memory, up, requests, models))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def format_duration(seconds: float) -> str:
    minutes, hours = int(seconds) // 60, int(seconds) // 3600
    if minutes < 1:
        return f"{int(seconds)} s"
    if hours < 1:
        return f"{minutes} min"
    return f"{hours} h {minutes % 60} min" if hours < 48 else f"{hours // 24} days"


def run_stop(arguments: list[str]) -> int:
    parser = CommandParser("stop", ABOUT_STOP)
    parser.add_argument(
        "which",
        nargs="?",
        metavar="PID|PORT|ADDRESS|all",
        help="the server's process, port or address, as `ingot ps` lists them, or all (default: the only one)",
    )
    parser.flag(
        "--now",
        action="store_true",
        help="end running requests instead of waiting; a server that still runs after 5 s is killed",
    )
    namespace = parser.parse(arguments)
    servers = _choose_servers(namespace.which, list_servers())
    for each in servers:
        _signal(each, signal.SIGTERM)
    for each in servers:
        _await_end(each, hurry="now" in vars(namespace))
        print(f"stopped {each.pid} ({each.url})")
    return 0


def _choose_servers(which: str | None, servers: list[ServerRecord]) -> list[ServerRecord]:
    """Raises ConfigError where that is not clear, and IngotError where there is none."""
    listed = ", ".join(f"{each.pid} ({each.url})" for each in servers)
    if not servers:
        raise IngotError("no server of yours runs on this machine")
    if which == "all":
        return servers
    if which is None:
        if len(servers) > 1:
            raise ConfigError(f"several servers run here; say which, or all: {listed}")
        return servers
    chosen = [each for each in servers if which.rstrip("/") in (str(each.pid), str(each.port), each.url)]
    if not chosen:
        raise ConfigError(f"no server of yours has the process, port or address {which}; those that run: {listed}")
    if len(chosen) > 1:
        raise ConfigError(f"{which} means several; give the process: {listed}")
    return chosen


def _signal(server: ServerRecord, number: signal.Signals) -> None:
    """Raises IngotError. Looks again whether it is the same process, so that no other is ever signalled."""
    if process_start(server.pid) != server.process_start:
        return
    try:
        os.kill(server.pid, number)
    except ProcessLookupError:
        return
    except OSError as error:
        raise IngotError(f"{server.pid} cannot be stopped: {error.strerror}") from error


def _await_end(server: ServerRecord, *, hurry: bool) -> None:
    from ingot.models.files.progress import TerminalProgress

    progress = TerminalProgress()
    began = time.monotonic()
    hurrying = [signal.SIGINT, signal.SIGKILL] if hurry else []
    try:
        while process_start(server.pid) == server.process_start:
            waited = time.monotonic() - began
            if waited > server.stops_within_s + SLACK_S:
                raise IngotError(
                    f"{server.pid} still runs after {waited:.0f} s; `ingot stop {server.pid} --now` does not wait for "
                    f"its requests, and `kill -9 {server.pid}` ends it whatever it does"
                )
            progress(f"stopping {server.url}: running requests may take up to {server.stops_within_s:g} s")
            time.sleep(POLL_S)
            if hurrying and waited > HURRY_S[-len(hurrying)]:
                _signal(server, hurrying.pop(0))
    finally:
        progress.finish()
