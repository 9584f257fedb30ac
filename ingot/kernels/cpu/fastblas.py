"""Gives mlx's Linux CPU build a fast matrix product in place of its reference BLAS.

`install()` must run before the first import of mlx in the process, since that import binds `cblas_sgemm`. Also here, as
both need it: what can be done where kernels are missing.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
from pathlib import Path

from ingot.extras import install_command

_installed: ctypes.CDLL | None = None
_fast: ctypes.CDLL | None = None


def install() -> bool:
    """Load the bridge if it is wanted, built and in time; True when mlx uses it. Calling again is harmless."""
    global _installed, _fast
    if _installed is not None:
        return True
    found = libraries()
    if found is None or "mlx.core" in sys.modules:
        return False
    openblas, library = found
    fast = ctypes.CDLL(str(openblas))
    fast.scipy_openblas_set_num_threads(_threads())
    bridge = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    bridge.ingot_blas_use.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
    bridge.ingot_blas_use(
        ctypes.cast(fast.scipy_cblas_sgemm, ctypes.c_void_p), ctypes.cast(fast.scipy_cblas_sgemv, ctypes.c_void_p)
    )
    _installed, _fast = bridge, fast
    return True


def libraries() -> tuple[Path, Path] | None:
    """The fast BLAS and the bridge to it, where both are installed and wanted."""
    openblas, library = _openblas(), _bridge()
    return None if _unwanted() or openblas is None or library is None else (openblas, library)


def _threads() -> int:
    """Threads of one product. They spin while they wait for each other, and where they outnumber the cores that are
    really free, everything is many times slower: so each product takes one; the native kernels share out the work."""
    return int(os.environ.get("OPENBLAS_NUM_THREADS", "1"))


def single_threaded_sgemm() -> int | None:
    """The address of a cblas_sgemm that uses one thread a call, if there is one."""
    if _fast is None or _threads() != 1:
        return None
    return ctypes.cast(_fast.scipy_cblas_sgemm, ctypes.c_void_p).value


def advice() -> str | None:
    """Why the bridge is not in use and what to do about it; None when it is, or is not needed here."""
    if _installed is not None or sys.platform != "linux":
        return None
    if _unwanted():
        return "INGOT_KERNELS=mlx: mlx's reference BLAS is used (slow)"
    if _openblas() is None:
        return f"no fast BLAS: {install_command(['scipy-openblas32>=0.3.28,<0.4'])}"
    if _bridge() is None:
        return f"no BLAS bridge: {missing_kernels_advice()}"
    return "mlx was imported before ingot: its reference BLAS is used (slow)"


def _unwanted() -> bool:
    return sys.platform != "linux" or os.environ.get("INGOT_KERNELS") == "mlx"


def _openblas() -> Path | None:
    return _file_of("scipy_openblas32", "lib/libscipy_openblas.so")


def _bridge() -> Path | None:
    """In ingot_native, which must not be imported for it: that imports mlx."""
    return _file_of("ingot_native", "_fastblas.so")


def _file_of(package: str, name: str) -> Path | None:
    """A file of an installed package, without importing it; None where there is no such package or file."""
    found = importlib.util.find_spec(package)
    if found is None or found.origin is None:
        return None
    file = Path(found.origin).parent / name
    return file if file.exists() else None


NATIVE_SOURCES = Path(__file__).parents[3] / "native"
BUILD_TOOLS = ("gcc", "g++", "cmake")


def missing_kernels_advice() -> str:
    """What to do where the kernels are missing, or were built for another mlx."""
    if NATIVE_SOURCES.is_dir():
        return f"install {', '.join(BUILD_TOOLS[:-1])} and {BUILD_TOOLS[-1]}, then run python -m ingot.kernels.build"
    return "install ingot again, with the extra [cpu]"
