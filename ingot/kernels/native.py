"""The door to `ingot_native`, the C++ kernels for Linux CPUs. Without them everything works, slower."""

from __future__ import annotations

import importlib.util
import os
import sys
from functools import cache
from typing import TYPE_CHECKING, Any

from ingot.kernels import fastblas

if TYPE_CHECKING:
    import mlx.core as mx

BITS = (4, 8)
GROUPS = (32, 64, 128)


@cache
def _loaded() -> Any:
    """The extension, with the fast BLAS made known to it, or None."""
    if os.environ.get("INGOT_KERNELS") == "mlx" or importlib.util.find_spec("ingot_native") is None:
        return None
    try:
        import ingot_native
    except ImportError:  # built for another mlx
        return None
    address = fastblas.single_threaded_sgemm()
    if address is not None:
        ingot_native.use_blas(address)
    return ingot_native


def available() -> bool:
    return _loaded() is not None


def advice() -> str | None:
    """What would make this faster; None when there is nothing to do."""
    if available() or sys.platform != "linux" or os.environ.get("INGOT_KERNELS") == "mlx":
        return None
    if importlib.util.find_spec("ingot_native") is None:
        return "no native kernels: install g++ and cmake, then run python -m ingot.kernels.build"
    return "the native kernels do not fit this mlx: run python -m ingot.kernels.build"


def describe() -> str | None:
    """The instruction set and the threads in use, such as "dotprod, 2 threads"; None without the extension."""
    native = _loaded()
    return None if native is None else f"{native.instruction_set()}, {native.threads()} threads"


def covers(*, bits: int, group_size: int, mode: str) -> bool:
    """Whether a packed layer of this form can be multiplied as it is."""
    return available() and mode == "affine" and bits in BITS and group_size in GROUPS


def linear(
    x: mx.array, quanta: mx.array, scales: mx.array, biases: mx.array | None, group_size: int, bits: int
) -> mx.array:
    """x times the transpose of a packed matrix. Only where `covers`."""
    product: mx.array = _loaded().linear(x, quanta, scales, biases, group_size=group_size, bits=bits)
    return product
