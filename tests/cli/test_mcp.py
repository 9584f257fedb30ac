"""`ingot mcp`: an MCP client starts it, sees the local models as tools, and asks them."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

pytest.importorskip("mcp", reason="the MCP SDK is not installed: it is the extra `mcp`")

from mcp import Client, StdioServerParameters

from tests.clients.agents import KEY
from tests.http.running import running
from tests.http.scripted import ScriptedEngine, settings

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def test_the_local_models_are_tools_for_others(tmp_path: Path) -> None:
    engine = ScriptedEngine()
    with running(engine, settings(api_key=KEY)) as url:
        command = StdioServerParameters(
            command=sys.executable,
            args=["-m", "ingot", "mcp", url],
            env={"INGOT_API_KEY": KEY, "PYTHONPATH": os.environ.get("PYTHONPATH", "")},
        )
        async with Client(command, read_timeout_seconds=60) as client:
            assert {tool.name for tool in (await client.list_tools()).tools} == {"chat", "complete", "list_models"}
            listed = await client.call_tool("list_models")
            assert listed.structured_content == {"result": ["org/toy"]}
            result = await client.call_tool("chat", {"message": "Hi", "system": "Be brief.", "max_tokens": 50})
            assert result.structured_content == {"result": "Hello, world"}
            completed = await client.call_tool("complete", {"text": "a", "max_tokens": 2})
            assert completed.structured_content == {"result": "Hello, "}
            refused = await client.call_tool("chat", {"message": "Hi", "model": "other"})
            assert refused.is_error and "org/toy" in refused.content[0].text  # type: ignore[union-attr]
    assert b"Be brief." in bytes(engine.requests[0].prompts[0])
