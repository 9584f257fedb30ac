"""Kernels for Linux CPUs: the native extension and a fast BLAS for mlx."""
