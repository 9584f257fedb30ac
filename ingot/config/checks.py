"""What is wrong with the values of single settings: each check returns it in words, or None.

What another room reads is checked by that room, which is imported inside of the function alone.
"""

from __future__ import annotations

import ipaddress
import re
from pathlib import Path
from typing import Any

from ingot.errors import ConfigError


def is_loopback(host: str) -> bool:
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def host_problem(hosts: tuple[str, ...]) -> str | None:
    wrong = [host for host in hosts if not re.fullmatch(r"[A-Za-z0-9._-]+|\[?[0-9A-Fa-f:.]+\]?", host)]
    return f"{wrong[0]!r} is no host name (no scheme, no port, no wildcard)" if wrong else None


def media_hosts_problem(hosts: tuple[str, ...]) -> str | None:
    wrong = [host for host in hosts if not re.fullmatch(r"(?:\*\.)?[A-Za-z0-9._-]+|[0-9A-Fa-f:.]+|\*", host)]
    return (
        f"{wrong[0]!r} is no host name (no scheme, no port); write it like example.org or *.example.org"
        if wrong
        else None
    )


def origin_problem(origins: tuple[str, ...]) -> str | None:
    wrong = [origin for origin in origins if not re.fullmatch(r"https?://[A-Za-z0-9.\[\]:_-]+", origin)]
    return f"{wrong[0]!r} is no origin; write it like https://chat.example.org" if wrong else None


def names_problem(names: tuple[str, ...]) -> str | None:
    wrong = [name for name in names if "*" in name or "=" in name or not name.isprintable() or len(name) > 256]
    return f"{wrong[0][:100]!r} is no name for a model; patterns go with --alias" if wrong else None


def alias_problem(aliases: tuple[str, ...]) -> str | None:
    for alias in aliases:
        name, equals, target = alias.partition("=")
        if not (name and equals and target) or not alias.isprintable() or len(alias) > 512:
            return f"{alias[:100]!r} is no alias; write it like gpt-4o=default or claude-*=default"
    return None


def endpoint_problem(endpoint: str) -> str | None:
    if re.fullmatch(r"tcp://[^\s/]+:(\d{1,5}|\*)|ipc://\S+", endpoint):
        return None
    return f"{endpoint[:100]!r} is no endpoint: write tcp://HOST:PORT or ipc://PATH"


def mcp_problem(path: Path) -> str | None:
    from ingot.mcp.config import read_servers, require_sdk

    try:
        require_sdk()
        read_servers(path)
    except ConfigError as error:
        return error.message
    return None


def override_problem(overrides: dict[str, Any]) -> str | None:
    from ingot.protocol.chat.sampling_defaults import override_problem

    return override_problem(overrides)


def variables_problem(variables: dict[str, Any]) -> str | None:
    from ingot.protocol.schema.template_variables import variables_problem

    return variables_problem(variables)


def format_problem(name: str) -> str | None:
    from ingot.text.tool_formats.registry import format_problem

    return format_problem(name)


def thinking_problem(name: str) -> str | None:
    from ingot.text.tool_formats.registry import thinking_problem

    return thinking_problem(name)


def codec_problem(name: str) -> str | None:
    from ingot.cache.codecs.names import codec_problem

    return codec_problem(name)


def speculate_problem(text: str) -> str | None:
    from ingot.engine.speculation.options import Choice

    try:
        Choice.parse(text)
    except ConfigError as error:
        return error.message
    return None
