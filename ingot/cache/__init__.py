# Before any module of this package imports mlx, which binds its BLAS then.
from ingot.kernels import fastblas

fastblas.install()
