"""What the benchmarks' flags hold, read and bounded."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from ingot.errors import ConfigError

URL: Final = "http://127.0.0.1:8000"
"""The server that is measured where none is named."""
MOST: Final = 1 << 20  # of anything that is counted here


def number(given: Mapping[str, Any], name: str, usual: int, low: int, high: int = MOST) -> int:
    """The flag of that name, or what is usual where it was not given. Raises ConfigError."""
    flag = "--" + name.replace("_", "-")
    return whole(flag, given[name], low, high) if name in given else usual


def whole(flag: str, text: str | int, low: int, high: int) -> int:
    try:
        value = int(text)
    except ValueError:
        raise ConfigError(f"{flag}: {text!r} is not a whole number") from None
    if not low <= value <= high:
        raise ConfigError(f"{flag}: {value} is not between {low} and {high}")
    return value


def timeout(given: Mapping[str, Any]) -> float:
    return float(number(given, "timeout", 600, low=1))


def require_folder(path: Path) -> None:
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"cannot write {path}: there is no folder {path.parent}")
