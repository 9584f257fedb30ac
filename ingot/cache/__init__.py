# Before any module of this package imports mlx, which binds its BLAS on import.
from ingot.kernels.cpu import fastblas

fastblas.install()
