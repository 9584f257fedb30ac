"""Which of its sequence's tokens each token of a launch sees, where attention does not know it by itself."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx


def visible(starts: Sequence[int], firsts: Sequence[int], width: int, end: int, window: int | None) -> mx.array:
    """[rows, 1, width, end]: True where a token may see a key. Key j of row i stands at place firsts[i] + j.

    Rows that see the same share one, as some models can only broadcast a mask without rows.
    """
    if len(set(zip(starts, firsts, strict=True))) == 1:
        starts, firsts = starts[:1], firsts[:1]
    token = (mx.array(list(starts))[:, None] + mx.arange(width))[:, None, :, None]
    key = (mx.array(list(firsts))[:, None] + mx.arange(end))[:, None, None, :]
    mask = key <= token
    return mask if window is None else mask & (key > token - window)


def mutually_visible(start: int, first: int, width: int, end: int, window: int | None) -> mx.array | None:
    """[1, 1, width, end]: the same for the last `width` tokens, from place `start` on, which also see those behind
    themselves; None: each of them sees every key."""
    if window is None or end <= window:
        return None
    token, key = mx.arange(start, start + width)[:, None], first + mx.arange(end)
    return (key > token - window)[None, None]
