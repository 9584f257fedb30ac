"""`ingot mcp [URL]`: offer the models of a running server to MCP clients, over the standard streams."""

from __future__ import annotations

import os

from ingot.cli.client import Client
from ingot.cli.flags import CommandParser

ABOUT = (
    "Offer the models of a running server as an MCP server, over standard input and output. MCP clients start this "
    "command themselves."
)
DEFAULT_URL = "http://127.0.0.1:8000"


def run(arguments: list[str]) -> int:
    parser = CommandParser("mcp", ABOUT)
    parser.add_argument("url", nargs="?", metavar="URL", default=DEFAULT_URL, help=f"a server (default: {DEFAULT_URL})")
    parser.flag("--api-key", metavar="KEY", help="the server's key (default: INGOT_API_KEY)")
    namespace = parser.parse(arguments)
    key = vars(namespace).get("api_key") or os.environ.get("INGOT_API_KEY")

    from ingot.cli.mcp_offer import offered

    offered(Client(namespace.url, key)).run("stdio")
    return 0
