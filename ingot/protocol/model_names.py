"""The names under which a model is served: plain ones, and patterns in which `*` stands for any text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

from ingot.errors import ConfigError, ModelNotFound

ANY = "*"
DEFAULT_NAME = "default"
"""Stands for the model that is served, or for the first."""


def is_name(name: str, names: Iterable[str]) -> bool:
    """Whether `name` is among `names`, or matches a pattern that is."""
    return any(name == known or (ANY in known and _pattern(known).fullmatch(name)) for known in names)


def names_schema(names: Sequence[str]) -> dict[str, Any]:
    """The JSON schema of what `is_name` takes."""
    if not any(ANY in name for name in names):
        return {"type": "string", "enum": list(names)}
    return {"type": "string", "pattern": f"^(?:{'|'.join(_written(name) for name in names)})$"}


def with_aliases(names: Sequence[str], aliases: Iterable[str]) -> tuple[str, ...]:
    """`names`, with the aliases (`name=target`) whose target is one of them."""
    pairs = [alias.partition("=") for alias in aliases]
    return tuple(dict.fromkeys([*names, *(alias for alias, _, target in pairs if target in names)]))


def check_aliases(aliases: Iterable[str], names: Iterable[str]) -> None:
    """Raises ConfigError for one that leads nowhere. An alias of an alias is none."""
    known = tuple(dict.fromkeys(names))
    for alias in aliases:
        target = alias.partition("=")[2]
        if target not in known:
            listed = ", ".join(known)
            raise ConfigError(f"alias {alias}: there is no model {target!r}; served: {listed}", param="alias")


def unknown_name(name: str, known: Iterable[str]) -> ModelNotFound:
    served = ", ".join(f"'{one}'" for one in known)
    return ModelNotFound(f"There is no model '{name[:200]}' here. Served: {served}.", param="model")


def _written(name: str) -> str:
    # Only what has a meaning is escaped: JSON Schema's expressions allow no other.
    return ".*".join(re.sub(r"[][^$\\.+?(){}|]", r"\\\g<0>", part) for part in name.split(ANY))


@lru_cache(maxsize=256)
def _pattern(name: str) -> re.Pattern[str]:
    return re.compile(_written(name))
