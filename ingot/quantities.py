"""Numbers in words for people: `1 token`, `98.4 MB`."""

from __future__ import annotations


def counted(count: int, noun: str, plural: str = "") -> str:
    """The count and the noun, in the singular for one."""
    return f"{count} {noun if count == 1 else plural or noun + 's'}"


def format_bytes(count: int) -> str:
    if count < 1000:
        return f"{count} B"
    value = float(count)
    for unit in ("kB", "MB", "GB"):
        value /= 1000
        if value < 999.5 or unit == "GB":
            break
    return f"{value:.1f} {unit}" if value < 99.95 else f"{value:.0f} {unit}"
