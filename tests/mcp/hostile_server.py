"""An MCP server for tests whose tools misbehave, over its standard streams. Without the SDK it starts at once."""

from __future__ import annotations

import json
import os
import sys
from typing import Any


def say(text: bytes) -> None:
    while text:
        text = text[os.write(1, text) :]


def call(tool: str, city: str = "") -> str:
    match tool:
        case "endless":  # a line that does not end
            while True:
                say(b"x" * 65536)
        case "chatter":  # lines without end
            while True:
                say(b"x" * 65535 + b"\n")
        case "huge":
            return "x" * 8_000_000
        case "banner":  # a line that is no message
            say(b"hello there\n")
        case "leave":
            os._exit(1)
    return f"18 degrees in {city}"


TOOLS = [
    {"name": name, "inputSchema": {"type": "object"}}
    for name in ("weather", "slow", "endless", "chatter", "huge", "banner", "leave")
]


def answer(method: str, asked: dict[str, Any]) -> dict[str, Any]:
    if method == "initialize":
        about = {"serverInfo": {"name": "hostile", "version": "1"}, "capabilities": {"tools": {}}}
        return {"result": {"protocolVersion": asked["protocolVersion"], **about}}
    if method == "tools/list":
        return {"result": {"tools": TOOLS}}
    if method == "tools/call":
        text = call(asked["name"], **asked.get("arguments", {}))
        return {"result": {"content": [{"type": "text", "text": text}]}}
    return {"error": {"code": -32601, "message": "no such method"}}


for line in sys.stdin:
    message = json.loads(line)
    asked = message.get("params", {})
    if "id" in message and asked.get("name") != "slow":  # which is never answered
        said = answer(message["method"], asked)
        say(json.dumps({"jsonrpc": "2.0", "id": message["id"], **said}).encode() + b"\n")
