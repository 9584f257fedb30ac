"""The C++ kernels for Linux CPUs, where they are there and wanted, and what is known of them."""

from __future__ import annotations

import importlib.util
import os
import sys
from functools import cache
from typing import Any

from ingot.kernels.cpu import fastblas
from ingot.kernels.device import acting_as
from ingot.kernels.remedy import remedy

INTERFACE = 5
"""Of `ingot_native`, as it numbers it; kernels of another one are left alone."""


@cache
def extension() -> Any:
    """The extension, with the fast BLAS made known to it, or None."""
    if importlib.util.find_spec("ingot_native") is None:
        return None
    try:
        import ingot_native
    except ImportError:  # built for another mlx
        return None
    if getattr(ingot_native, "INTERFACE", 1) != INTERFACE:
        return None
    address = fastblas.single_threaded_sgemm()
    if address is not None:
        ingot_native.use_blas(address)
    return ingot_native


def _unwanted() -> bool:
    """`mlx` leaves everything to mlx, `blas` all but its matrix product. GPUs have no use for kernels of CPUs."""
    return os.environ.get("INGOT_KERNELS") in ("mlx", "blas") or acting_as() is not None


def installed() -> bool:
    """Whether they are likely to be used here, told without importing them, and so mlx."""
    return sys.platform == "linux" and not _unwanted() and importlib.util.find_spec("ingot_native") is not None


def available() -> bool:
    return not _unwanted() and extension() is not None


def advice() -> str | None:
    """What would make this faster; None when there is nothing to do."""
    if available() or sys.platform != "linux" or _unwanted():
        return None
    if importlib.util.find_spec("ingot_native") is None:
        return f"no native kernels: {remedy()}"
    return f"the native kernels do not fit this mlx, or this ingot: {remedy()}"


def describe() -> str | None:
    """The instruction sets and the threads in use, such as "avx512vnni and amx, 2 threads"; None without them."""
    if not available():
        return None
    native = extension()
    sets = [name for name in (native.instruction_set(), native.wide()) if name]
    return f"{' and '.join(sets)}, {native.threads()} threads"


def use_one_path(one: bool = True) -> None:
    """Compute a row the same way however many there are, or else the fastest way for so many."""
    if (native := extension()) is not None:
        native.use_one_path(one)


def has_wide() -> bool:
    """Whether many rows at once are multiplied by instructions of their own, as bfloat16."""
    return available() and extension().wide() is not None


def has_narrow() -> bool:
    """Whether many queries at once attend in numbers of 16 bits."""
    return available() and bool(extension().narrow())
