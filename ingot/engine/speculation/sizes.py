"""Sizes of rounds that are taken together: devices' own steps are as wide."""

from __future__ import annotations


def size_of(tokens: int) -> int:
    """Numbers them: 0, 1, 2, 3, 4, 5-6, 7-8, 9-12, 13-16, 17-24, 25-32, ..."""
    if tokens <= 4:
        return tokens
    doublings = (tokens - 1).bit_length() - 1
    return 2 * doublings + ((tokens - 1) >> (doublings - 1)) - 1
