# Before any module of this package imports mlx, which binds its BLAS then.
from ingot.kernels.cpu import fastblas

fastblas.install()
