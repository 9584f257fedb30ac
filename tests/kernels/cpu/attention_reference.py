"""Ragged attention in float64, and sequences that are computed piece by piece."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from ingot.kernels.cpu import native
from tests.kernels.cpu.paging import Rows, empty

EPS = 1e-5


@dataclass
class Reference:
    """The same attention in float64, one sequence at a time."""

    heads: int
    kv_heads: int
    size: int
    dims: int = 0
    neighbours: bool = False
    window: int = 0
    cap: float | None = None
    sunk: bool = False
    norm: str | None = None
    gated: bool = False
    halves: bool = False
    positions: np.ndarray | None = None

    def __post_init__(self) -> None:
        dice = np.random.default_rng(self.size)
        self.sinks = dice.standard_normal(self.heads).astype(np.float32)
        self.angles = (100.0 ** (-np.arange(0, self.dims, 2) / max(self.dims, 1))).astype(np.float32)
        long = self.norm in ("whole", "centred")
        self.weights = [
            1 + dice.standard_normal(heads * self.size if long else self.size).astype(np.float32) / 4
            for heads in (self.heads, self.kv_heads)
        ]

    def native(self) -> native.NativeAttention:
        norms: list[Any] = [None, None]
        if self.norm is not None:
            norms = [(mx.array(w), EPS, self.norm == "whole", self.norm == "centred") for w in self.weights]
        return native.NativeAttention(
            heads=self.heads,
            kv_heads=self.kv_heads,
            size=self.size,
            scale=self.size**-0.5,
            cap=self.cap,
            sinks=mx.array(self.sinks) if self.sunk else None,
            norms=(norms[0], norms[1]),
            rotation=native.rope_rotation(mx.array(self.angles), dims=self.dims, neighbours=self.neighbours, gain=1.25)
            if self.dims
            else None,
            gated=self.gated,
        )

    def states(self, pages: int, page: int) -> tuple[mx.array, mx.array]:
        return empty(pages, self.kv_heads, page, self.size, mx.float16 if self.halves else mx.float32)

    def __call__(self, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        """Queries may be those of the last tokens alone."""
        count, tokens = len(q), len(k)
        q, k, v = (x.astype(np.float64) for x in (q, k, v))
        q = q.reshape(count, self.heads, -1)
        q, gate = q[..., : self.size], q[..., self.size :]
        k, v = (x.reshape(tokens, self.kv_heads, self.size) for x in (k, v))
        if self.norm is not None:
            q, k = (self._normed(x, w.astype(np.float64)) for x, w in zip((q, k), self.weights, strict=True))
        q, k = (self._turned(x, tokens) for x in (q, k))
        if self.halves:
            k, v = (x.astype(np.float16).astype(np.float64) for x in (k, v))
        out = np.empty((count, self.heads, self.size))
        behind = np.arange(tokens - count, tokens)[:, None] - np.arange(tokens)
        hidden = (behind < 0) | ((behind >= self.window) if self.window else False)
        for head in range(self.heads):
            own = head * self.kv_heads // self.heads
            scores = q[:, head] @ k[:, own].T * self.size**-0.5
            if self.cap is not None:
                scores = self.cap * np.tanh(scores / self.cap)
            scores[hidden] = -np.inf
            sink = np.full((count, 1), self.sinks[head] if self.sunk else -np.inf)
            most = np.maximum(scores.max(axis=1, keepdims=True), sink)
            weights, rest = np.exp(scores - most), np.exp(sink - most)
            out[:, head] = weights / (weights.sum(axis=1, keepdims=True) + rest) @ v[:, own]
        if self.gated:
            out = out / (1 + np.exp(-gate))
        return out.reshape(count, -1)

    def _normed(self, x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        shaped = x.reshape(len(x), -1) if self.norm == "whole" else x
        if self.norm == "centred":
            shaped = shaped - shaped.mean(axis=-1, keepdims=True)
            weight = weight.reshape(x.shape[1:])
        return (shaped / np.sqrt((shaped**2).mean(axis=-1, keepdims=True) + EPS) * weight).reshape(x.shape)

    def _turned(self, x: np.ndarray, tokens: int) -> np.ndarray:
        if not self.dims:
            return x
        positions = np.arange(tokens) if self.positions is None else self.positions
        angles = positions[-len(x) :, None, None] * self.angles.astype(np.float64)
        half = self.dims // 2
        first = slice(0, self.dims, 2) if self.neighbours else slice(0, half)
        second = slice(1, self.dims, 2) if self.neighbours else slice(half, self.dims)
        out = x.copy()
        out[..., first] = 1.25 * (x[..., first] * np.cos(angles) - x[..., second] * np.sin(angles))
        out[..., second] = 1.25 * (x[..., first] * np.sin(angles) + x[..., second] * np.cos(angles))
        return out


@dataclass
class Row:
    """A sequence that is computed piece by piece, which forgets what a window no longer shows."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    done: int = 0


def made_rows(reference: Reference, lengths: Sequence[int], seed: int) -> list[Row]:
    dice = np.random.default_rng(seed)
    width, kv_width = reference.heads * reference.size, reference.kv_heads * reference.size
    widths = (width * (2 if reference.gated else 1), kv_width, kv_width)
    return [Row(*(dice.standard_normal((n, w)).astype(np.float32) for w in widths)) for n in lengths]


def in_pieces(
    reference: Reference, rows: list[Row], launches: Sequence[Sequence[int]], page: int = 64, seed: int = 0
) -> list[np.ndarray]:
    """What the operation gives for each row; a launch says how many tokens of each row it computes."""
    operation = reference.native()
    tables = Rows(len(rows), max(len(row.q) for row in rows), page, seed=seed)
    keys, values = reference.states(tables.count, page)
    outputs: list[list[np.ndarray]] = [[] for _ in rows]
    for counts in launches:
        spans, parts, first = [], [], 0
        for slot, (row, count) in enumerate(zip(rows, counts, strict=True)):
            if not count:
                continue
            gone = tables.forget(slot, max(0, row.done + 1 - reference.window)) if reference.window else []
            if gone:
                for state in (keys, values):
                    state[mx.array(gone)] = float("nan")
            spans.append((first, int(count), slot, row.done))
            parts.append([x[row.done : row.done + count] for x in (row.q, row.k, row.v)])
            first += int(count)
            row.done += int(count)
        if not spans:
            continue
        given: list[mx.array] = [mx.array(np.concatenate(part)) for part in zip(*parts, strict=True)]
        attended, keys, values = operation(
            given[0], given[1], given[2], keys, values, tables.spans(spans), reference.window
        )
        for begin, count, slot, _ in spans:
            outputs[slot].append(np.array(attended)[begin : begin + count])
    return [np.concatenate(output) if output else np.empty(0) for output in outputs]
