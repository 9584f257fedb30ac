"""Freeing unused memory. Only the thread that uses mlx may call this."""

from __future__ import annotations

import gc

import mlx.core as mx

from ingot.kernels.cpu import native


def release_unused_memory() -> int:
    """Free unreferenced objects and mlx's cache; returns the bytes that are left."""
    gc.collect()
    # Modules initialise random weights, which are never evaluated; the random state would refer to all of these draws.
    mx.eval(mx.random.state)
    mx.synchronize()
    _forget_native_weights()
    mx.clear_cache()
    return mx.get_active_memory()


def _forget_native_weights() -> None:
    """The native kernels release the last weights they used at the next call."""
    if native.available():
        native.linear(mx.zeros((1, 1)), native.plain_weights(mx.zeros((1, 1)), None))
