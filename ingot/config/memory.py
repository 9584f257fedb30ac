"""Amounts of memory as people write them."""

from __future__ import annotations

import re

from ingot.errors import ConfigError

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
UNITS |= {"KIB": KIB, "MIB": MIB, "GIB": GIB, "TIB": 1 << 40}


def memory_bytes(text: str, total: int) -> int:
    """What `12GB`, `800MiB` or `60%` means on a device with `total` bytes. Raises ConfigError."""
    match = re.fullmatch(r"\s*(\d{1,15}(?:\.\d{1,9})?)\s*(%|[KMGT]?i?B)\s*", text, re.IGNORECASE | re.ASCII)
    if match is None:
        raise ConfigError(f"{text!r} is no amount of memory; write it like 12GB, 800MiB or 60%")
    number, unit = float(match[1]), match[2].upper()
    amount = int(total * number / 100) if unit == "%" else int(number * UNITS[unit])
    if not 0 < amount <= total:
        raise ConfigError(f"{text} is {amount} bytes; the memory here is {total} bytes")
    return amount


def memory_problem(text: str) -> str | None:
    try:
        memory_bytes(text, 1 << 62)
    except ConfigError as error:
        return error.message
    return None
