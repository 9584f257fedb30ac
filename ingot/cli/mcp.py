"""`ingot mcp [URL]`: an MCP server over standard input and output, whose tools ask the models of a running server."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ingot.cli.client import ServerClient
from ingot.cli.flags import DEFAULT_URL, CommandParser
from ingot.errors import IngotError
from ingot.mcp.config import require_mcp_sdk
from ingot.version import __version__

if TYPE_CHECKING:
    from mcp.server.mcpserver import MCPServer

ABOUT_MCP = (
    "Offer the models of a running server as an MCP server, over standard input and output. MCP clients start this "
    "command themselves."
)
MCP_INSTRUCTIONS = "Language models that run on this machine. Use them for text that should not leave it."


def run_mcp(arguments: list[str]) -> int:
    parser = CommandParser("mcp", ABOUT_MCP)
    parser.add_argument("url", nargs="?", metavar="URL", default=DEFAULT_URL, help=f"a server (default: {DEFAULT_URL})")
    parser.flag("--api-key", metavar="KEY", help="the server's key (default: INGOT_API_KEY)")
    namespace = parser.parse(arguments)
    key = vars(namespace).get("api_key") or os.environ.get("INGOT_API_KEY")
    make_mcp_server(ServerClient(namespace.url, key)).run("stdio")
    return 0


def make_mcp_server(client: ServerClient) -> MCPServer[Any]:
    """An MCP server whose tools ask the server that `client` talks to. Raises ConfigError without the SDK."""
    require_mcp_sdk()
    from mcp.server.mcpserver import MCPServer
    from mcp.server.mcpserver.exceptions import ToolError

    def ask_server(path: str, body: Mapping[str, Any] | None = None) -> Any:
        try:
            return client.get(path) if body is None else client.post(path, body)
        except IngotError as error:
            raise ToolError(error.message) from error

    def chat(message: str, system: str | None = None, model: str = "default", max_tokens: int = 1024) -> str:
        messages = [] if system is None else [{"role": "system", "content": system}]
        messages.append({"role": "user", "content": message})
        body = {"model": model, "messages": messages, "max_tokens": max_tokens}
        return str(ask_server("chat/completions", body)["choices"][0]["message"]["content"] or "")

    def complete(text: str, model: str = "default", max_tokens: int = 256) -> str:
        body = {"model": model, "prompt": text, "max_tokens": max_tokens}
        return str(ask_server("completions", body)["choices"][0]["text"])

    def list_models() -> list[str]:
        return [str(each["id"]) for each in ask_server("models")["data"]]

    server: MCPServer[Any] = MCPServer("ingot", version=__version__, instructions=MCP_INSTRUCTIONS)
    server.add_tool(chat, description="Ask a local model a question, with optional instructions in `system`.")
    server.add_tool(complete, description="Let a local model continue a text.")
    server.add_tool(list_models, description="The names of the local models.")
    return server
