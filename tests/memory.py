"""What arrays hold in this process, counted from a still moment."""

import gc

import mlx.core as mx


def settled() -> int:
    """The bytes held now, once nothing that earlier tests left can be freed meanwhile. The peak counts from here."""
    gc.collect()
    mx.clear_cache()
    mx.reset_peak_memory()
    return mx.get_active_memory()
