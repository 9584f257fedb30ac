"""`python -m ingot.cli.probe_mlx`: what mlx is and does here, as one JSON object on stdout.

A process of its own, so that `doctor` survives an mlx that cannot be loaded, and never loads it itself.
"""

from __future__ import annotations

import importlib.metadata
import json
import time

SIDE = 512


def probe() -> dict[str, object]:
    from ingot.kernels import device, fastblas, native

    fast = fastblas.install()  # before mlx, which binds its BLAS when it is loaded
    here = device.current()
    return {
        "version": importlib.metadata.version("mlx"),
        "kind": here.kind,
        "name": here.name,
        "memory": here.memory,
        "gflops": _gflops(),
        "fast_blas": fast,
        "blas_advice": fastblas.advice() if here.kind == "cpu" else None,
        "native": native.describe() if here.kind == "cpu" else None,
        "native_advice": native.advice() if here.kind == "cpu" else None,
    }


def _gflops() -> float:
    """Of a float32 matrix product, the second one, as the first may wake things up."""
    import mlx.core as mx

    left, right = mx.random.normal((SIDE, SIDE)), mx.random.normal((SIDE, SIDE))
    mx.eval(left, right, left @ right)
    started = time.perf_counter()
    mx.eval(left @ right)
    return 2 * SIDE**3 / (time.perf_counter() - started) / 1e9


if __name__ == "__main__":
    print(json.dumps(probe()))
