"""States in pages for tests of kernels: rows whose pages lie scattered among others'."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from ingot.kernels.cpu import native


def empty(pages: int, kv_heads: int, page: int, size: int, dtype: mx.Dtype = mx.float32) -> tuple[mx.array, mx.array]:
    """Keys and values that hold anything: what was never written must not be read."""
    anything = mx.full((pages, kv_heads, page, size), float("nan"), dtype)
    return anything, anything + 0


class Rows:
    """The tables of some rows, each of at most so many tokens, with pages in no order at all."""

    def __init__(self, rows: int, capacity: int, page: int = 64, *, seed: int = 0, spare: int = 0) -> None:
        each = -(-capacity // page)
        self.page, self.count = page, rows * each + spare
        shuffled = np.random.default_rng(seed).permutation(self.count).astype(np.int32)
        self.pages = [[int(p) for p in shuffled[row * each : (row + 1) * each]] for row in range(rows)]
        self.spare = [int(p) for p in shuffled[rows * each :]]
        self.forgotten = [0] * rows

    def forget(self, row: int, until: int) -> list[int]:
        """Let go of the row's pages whose places are all before `until`; gives their numbers."""
        gone = until // self.page - self.forgotten[row]
        pages, self.pages[row] = self.pages[row][:gone], self.pages[row][gone:]
        self.forgotten[row] += len(pages)
        return pages

    def tables(self) -> list[tuple[int, array[int]]]:
        return [(first, array("i", pages)) for first, pages in zip(self.forgotten, self.pages, strict=True)]

    def spans(self, spans: Sequence[tuple[int, int, int, int]], positions: Sequence[int] | None = None) -> Any:
        """Of (first token, tokens, row, place of the first), whose positions are their places unless told."""
        told = None if positions is None else array("i", positions)
        return native.attention_spans([(*span, span[-1]) for span in spans], self.tables(), told)

    def dense(self, state: mx.array, row: int, tokens: int) -> np.ndarray:
        """The row's tokens [kv_heads, tokens, size], of which none were forgotten."""
        return np.concatenate(np.array(state)[self.pages[row]], axis=1)[:, :tokens]
