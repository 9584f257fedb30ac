"""What arrays hold in this process, counted from a still moment."""

import gc

import mlx.core as mx
import pytest

from ingot.kernels.device import GPUS, acting_as, current_device

REAL_GPU = acting_as() is None and current_device().kind in GPUS

freed_at_once = pytest.mark.skipif(
    REAL_GPU, reason="what a GPU's commands have used is free only when they are done, which small peaks consist of"
)
pretended = pytest.mark.skipif(REAL_GPU, reason="what a CPU does that acts as a GPU, or by its own rules")


def settled() -> int:
    """The bytes held now, once nothing that earlier tests left can be freed meanwhile. The peak counts from here."""
    gc.collect()
    mx.clear_cache()
    mx.reset_peak_memory()
    return mx.get_active_memory()
