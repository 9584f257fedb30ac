"""Real MCP servers, over standard streams and over HTTP: their tools are listed, called, bounded and timed."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

pytest.importorskip("mcp", reason="the MCP SDK is not installed: it is the extra `mcp`")

from ingot.errors import ConfigError
from ingot.mcp.config import McpServerConfig
from ingot.mcp.servers import McpServers, ToolFailed
from tests.mcp import HERE

pytestmark = pytest.mark.anyio
SCRIPT = str(HERE / "tool_server.py")


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def stdio(**given: Any) -> McpServerConfig:
    # A server gets little of our environment; where Python looks for modules it needs to know.
    environment = {"SECRET": "open sesame", "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    return McpServerConfig(command=sys.executable, args=(SCRIPT,), env=environment, **given)


def hostile() -> McpServerConfig:
    return McpServerConfig(command=sys.executable, args=("-I", str(HERE / "hostile_server.py")))


@asynccontextmanager
async def started(**configs: McpServerConfig) -> AsyncIterator[McpServers]:
    servers = McpServers(configs)
    await servers.start()
    try:
        yield servers
    finally:
        await servers.stop()


async def failing(servers: McpServers, name: str, arguments: str = "{}") -> str:
    with pytest.raises(ToolFailed) as failed:
        await servers.call("here", name, arguments)
    return failed.value.message


async def test_tools_are_listed_called_and_held_to_their_limits() -> None:
    allowed = ("weather", "secret", "long", "broken")
    async with started(here=stdio(tools=allowed, max_result_chars=100)) as servers:
        listed = {tool.name: tool for tool in servers.tools["here"]}
        assert set(listed) == set(allowed)
        assert listed["weather"].description == "The weather of a city."
        assert listed["weather"].parameters["required"] == ["city"]
        assert await servers.call("here", "weather", '{"city": "Paris"}') == "18 degrees in Paris"
        assert await servers.call("here", "secret", "{}") == "open sesame"
        long = await servers.call("here", "long", "{}")
        assert long.startswith("x" * 100) and "cut off" in long and len(long) < 200
        assert "the pipe is blocked" in await failing(servers, "broken")
        assert "no tool" in await failing(servers, "slow"), "it is not among the allowed ones"
        assert "JSON" in await failing(servers, "weather", "{")
        assert "object" in await failing(servers, "weather", "[]")
        assert await failing(servers, "weather", '{"town": "Paris"}')
        both = [servers.call("here", "weather", json.dumps({"city": city})) for city in ("Rome", "Oslo")]
        assert await asyncio.gather(*both) == ["18 degrees in Rome", "18 degrees in Oslo"]


async def test_a_call_has_so_much_time_and_a_server_that_ended_is_started_again_for_the_next() -> None:
    async with started(here=hostile()) as servers:
        connection = servers._connections["here"]
        config, connection.config = connection.config, msgspec.structs.replace(connection.config, timeout_s=0.2)
        assert "0.2 seconds" in await failing(servers, "slow")
        connection.config = config
        assert "failed" in await failing(servers, "leave")
        assert await servers.call("here", "weather", '{"city": "Paris"}') == "18 degrees in Paris"


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (McpServerConfig(command="/no/such/program"), "here"),
        (McpServerConfig(command=sys.executable, args=("-c", "pass"), timeout_s=5.0), "here"),
        (McpServerConfig(url="http://127.0.0.1:9/mcp", timeout_s=5.0), "here"),
        (stdio(tools=("weather", "wether")), "wether"),
    ],
)
async def test_a_server_that_is_not_as_configured_is_named_at_the_start(config: McpServerConfig, words: str) -> None:
    servers = McpServers({"here": config})
    with pytest.raises(ConfigError, match=words):
        await servers.start()


@pytest.fixture
def url() -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with subprocess.Popen([sys.executable, SCRIPT, str(port)], stderr=subprocess.DEVNULL) as server:
        try:
            until = time.monotonic() + 30
            while time.monotonic() < until:
                with socket.socket() as knock:
                    if knock.connect_ex(("127.0.0.1", port)) == 0:
                        break
                time.sleep(0.05)
            yield f"http://127.0.0.1:{port}/mcp"
        finally:
            server.terminate()


async def test_a_server_is_reached_over_http(url: str) -> None:
    async with started(here=McpServerConfig(url=url, headers={"x-note": "y"})) as servers:
        assert await servers.call("here", "weather", '{"city": "Paris"}') == "18 degrees in Paris"
