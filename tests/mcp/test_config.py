"""The file of MCP servers: what is accepted, and what is refused with the position of the mistake."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ingot.errors import ConfigError
from ingot.mcp.config import McpServerConfig, read_mcp_servers


def read(tmp_path: Path, content: Any) -> dict[str, McpServerConfig]:
    path = tmp_path / "mcp.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return read_mcp_servers(path)


def test_commands_and_addresses_are_read(tmp_path: Path) -> None:
    made = read(
        tmp_path,
        {
            "mcpServers": {
                "files": {"command": "files", "args": ["-v"], "env": {"A": "b"}, "tools": ["read"], "timeout_s": 5},
                "web": {"url": "https://example.org/mcp", "headers": {"x": "y"}},
            }
        },
    )
    assert made["files"] == McpServerConfig(command="files", args=("-v",), env={"A": "b"}, tools=("read",), timeout_s=5)
    assert made["web"].url == "https://example.org/mcp"


def test_secrets_come_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN", "t0p")
    server = {"url": "https://example.org/${TOKEN}", "headers": {"authorization": "Bearer ${TOKEN}"}}
    made = read(tmp_path, {"mcpServers": {"web": server}})["web"]
    assert (made.url, made.headers) == ("https://example.org/t0p", {"authorization": "Bearer t0p"})
    monkeypatch.delenv("TOKEN")
    with pytest.raises(ConfigError, match="TOKEN"):
        read(tmp_path, {"mcpServers": {"web": server}})


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "mcp.json"),
        ({}, "mcpServers"),
        ({"mcpServers": {"a": {}}}, "either"),
        ({"mcpServers": {"a": {"command": "x", "url": "http://x"}}}, "either"),
        ({"mcpServers": {"a": {"command": "x", "headers": {"b": "c"}}}}, "headers"),
        ({"mcpServers": {"a": {"url": "http://x", "args": ["b"]}}}, "args"),
        ({"mcpServers": {"a": {"url": "ftp://x"}}}, "http"),
        ({"mcpServers": {"a": {"command": "x", "timeout": 3}}}, "timeout"),
        ({"mcpServers": {"a": {"command": "x", "timeout_s": 0}}}, "timeout_s"),
        ({"mcpServers": {"a b": {"command": "x"}}}, "label"),
    ],
)
def test_a_mistake_is_named(tmp_path: Path, content: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read(tmp_path, content)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"mcp\.json"):
        read_mcp_servers(tmp_path / "mcp.json")
