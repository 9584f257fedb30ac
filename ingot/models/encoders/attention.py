"""Attention of every token to every other, or to those near it, in tiles whose scores take bounded memory."""

from __future__ import annotations

import mlx.core as mx

TILE_BYTES = 32 << 20
"""Scores of one tile at most; they and their softmax are alive together."""
UNSEEN = -1e9
"""Added to the scores of padding. Finite: a row of padding that sees nothing must not become NaN and spread."""


def attend(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    *,
    seen: mx.array | None,
    reach: int | None = None,
    bias: mx.array | None = None,
) -> mx.array:
    """Attention over [rows, heads, width, size].

    `seen` [rows, width] is False at padding; None where there is none. With `reach` a token sees only tokens at most
    that far from it. `bias` [heads, 2 * width - 1] is added to scores by the key's distance from the query, from
    1 - width on.
    """
    rows, heads, width, size = queries.shape
    scale = size**-0.5
    tile = max(1, min(width, TILE_BYTES // (4 * rows * heads * width)))
    if reach is not None:
        tile = min(width, max(tile, reach))
    pieces = []
    for begin in range(0, width, tile):
        end = min(width, begin + tile)
        low, high = (0, width) if reach is None else (max(0, begin - reach), min(width, end + reach))
        mask = _mask(queries.dtype, seen, (begin, end), (low, high), reach)
        if bias is not None:
            apart = mx.arange(low, high)[None, :] - mx.arange(begin, end)[:, None] + width - 1
            near = bias[:, apart].astype(queries.dtype)
            mask = near if mask is None else mask + near
        pieces.append(
            mx.fast.scaled_dot_product_attention(
                queries[:, :, begin:end], keys[:, :, low:high], values[:, :, low:high], scale=scale, mask=mask
            )
        )
    return pieces[0] if len(pieces) == 1 else mx.concatenate(pieces, axis=2)


def _mask(
    dtype: mx.Dtype, seen: mx.array | None, at: tuple[int, int], to: tuple[int, int], reach: int | None
) -> mx.array | None:
    """What is added to the scores of the queries `at` for the keys `to`; None where all of them are seen."""
    allowed = None if seen is None else seen[:, None, None, to[0] : to[1]]
    if reach is not None and max(at[1] - 1 - to[0], to[1] - 1 - at[0]) > reach:
        near = mx.abs(mx.arange(*at)[:, None] - mx.arange(*to)[None, :]) <= reach
        allowed = near[None, None] if allowed is None else mx.logical_and(allowed, near)
    if allowed is None:
        return None
    return mx.where(allowed, mx.array(0.0, dtype=dtype), mx.array(_lowest(dtype), dtype=dtype))


def _lowest(dtype: mx.Dtype) -> float:
    return UNSEEN if dtype != mx.float16 else -6e4


def heads_of(x: mx.array, heads: int) -> mx.array:
    """[rows, width, heads * size] as [rows, heads, width, size]."""
    rows, width, _ = x.shape
    return x.reshape(rows, width, heads, -1).transpose(0, 2, 1, 3)


def merge_heads(x: mx.array) -> mx.array:
    """The reverse of `heads_of`."""
    rows, _, width, _ = x.shape
    return x.transpose(0, 2, 1, 3).reshape(rows, width, -1)
