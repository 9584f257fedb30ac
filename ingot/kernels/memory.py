"""Memory that nobody needs any more. Only the thread that uses mlx may ask for it."""

from __future__ import annotations

import gc

import mlx.core as mx

from ingot.kernels.cpu import native


def release_unused_memory() -> int:
    """Free what nobody refers to, and what mlx keeps for later; returns the bytes that are left."""
    gc.collect()
    # Modules draw their first weights when they are made. Nobody computes those, but what is drawn from next would
    # refer to every draw before it.
    mx.eval(mx.random.state)
    mx.synchronize()
    _forget_native_weights()
    mx.clear_cache()
    return mx.get_active_memory()


def _forget_native_weights() -> None:
    """The native kernels let go of the weights that they multiplied by last at the next call."""
    if native.available():
        native.linear(mx.zeros((1, 1)), native.plain_weights(mx.zeros((1, 1)), None))
