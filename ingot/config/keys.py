"""API keys, and the key that authenticates cache files.

An API key is a tenant: its secrets, its limits and its priority. Error messages never contain a key.

`ArchiveKey` is the secret that authenticates records in `--cache-dir` and exported prefixes. It is a file that is
created at its first use. Anyone who has it can make files that the server trusts, so only the server's user may read
it. Servers that share files need the same key.
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

from ingot.config.checks import problem_from
from ingot.errors import ConfigError, Unavailable
from ingot.text.input_files import read_text_file

LEAST_KEY_CHARS = 8  # shorter keys are easy to guess
KEY_DIGEST = re.compile(r"[0-9a-f]{16}")  # the name of a key that has none

PerMinute = Annotated[int, Meta(ge=1, le=1_000_000_000)]


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A tenant: its secrets and limits. Without a name, it is called by its secret's digest."""

    secrets: tuple[str, ...]
    name: str = ""
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    models: tuple[str, ...] = ()  # names and patterns; empty: all models
    priority: int = 0  # higher goes first


class KeyTable(Struct, forbid_unknown_fields=True):
    """A named key in a TOML file."""

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
    return None if re.fullmatch(r"[!-~]+", key) else "a key must consist of visible ASCII characters, without spaces"


def own_key_problem(key: str) -> str | None:
    """What is wrong with a key that this server accepts. Keys of other servers may be shorter."""
    short = f"a key must have at least {LEAST_KEY_CHARS} characters" if len(key) < LEAST_KEY_CHARS else None
    return key_problem(key) or short


def read_keys(path: Path) -> tuple[ApiKey, ...]:
    """The API keys in a file: a table for each in TOML, else one per line. Raises ConfigError."""
    text = read_text_file(path)
    keys = _read_key_tables(path, text) if path.suffix == ".toml" else _read_key_lines(path, text)
    if not keys:
        raise ConfigError(f"{path} contains no key")
    return keys


def _read_key_lines(path: Path, text: str) -> tuple[ApiKey, ...]:
    """Empty lines and comments (#) are skipped."""
    keys: dict[str, None] = {}
    for number, line in enumerate(map(str.strip, text.splitlines()), start=1):
        if not line or line.startswith("#"):
            continue
        if (problem := own_key_problem(line)) is not None:
            raise ConfigError(f"{path}, line {number}: {problem}")
        keys[line] = None
    return tuple(ApiKey((key,)) for key in keys)


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
    """`owners` has the name for each secret so far."""
    if not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", name) or KEY_DIGEST.fullmatch(name):
        return "a name has 1 to 64 letters, digits, dots, dashes and underscores, and is not 16 hexadecimal digits"
    if not table.secrets:
        return "it has neither key nor keys"
    for secret in table.secrets:
        if (problem := own_key_problem(secret)) is not None:
            return problem
        if owners.setdefault(secret, name) != name:
            return f"[{owners[secret]}] has the same key"
    return None


key_file_problem = problem_from(read_keys)


log = logging.getLogger("ingot.cache")

SECRET_BYTES: Final = 32
OTHERS_MAY_ACCESS: Final = stat.S_IRWXG | stat.S_IRWXO


class ArchiveKey:
    def __init__(self, path: Path) -> None:
        self._path = path

    def secret(self) -> bytes:
        """Read from the file, so not for an event loop. Raises Unavailable and logs what to do if that fails."""
        try:
            if not self._path.exists():
                self._make()
            return self._read()
        except OSError as error:
            log.error("the key for files of cached prefixes, %s: %s", self._path, error)
            raise Unavailable("The server cannot use its key for files of cached prefixes; see its log.") from error

    def _make(self) -> None:
        """Atomic; an existing file is not replaced."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=self._path.parent, prefix=".archive-key-")  # readable by this user only
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
                raise OSError("other users may read it; run chmod 600 on it, or delete it to get a new one")
            text = file.read(2 * SECRET_BYTES + 2).strip()
        if not re.fullmatch(rf"[0-9a-f]{{{2 * SECRET_BYTES}}}", text):
            raise OSError(f"it does not contain {2 * SECRET_BYTES} hexadecimal digits; delete it to get a new one")
        return bytes.fromhex(text)
