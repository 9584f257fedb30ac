"""MLX operations for Linux CPUs, in C++."""

import mlx.core  # noqa: F401  (the extension shares its array type)

from ingot_native._native import (
    Stack,
    Weights,
    draw,
    gather,
    gather_gated,
    instruction_set,
    linear,
    lookup,
    threads,
    use_blas,
    use_one_path,
)

__all__ = [
    "Stack",
    "Weights",
    "draw",
    "gather",
    "gather_gated",
    "instruction_set",
    "linear",
    "lookup",
    "threads",
    "use_blas",
    "use_one_path",
]
