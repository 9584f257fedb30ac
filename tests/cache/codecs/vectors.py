"""Keys and queries for tests of codecs."""

from __future__ import annotations

import mlx.core as mx


def drawn(*shape: int, seed: int = 0) -> mx.array:
    """Numbers of a bell curve: their directions are spread evenly."""
    return mx.random.normal(shape, key=mx.random.key(seed))


def with_offsets(keys: mx.array, offset: float = 30.0, channels: int = 4) -> mx.array:
    """The same, with a large number added in a few channels of every key, as biases do."""
    size = keys.shape[-1]
    shifted = [offset if channel % (size // channels) == 0 else 0.0 for channel in range(size)]
    return keys + mx.array(shifted)


def lost(x: mx.array, again: mx.array) -> float:
    """The mean square error, of the mean square."""
    return float(mx.mean((x - again) ** 2) / mx.mean(x * x))


def logit_error(keys: mx.array, again: mx.array, seed: int = 9) -> float:
    """How far off the products with queries are, of how far the products of a query with different keys spread."""
    queries = drawn(*keys.shape[:2], 64, keys.shape[-1], seed=seed)
    logits, others = (queries @ each.swapaxes(-1, -2) for each in (keys, again))
    # What is added to all logits of a query alike is nothing to softmax.
    off = others - logits
    off = off - off.mean(axis=-1, keepdims=True)
    spread = logits - logits.mean(axis=-1, keepdims=True)
    return float(mx.sqrt(mx.mean(off * off) / mx.mean(spread * spread)))
