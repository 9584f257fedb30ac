"""What one forward pass of an encoder computes: texts as rows of tokens, padded on the right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx


@dataclass(frozen=True)
class PaddedTexts:
    tokens: mx.array  # [rows, width]
    types: mx.array  # [rows, width]: 0 for the first text of a pair, 1 for the second
    lengths: mx.array  # [rows]
    seen: mx.array | None  # [rows, width], False at padding; None where no row is padded

    @classmethod
    def of(cls, tokens: Sequence[Sequence[int]], types: Sequence[Sequence[int]], pad: int) -> PaddedTexts:
        """`types[i]` may be empty, which is all zeros."""
        lengths = [len(row) for row in tokens]
        width = max(lengths)
        ragged = min(lengths) < width
        counts = mx.array(lengths)
        return cls(
            mx.array([[*row, *[pad] * (width - len(row))] for row in tokens], dtype=mx.int32),
            mx.array([[*row, *[0] * (width - len(row))] for row in types], dtype=mx.int32),
            counts,
            mx.arange(width)[None] < counts[:, None] if ragged else None,
        )

    @property
    def width(self) -> int:
        return self.tokens.shape[1]

    def weights(self) -> mx.array:
        """[rows, width, 1]: 1 at a token, 0 at padding."""
        real = mx.arange(self.width)[None] < self.lengths[:, None]
        return real[..., None].astype(mx.float32)
