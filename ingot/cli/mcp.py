"""`ingot mcp [URL]`: offer the models of a running server to MCP clients, as the tools of an MCP server over the
standard streams."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ingot.cli.client import ServerClient
from ingot.cli.flags import CommandParser
from ingot.errors import IngotError
from ingot.mcp.config import require_mcp_sdk
from ingot.version import __version__

if TYPE_CHECKING:
    from mcp.server.mcpserver import MCPServer

    from ingot.cli.client import ServerClient


ABOUT_MCP = (
    "Offer the models of a running server as an MCP server, over standard input and output. MCP clients start this "
    "command themselves."
)
MCP_DEFAULT_URL = "http://127.0.0.1:8000"


def run_mcp(arguments: list[str]) -> int:
    parser = CommandParser("mcp", ABOUT_MCP)
    parser.add_argument(
        "url", nargs="?", metavar="URL", default=MCP_DEFAULT_URL, help=f"a server (default: {MCP_DEFAULT_URL})"
    )
    parser.flag("--api-key", metavar="KEY", help="the server's key (default: INGOT_API_KEY)")
    namespace = parser.parse(arguments)
    key = vars(namespace).get("api_key") or os.environ.get("INGOT_API_KEY")

    make_mcp_server(ServerClient(namespace.url, key)).run("stdio")
    return 0


MCP_INSTRUCTIONS = "Language models that run on this machine. Use them for text that should not leave it."


def make_mcp_server(client: ServerClient) -> MCPServer[Any]:
    """An MCP server whose tools ask the server that `client` talks to. Raises ConfigError without the SDK."""
    require_mcp_sdk()
    from mcp.server.mcpserver import MCPServer
    from mcp.server.mcpserver.exceptions import ToolError

    def asked(path: str, body: Mapping[str, Any] | None = None) -> Any:
        try:
            return client.get(path) if body is None else client.post(path, body)
        except IngotError as error:
            raise ToolError(error.message) from error

    def chat(message: str, system: str | None = None, model: str = "default", max_tokens: int = 1024) -> str:
        said = [] if system is None else [{"role": "system", "content": system}]
        body = {"model": model, "messages": [*said, {"role": "user", "content": message}], "max_tokens": max_tokens}
        return str(asked("chat/completions", body)["choices"][0]["message"]["content"] or "")

    def complete(text: str, model: str = "default", max_tokens: int = 256) -> str:
        body = {"model": model, "prompt": text, "max_tokens": max_tokens}
        return str(asked("completions", body)["choices"][0]["text"])

    def list_models() -> list[str]:
        return [str(each["id"]) for each in asked("models")["data"]]

    server: MCPServer[Any] = MCPServer("ingot", version=__version__, instructions=MCP_INSTRUCTIONS)
    server.add_tool(chat, description="Ask a local model, with a message and, if need be, instructions in `system`.")
    server.add_tool(complete, description="Let a local model go on with a text.")
    server.add_tool(list_models, description="The names of the local models.")
    return server
