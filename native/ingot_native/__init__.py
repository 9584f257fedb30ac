"""MLX operations for Linux CPUs, in C++."""

import mlx.core  # the extension shares its array type

from ingot_native import built_for

if mlx.core.__version__ != built_for.MLX:
    raise ImportError(f"ingot_native was built for mlx {built_for.MLX}, and this is {mlx.core.__version__}")

from ingot_native._native import (
    Attention,
    Convolution,
    Gate,
    GatedDelta,
    Rotation,
    Scan,
    Stack,
    Weights,
    draw,
    gated,
    gather,
    gather_gated,
    instruction_set,
    layer_norm,
    linear,
    lookup,
    narrow,
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
    "draw",
    "gated",
    "gather",
    "gather_gated",
    "instruction_set",
    "layer_norm",
    "linear",
    "lookup",
    "narrow",
    "rms_norm",
    "threads",
    "use_blas",
    "use_one_path",
    "wide",
]
