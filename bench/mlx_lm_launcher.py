"""`python -m bench.mlx_lm_launcher FLAGS`: mlx_lm.server as it is, on the matrix product that ingot uses.

On Linux CPUs mlx comes with a reference BLAS that would decide every comparison. The exchange is made before mlx is
imported, by the same code and with the same number of threads as in ingot; elsewhere it does nothing.
"""

from __future__ import annotations

from ingot.kernels import fastblas


def main() -> None:
    fastblas.install()
    from mlx_lm.server import main as serve

    serve()


if __name__ == "__main__":
    main()
