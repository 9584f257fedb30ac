"""Numbers in words: one function, whoever says them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ingot.quantities import counted, format_bytes


def test_one_is_in_the_singular() -> None:
    assert [counted(count, "token") for count in (0, 1, 2)] == ["0 tokens", "1 token", "2 tokens"]
    assert [counted(count, "prefix", "prefixes") for count in (1, 3)] == ["1 prefix", "3 prefixes"]


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (98_400_000, "98.4 MB"),
        (999_600_000, "1.0 GB"),
        (10**14, "100000 GB"),
    ],
)
def test_bytes_are_in_the_unit_that_shows_them(count: int, text: str) -> None:
    assert format_bytes(count) == text


def test_no_command_writes_sizes_in_a_unit_of_its_own() -> None:
    """`0.0 GB` says nothing."""
    commands = Path(__file__).parent.parent / "ingot" / "cli"
    found = [
        f"{file.name}: {line.strip()}"
        for file in commands.glob("*.py")
        for line in file.read_text().splitlines()
        if re.search(r":\.\df\} ?(?:GB|GiB|MB|kB)", line)
    ]
    assert found == []
