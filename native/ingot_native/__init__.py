"""MLX operations for Linux CPUs, in C++."""

import mlx.core  # noqa: F401  (the extension shares its array type)

from ingot_native._native import instruction_set, linear, threads, use_blas

__all__ = ["instruction_set", "linear", "threads", "use_blas"]
