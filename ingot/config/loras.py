"""LoRA adapters as settings name them: `name=path`, or vLLM's JSON objects."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ingot.errors import ConfigError

_NAME = re.compile(r"[^\s:=,*{}]{1,200}")
_KEYS = {"name", "path", "base_model_name"}
_SHAPE = 'write it like NAME=PATH or {"name": "NAME", "path": "PATH"}'


@dataclass(frozen=True, slots=True)
class LoraModule:
    name: str
    path: Path
    base: str | None = None  # the model that it is for, if that is said


def lora_modules(values: Sequence[str]) -> tuple[LoraModule, ...]:
    """Raises ConfigError."""
    found = tuple(_module(text) for text in _whole(values))
    names = [module.name for module in found]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(f"two adapters are called {twice!r}")
    return found


def is_lora_name(name: str) -> bool:
    return _NAME.fullmatch(name) is not None and name.isprintable()


def lora_problem(values: Sequence[str]) -> str | None:
    try:
        lora_modules(values)
    except ConfigError as error:
        return error.message
    return None


def _whole(values: Sequence[str]) -> list[str]:
    """Lists are split at commas: objects are put together again."""
    found: list[str] = []
    for part in values:
        if found and found[-1].count("{") > found[-1].count("}"):
            found[-1] += f",{part}"
        else:
            found.append(part)
    return found


def _module(text: str) -> LoraModule:
    if text.startswith("{"):
        return _from_json(text)
    name, equals, path = text.partition("=")
    if not equals or not path:
        raise ConfigError(f"{text[:100]!r} is no adapter; {_SHAPE}")
    return LoraModule(_checked(name), Path(path).expanduser())


def _from_json(text: str) -> LoraModule:
    try:
        stated = json.loads(text)
    except (ValueError, RecursionError):
        raise ConfigError(f"{text[:100]!r} is no JSON object; {_SHAPE}") from None
    unknown = stated.keys() - _KEYS
    if unknown:
        raise ConfigError(f"{min(unknown)[:100]!r} is not known of an adapter; {_SHAPE}")
    if not all(isinstance(stated.get(key), str) and stated[key] for key in ("name", "path")):
        raise ConfigError(f"an adapter needs a name and a path; {_SHAPE}")
    base = stated.get("base_model_name")
    if base is not None and not isinstance(base, str):
        raise ConfigError("base_model_name is no name")
    return LoraModule(_checked(stated["name"]), Path(stated["path"]).expanduser(), base)


def _checked(name: str) -> str:
    if not is_lora_name(name):
        raise ConfigError(f"{name[:100]!r} is no name for an adapter: no blanks, and none of : = , * {{ }}")
    return name
