"""The file of `--mcp-config`: which MCP servers there are, and what may be done with them.

It is JSON in the form that other programs use, `{"mcpServers": {"LABEL": {...}}}`, with a few fields of our own.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

from ingot.errors import ConfigError
from ingot.extras import require_extra

SERVER_LABEL: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")
MESSAGE_BYTES: Final = 4 << 20  # of one message of a server; one that sends a longer one is ended
ENVIRONMENT_REFERENCE: Final = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")


class McpServerConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Either a `command` to start, which then uses its standard streams, or the `url` of a running server.

    `${NAME}` in a command's environment, a URL or a header stands for that variable of our own environment.
    """

    command: str | None = None
    args: tuple[str, ...] = ()
    env: dict[str, str] = {}
    cwd: str | None = None
    url: str | None = None
    headers: dict[str, str] = {}
    tools: tuple[str, ...] | None = None  # the only ones that may be called; all by default
    timeout_s: float = 60.0  # for connecting, and for each call
    max_result_chars: int = 65_536  # more of a result is cut off, with a note for the model


class _McpConfigFile(Struct, frozen=True, forbid_unknown_fields=True):
    servers: dict[str, McpServerConfig] = msgspec.field(name="mcpServers")


def require_mcp_sdk() -> None:
    """Raises ConfigError where the official SDK is not installed."""
    require_extra("mcp", "MCP")


def read_mcp_servers(path: Path) -> dict[str, McpServerConfig]:
    """The servers of the file, by label. Raises ConfigError."""
    try:
        found = msgspec.json.decode(path.expanduser().read_bytes(), type=_McpConfigFile).servers
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path}: {error}") from error
    return {label: _check_server(label, server, path) for label, server in found.items()}


def _check_server(label: str, server: McpServerConfig, path: Path) -> McpServerConfig:
    where = f"{path}: {label}"
    if not SERVER_LABEL.fullmatch(label):
        raise ConfigError(f"{where[:200]}: a label has 1 to 64 letters, digits, dashes or underscores")
    if (server.command is None) == (server.url is None):
        raise ConfigError(f"{where}: a server has either a command or a url")
    if server.command is not None and server.headers:
        raise ConfigError(f"{where}: headers go with a url, not with a command")
    if server.url is not None and (server.args or server.env or server.cwd is not None):
        raise ConfigError(f"{where}: args, env and cwd go with a command, not with a url")
    if server.url is not None and not server.url.startswith(("http://", "https://")):
        raise ConfigError(f"{where}: a url begins with http:// or https://")
    if not 0 < server.timeout_s <= 3600 or not 0 < server.max_result_chars <= 1 << 24:
        raise ConfigError(f"{where}: timeout_s is at most 3600, max_result_chars at most {1 << 24}")
    return msgspec.structs.replace(
        server,
        env={name: _fill_references(value, where) for name, value in server.env.items()},
        url=None if server.url is None else _fill_references(server.url, where),
        headers={name: _fill_references(value, where) for name, value in server.headers.items()},
    )


def _fill_references(text: str, where: str) -> str:
    def value(found: re.Match[str]) -> str:
        if found[1] not in os.environ:
            raise ConfigError(f"{where}: there is no variable {found[1]} in the environment")
        return os.environ[found[1]]

    return ENVIRONMENT_REFERENCE.sub(value, text)
