"""API keys, and the key that authenticates cache files.

An API key says who may come in, by which secrets, and how much it may ask for; keys come from files of them. Errors
never hold a key.

`ArchiveKey` is the secret that records in `--cache-dir` and exported prefixes are authenticated with: a file of the
server's own, made at its first use. Whoever has it can make files that the server takes for its own, so nobody but the
server's user may read it. Servers that are to take each other's files are given the same one.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import stat
import tempfile
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

import msgspec
from msgspec import Meta, Struct

from ingot.errors import ConfigError, Unavailable

LEAST_KEY_CHARS = 8  # fewer are soon guessed
KEY_DIGEST = re.compile(r"[0-9a-f]{16}")  # what keys without a name are called by

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
    found = _read_key_tables(path, text) if path.suffix == ".toml" else _read_key_lines(path, text)
    if not found:
        raise ConfigError(f"{path} holds no key")
    return found


def _read_key_lines(path: Path, text: str) -> tuple[ApiKey, ...]:
    """Empty lines and those that begin with # are no keys."""
    found = {number: line.strip() for number, line in enumerate(text.splitlines(), start=1)}
    keys = {number: line for number, line in found.items() if line and not line.startswith("#")}
    for number, key in keys.items():
        if (problem := own_key_problem(key)) is not None:
            raise ConfigError(f"{path}, line {number}: {problem}")
    return tuple(ApiKey((key,)) for key in dict.fromkeys(keys.values()))


def _read_key_tables(path: Path, text: str) -> tuple[ApiKey, ...]:
    try:
        tables = msgspec.convert(tomllib.loads(text), dict[str, KeyTable])
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: {error}") from None
    owners: dict[str, str] = {}
    for name, table in tables.items():
        if (problem := _key_table_problem(name, table, owners)) is not None:
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


def _key_table_problem(name: str, table: KeyTable, owners: dict[str, str]) -> str | None:
    """`owners` are those of the secrets so far."""
    if not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", name) or KEY_DIGEST.fullmatch(name):
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


log = logging.getLogger("ingot.cache")

SECRET_BYTES: Final = 32
OTHERS_MAY_ACCESS: Final = stat.S_IRWXG | stat.S_IRWXO


class ArchiveKey:
    """Its call reads a file: not for an event loop."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def secret(self) -> bytes:
        """Raises Unavailable, and logs what to do, where there is none that can be relied on."""
        try:
            if not self._path.exists():
                self._make()
            return self._read()
        except OSError as error:
            log.error("the key that files of kept prompts are sealed with, %s: %s", self._path, error)
            raise Unavailable("The server cannot use its key for files of kept prompts; its log says why.") from error

    def _make(self) -> None:
        """Whole or not at all, and never in place of one that is there."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=self._path.parent, prefix=".archive-key-")  # for this user's eyes alone
        try:
            with os.fdopen(descriptor, "w") as file:
                file.write(secrets.token_hex(SECRET_BYTES) + "\n")
                file.flush()
                os.fsync(file.fileno())
            os.link(name, self._path)
        except FileExistsError:  # another server of the same user was faster
            pass
        finally:
            Path(name).unlink()

    def _read(self) -> bytes:
        with self._path.open() as file:
            if os.fstat(file.fileno()).st_mode & OTHERS_MAY_ACCESS:
                raise OSError("other users may read it; run chmod 600 on it, or delete it to have a new one made")
            text = file.read(2 * SECRET_BYTES + 2).strip()
        if not re.fullmatch(rf"[0-9a-f]{{{2 * SECRET_BYTES}}}", text):
            raise OSError(f"it does not hold {2 * SECRET_BYTES} hexadecimal digits; delete it to have a new one made")
        return bytes.fromhex(text)
