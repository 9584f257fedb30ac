"""API keys: what one is made of, files of them, and what each may ask for."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from ingot.errors import ConfigError

LEAST_KEY_CHARS = 8  # fewer are soon guessed
DIGEST = re.compile(r"[0-9a-f]{16}")  # what keys without a name are called by

PerMinute = Annotated[int, Meta(ge=1, le=1_000_000_000)]


@dataclass(frozen=True, slots=True)
class ApiKey:
    """Who may come in, by which secrets, and how much of what it may ask for. Without a name, it is known by its
    secret's digest."""

    secrets: tuple[str, ...]
    name: str = ""
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    models: tuple[str, ...] = ()  # names and patterns; none: all of them
    priority: int = 0  # who has more goes first


class KeyTable(Struct, forbid_unknown_fields=True):
    """A named key as a file tells of it."""

    key: str | None = None
    keys: list[str] = []
    requests_per_minute: PerMinute | None = None
    tokens_per_minute: PerMinute | None = None
    models: list[str] = []
    priority: Annotated[int, Meta(ge=-10, le=10)] = 0

    @property
    def secrets(self) -> tuple[str, ...]:
        return (*([self.key] if self.key is not None else []), *self.keys)


def key_problem(key: str) -> str | None:
    return None if re.fullmatch(r"[!-~]+", key) else "a key is made of visible ASCII characters, without spaces"


def own_key_problem(key: str) -> str | None:
    """What is wrong with a key that this server is to ask for. Other servers' may be as short as those like."""
    short = f"a key has at least {LEAST_KEY_CHARS} characters" if len(key) < LEAST_KEY_CHARS else None
    return key_problem(key) or short


def read_keys(path: Path) -> tuple[ApiKey, ...]:
    """The API keys in a file: a table each where it is TOML, else one a line. Raises ConfigError, which never holds a
    key."""
    try:
        text = path.expanduser().read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except ValueError:
        raise ConfigError(f"{path} is not UTF-8 text") from None
    found = _named(path, text) if path.suffix == ".toml" else _listed(path, text)
    if not found:
        raise ConfigError(f"{path} holds no key")
    return found


def _listed(path: Path, text: str) -> tuple[ApiKey, ...]:
    """Empty lines and those that begin with # are no keys."""
    found = {number: line.strip() for number, line in enumerate(text.splitlines(), start=1)}
    keys = {number: line for number, line in found.items() if line and not line.startswith("#")}
    for number, key in keys.items():
        if (problem := own_key_problem(key)) is not None:
            raise ConfigError(f"{path}, line {number}: {problem}")
    return tuple(ApiKey((key,)) for key in dict.fromkeys(keys.values()))


def _named(path: Path, text: str) -> tuple[ApiKey, ...]:
    try:
        tables = msgspec.convert(tomllib.loads(text), dict[str, KeyTable])
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: {error}") from None
    owners: dict[str, str] = {}
    for name, table in tables.items():
        if (problem := _table_problem(name, table, owners)) is not None:
            raise ConfigError(f"{path}, [{name}]: {problem}")
    return tuple(
        ApiKey(
            table.secrets,
            name,
            table.requests_per_minute,
            table.tokens_per_minute,
            tuple(table.models),
            table.priority,
        )
        for name, table in tables.items()
    )


def _table_problem(name: str, table: KeyTable, owners: dict[str, str]) -> str | None:
    """`owners` are those of the secrets so far."""
    if not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", name) or DIGEST.fullmatch(name):
        return "a name has 1 to 64 letters, digits, dots, dashes and underscores, and is not 16 hexadecimal digits"
    if not table.secrets:
        return "there is neither a key nor keys"
    for secret in table.secrets:
        if (problem := own_key_problem(secret)) is not None:
            return problem
        if owners.setdefault(secret, name) != name:
            return f"[{owners[secret]}] has the same key"
    return None


def key_file_problem(path: Path) -> str | None:
    try:
        read_keys(path)
    except ConfigError as error:
        return error.message
    return None
