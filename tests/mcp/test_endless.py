"""Servers that send without end: each is ended with a reason, and delays nothing else."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

pytest.importorskip("mcp", reason="the MCP SDK is not installed: it is the extra `mcp`")

from ingot.errors import ConfigError
from ingot.mcp import config as configs
from ingot.mcp import transports as processes
from ingot.mcp.config import McpServerConfig
from ingot.mcp.servers import McpServers
from tests.mcp.test_servers import failing, hostile, started

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.mark.parametrize(
    ("tool", "words"),
    [
        ("endless", "a message of more than 4 MiB"),
        ("chatter", "without answering anything"),
        ("huge", "a message of more than 4 MiB"),
    ],
)
async def test_a_tool_whose_server_does_not_stop_talking_fails_and_the_server_is_started_again(
    tool: str, words: str
) -> None:
    async with started(here=hostile()) as servers:
        assert words in await failing(servers, tool)
        assert await servers.call("here", "weather", '{"city": "Paris"}') == "18 degrees in Paris"


async def test_what_is_no_message_is_passed_over() -> None:
    async with started(here=hostile()) as servers:
        assert await servers.call("here", "banner", "{}") == "18 degrees in "


async def test_a_server_that_only_shouts_is_named_at_the_start() -> None:
    shouting = "import sys\nwhile True: sys.stdout.write('x' * 65536)"
    servers = McpServers({"here": McpServerConfig(command=sys.executable, args=("-c", shouting), timeout_s=20.0)})
    with pytest.raises(ConfigError, match=r"here.*more than 4 MiB"):
        await servers.start()


async def test_a_server_that_does_not_leave_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "EXIT_GRACE_S", 0.1)
    note = tmp_path / "pid"
    stubborn = (
        "import os, pathlib, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        f"pathlib.Path({str(note)!r}).write_text(str(os.getpid())); time.sleep(600)"
    )
    servers = McpServers({"here": McpServerConfig(command=sys.executable, args=("-c", stubborn), timeout_s=2.0)})
    with pytest.raises(ConfigError, match="in time"):
        await servers.start()
    with pytest.raises(ProcessLookupError):
        os.kill(int(note.read_text()), 0)


class Endless(BaseHTTPRequestHandler):
    """Answers without end, in the media type that its path names."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-type", "text/event-stream" if "events" in self.path else "application/json")
        if "packed" in self.path:
            self.send_header("content-encoding", "gzip")
        self.end_headers()
        try:
            self.wfile.write(b"data: ")
            while True:
                self.wfile.write(b"x" * 65536)
        except OSError:
            pass

    def log_message(self, *words: Any) -> None:
        pass


@pytest.fixture
def endless() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Endless)
    Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize(("path", "words"), [("events", "limit"), ("plain", "4 MiB"), ("packed", "compressed")])
async def test_a_remote_server_without_end_is_not_heard_to_it(endless: str, path: str, words: str) -> None:
    servers = McpServers({"here": McpServerConfig(url=f"{endless}/{path}", timeout_s=20.0)})
    with pytest.raises(ConfigError, match=words):
        await servers.start()


def test_a_message_may_be_longer_than_any_result_that_is_passed_on_by_default() -> None:
    assert McpServerConfig(command="x").max_result_chars * 6 < configs.MESSAGE_BYTES, "six bytes write any character"
