"""Checks of single settings: each returns what is wrong with a value, or None.

What another package reads is checked by that package, which is imported inside the function. LoRA adapters are given as
`name=path` or as vLLM's JSON objects, amounts of memory as `12GB`, `800MiB` or `60%`.
"""

from __future__ import annotations

import ipaddress
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ingot.config.foreign import translated_value
from ingot.errors import ConfigError
from ingot.quantities import format_bytes


def problem_from(read: Callable[[Any], object]) -> Callable[[Any], str | None]:
    """The check that a value can be read by `read`, which raises ConfigError if it cannot."""

    def problem(value: Any) -> str | None:
        try:
            read(value)
        except ConfigError as error:
            return error.message
        return None

    return problem


def is_loopback(host: str) -> bool:
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def pattern_problem(pattern: str, message: str) -> Callable[[Sequence[str]], str | None]:
    """The check that all texts match `pattern`; the problem is the first that does not, and `message`."""

    def problem(texts: Sequence[str]) -> str | None:
        return next((f"{text!r} {message}" for text in texts if not re.fullmatch(pattern, text)), None)

    return problem


host_problem = pattern_problem(
    r"[A-Za-z0-9._-]+|\[?[0-9A-Fa-f:.]+\]?", "is not a host name (no scheme, no port, no wildcard)"
)
media_hosts_problem = pattern_problem(
    r"(?:\*\.)?[A-Za-z0-9._-]+|[0-9A-Fa-f:.]+|\*",
    "is not a host name (no scheme, no port); write it like example.org or *.example.org",
)
origin_problem = pattern_problem(
    r"https?://[A-Za-z0-9.\[\]:_-]+", "is not an origin; write it like https://chat.example.org"
)


def names_problem(names: tuple[str, ...]) -> str | None:
    invalid = [name for name in names if "*" in name or "=" in name or not name.isprintable() or len(name) > 256]
    return f"{invalid[0][:100]!r} cannot name a model; patterns go with --alias" if invalid else None


def alias_problem(aliases: tuple[str, ...]) -> str | None:
    for alias in aliases:
        name, equals, target = alias.partition("=")
        if not (name and equals and target) or not alias.isprintable() or len(alias) > 512:
            return (
                f"{alias[:100]!r} is not an alias; write it like gpt-4o=default or claude-*=default, or name the model "
                "itself with --served-model-name"
            )
    return None


def endpoint_problem(endpoint: str) -> str | None:
    if re.fullmatch(r"tcp://[^\s/]+:(\d{1,5}|\*)|ipc://\S+", endpoint):
        return None
    return f"{endpoint[:100]!r} is not an endpoint: write tcp://HOST:PORT or ipc://PATH"


@problem_from
def mcp_problem(path: Path) -> None:
    from ingot.mcp.config import read_mcp_servers, require_mcp_sdk

    require_mcp_sdk()
    read_mcp_servers(path)


def override_problem(overrides: dict[str, Any]) -> str | None:
    from ingot.protocol.chat.sampling_defaults import sampling_override_problem

    return sampling_override_problem(overrides)


def variables_problem(variables: dict[str, Any]) -> str | None:
    from ingot.protocol.schema.model_fields import template_variables_problem

    return template_variables_problem(variables)


def format_problem(name: str) -> str | None:
    from ingot.text.tool_formats.registry import tool_format_problem

    problem = tool_format_problem(name)
    return None if problem is None else tool_format_problem(name, translated_value("tool_parsers", name))


def thinking_problem(name: str) -> str | None:
    from ingot.text.tool_formats.registry import thinking_format_problem

    problem = thinking_format_problem(name)
    return None if problem is None else thinking_format_problem(name, translated_value("reasoning_parsers", name))


def codec_problem(name: str) -> str | None:
    from ingot.cache.codecs.names import codec_problem

    return codec_problem(name)


@problem_from
def speculate_problem(text: str) -> None:
    from ingot.engine.speculation.options import SpeculationOptions

    SpeculationOptions.parse(text)


_LORA_NAME = re.compile(r"[^\s:=,*{}]{1,200}")
_LORA_KEYS = {"name", "path", "base_model_name"}
_LORA_SHAPE = 'write it like NAME=PATH or {"name": "NAME", "path": "PATH"}'


@dataclass(frozen=True, slots=True)
class LoraModule:
    name: str
    path: Path
    base: str | None = None  # the model that it was trained on, if given


def lora_modules(values: Sequence[str]) -> tuple[LoraModule, ...]:
    """Raises ConfigError."""
    found = tuple(_parse_module(text) for text in _rejoin_objects(values))
    names = [module.name for module in found]
    repeated = next((name for name in names if names.count(name) > 1), None)
    if repeated is not None:
        raise ConfigError(f"two adapters are called {repeated!r}")
    return found


def is_lora_name(name: str) -> bool:
    return _LORA_NAME.fullmatch(name) is not None and name.isprintable()


lora_problem = problem_from(lora_modules)


def _rejoin_objects(values: Sequence[str]) -> list[str]:
    """A list from a flag or variable is split at commas, JSON objects too: join those again."""
    found: list[str] = []
    for part in values:
        if found and found[-1].count("{") > found[-1].count("}"):
            found[-1] += f",{part}"
        else:
            found.append(part)
    return found


def _parse_module(text: str) -> LoraModule:
    if text.startswith("{"):
        return _parse_json_module(text)
    name, equals, path = text.partition("=")
    if not equals or not path:
        raise ConfigError(f"{text[:100]!r} is not an adapter; {_LORA_SHAPE}")
    return LoraModule(_check_lora_name(name), Path(path).expanduser())


def _parse_json_module(text: str) -> LoraModule:
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError):
        raise ConfigError(f"{text[:100]!r} is not a JSON object; {_LORA_SHAPE}") from None
    unknown = fields.keys() - _LORA_KEYS
    if unknown:
        raise ConfigError(f"{min(unknown)[:100]!r} is not a field of an adapter; {_LORA_SHAPE}")
    if not all(isinstance(fields.get(key), str) and fields[key] for key in ("name", "path")):
        raise ConfigError(f"an adapter needs a name and a path; {_LORA_SHAPE}")
    base = fields.get("base_model_name")
    if base is not None and not isinstance(base, str):
        raise ConfigError("base_model_name must be text")
    return LoraModule(_check_lora_name(fields["name"]), Path(fields["path"]).expanduser(), base)


def _check_lora_name(name: str) -> str:
    if not is_lora_name(name):
        raise ConfigError(
            f"{name[:100]!r} cannot name an adapter: it must not contain white space or any of : = , * {{ }}"
        )
    return name


KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
MEMORY_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
MEMORY_UNITS |= {"KIB": KIB, "MIB": MIB, "GIB": GIB, "TIB": 1 << 40}


def memory_bytes(text: str, total: int) -> int:
    """What `12GB`, `800MiB` or `60%` means on a device with `total` bytes. Raises ConfigError."""
    match = re.fullmatch(r"\s*(\d{1,15}(?:\.\d{1,9})?)\s*(%|[KMGT]?i?B)\s*", text, re.IGNORECASE | re.ASCII)
    if match is None:
        raise ConfigError(f"{text!r} is not an amount of memory; write it like 12GB, 800MiB or 60%")
    number, unit = float(match[1]), match[2].upper()
    amount = int(total * number / 100) if unit == "%" else int(number * MEMORY_UNITS[unit])
    if amount <= 0:
        raise ConfigError(f"{text} is too little memory")
    if amount > total:
        there_is = "" if unit == "%" else f" ({format_bytes(total)})"
        raise ConfigError(f"{text} is more memory than there is{there_is}")
    return amount


memory_problem = problem_from(lambda text: memory_bytes(text, total=1 << 62))
EXPERT_MEMORY_NAMES = ("all", "auto")


def expert_memory_problem(text: str) -> str | None:
    if text in EXPERT_MEMORY_NAMES or memory_problem(text) is None:
        return None
    return f"{text!r} is neither all, auto nor an amount of memory such as 24GB"
