"""MLX operations for Linux CPUs, in C++."""

import mlx.core  # noqa: F401  (the extension shares its array type)

from ingot_native._native import (
    Attention,
    Convolution,
    Gate,
    GatedDelta,
    Rotation,
    Scan,
    Stack,
    Weights,
    gated,
    instruction_set,
    layer_norm,
    linear,
    lookup,
    rms_norm,
    threads,
    use_blas,
    use_one_path,
    wide,
)

__all__ = [
    "Attention",
    "Convolution",
    "Gate",
    "GatedDelta",
    "Rotation",
    "Scan",
    "Stack",
    "Weights",
    "gated",
    "instruction_set",
    "layer_norm",
    "linear",
    "lookup",
    "rms_norm",
    "threads",
    "use_blas",
    "use_one_path",
    "wide",
]
