"""What is swapped in the modules of a tower that a processor runs: norms, GELUs and the gates of MLPs."""

from __future__ import annotations

from typing import Final

import mlx.nn as nn

from ingot.kernels import native
from ingot.models.families.description import MLPWiring
from ingot.models.layers.activations import swap_gelus
from ingot.models.layers.mlp import swap_gates
from ingot.models.layers.norms import swap_norms

_GATED: Final = ("gate_proj", "up_proj", "down_proj")


def swap_parts(part: nn.Module) -> None:
    """Once its weights are settled."""
    swap_gates(part, _gating)
    if native.available():
        swap_gelus(part)
        swap_norms(part)


def _gating(module: nn.Module) -> MLPWiring | None:
    """mlx-vlm's towers have gates of one kind, in classes that are all called MLP."""
    return MLPWiring() if type(module).__name__ == "MLP" and all(name in module for name in _GATED) else None
