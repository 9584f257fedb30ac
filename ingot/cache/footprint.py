"""What live layer states cost, as numbers: known to the memory model without touching mlx."""

from __future__ import annotations

from dataclasses import dataclass

CAPACITY_STEP = 256
"""Reservations are whole steps of this many tokens."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes. A row is a sequence's states; a token is one position of it."""

    append: int  # per token of a row, all append layers
    windows: tuple[tuple[int, int], ...]  # (window, per token of a row) of each window layer
    recurrent: int  # per row
    largest_layer: int  # per token of a row, of the layer that takes most
    activation: int  # per token of a launch
    score: int  # per token of a launch and token before it, where attention is not fused
    logits: int  # per sampled row
    tile: int | None = None  # tokens of a launch whose scores exist at once; None: all of them


def rounded(tokens: int) -> int:
    return -(-tokens // CAPACITY_STEP) * CAPACITY_STEP


def window_capacity(window: int, widest: int, capacity: int) -> int:
    """Tokens a window state holds for rows of up to `capacity` tokens: what is visible, what one launch adds, and
    some slack so that forgetting is rare."""
    return min(capacity, rounded(window + widest + min(window, CAPACITY_STEP)))
