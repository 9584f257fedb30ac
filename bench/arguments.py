"""What several benchmarks read from their command lines."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence


def words(known: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    """For argparse: names with commas between them, each of them known."""

    def read(text: str) -> tuple[str, ...]:
        names = tuple(text.split(","))
        if unknown := [name for name in names if name not in known]:
            raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(known)}")
        return names

    return read


def numbers(text: str) -> tuple[int, ...]:
    """For argparse: whole numbers with commas between them."""
    found = tuple(int(part) for part in text.split(","))
    if min(found) < 1:
        raise argparse.ArgumentTypeError(f"{min(found)} is less than 1")
    return found
