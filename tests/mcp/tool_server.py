"""An MCP server for tests, over its standard streams or over HTTP. Usage: tool_server.py [PORT]"""

from __future__ import annotations

import os
import sys
import time

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("tools")


@server.tool()
def weather(city: str) -> str:
    """The weather of a city."""
    return f"18 degrees in {city}"


@server.tool()
def secret() -> str:
    """Not for everybody."""
    return os.environ.get("SECRET", "none")


@server.tool()
def long() -> str:
    """Says much."""
    return "x" * 10_000


@server.tool()
def broken() -> str:
    """Fails."""
    raise ToolError("the pipe is blocked")


@server.tool()
def slow() -> str:
    """Takes its time."""
    time.sleep(30)
    return "done"


if len(sys.argv) > 1:
    server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
else:
    server.run("stdio")
