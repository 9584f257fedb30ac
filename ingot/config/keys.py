"""API keys: what one is made of, and files of them."""

from __future__ import annotations

import re
from pathlib import Path

from ingot.errors import ConfigError

LEAST_KEY_CHARS = 8  # fewer are soon guessed


def key_problem(key: str) -> str | None:
    return None if re.fullmatch(r"[!-~]+", key) else "a key is made of visible ASCII characters, without spaces"


def own_key_problem(key: str) -> str | None:
    """What is wrong with a key that this server is to ask for. Other servers' may be as short as those like."""
    short = f"a key has at least {LEAST_KEY_CHARS} characters" if len(key) < LEAST_KEY_CHARS else None
    return key_problem(key) or short


def read_keys(path: Path) -> tuple[str, ...]:
    """The API keys in a file: one a line; empty lines and those that begin with # are none. Raises ConfigError."""
    try:
        lines = path.expanduser().read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except ValueError:
        raise ConfigError(f"{path} is not UTF-8 text") from None
    found = {number: line.strip() for number, line in enumerate(lines, start=1)}
    keys = {number: line for number, line in found.items() if line and not line.startswith("#")}
    for number, key in keys.items():
        if (problem := own_key_problem(key)) is not None:
            raise ConfigError(f"{path}, line {number}: {problem}")
    if not keys:
        raise ConfigError(f"{path} holds no key")
    return tuple(dict.fromkeys(keys.values()))


def key_file_problem(path: Path) -> str | None:
    try:
        read_keys(path)
    except ConfigError as error:
        return error.message
    return None
