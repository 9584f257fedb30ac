"""`python -m ingot.kernels.build`: compiles the native kernels and the BLAS bridge where Linux has a compiler.

Never fails a set-up: without a compiler everything still works, slower, and `ingot doctor` says so.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).with_name("fastblas.c")
LIBRARY = Path(__file__).with_name("_fastblas.so")
NATIVE = Path(__file__).parents[2] / "native"


def compiler() -> str | None:
    return next(
        (found for name in (os.environ.get("CC"), "cc", "gcc", "clang") if name and (found := shutil.which(name))), None
    )


def build_bridge() -> str:
    """Compile the bridge; returns one line that says what happened."""
    cc = compiler()
    if cc is None:
        return "kernels: no C compiler; mlx keeps its reference BLAS (slow). Install gcc and run this again."
    scratch = LIBRARY.with_suffix(f".{os.getpid()}.tmp")
    command = [cc, "-O2", "-Wall", "-shared", "-fPIC", str(SOURCE), "-o", str(scratch)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        scratch.unlink(missing_ok=True)
        return f"kernels: {cc} failed; mlx keeps its reference BLAS (slow).\n{done.stderr.strip()}"
    scratch.replace(LIBRARY)
    return "kernels: BLAS bridge built"


def build_native() -> str:
    """Compile and install the native kernels; returns one line that says what happened."""
    if not NATIVE.is_dir():
        return "kernels: no sources of the native kernels here; pip install ingot-native"
    missing = [name for name in ("g++", "cmake") if shutil.which(name) is None]
    if missing:
        return f"kernels: no {' and no '.join(missing)}; packed weights are unpacked (slower, and more memory)"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-build-isolation", "--no-deps", str(NATIVE)]
    environment = {"CMAKE_BUILD_PARALLEL_LEVEL": str(os.cpu_count() or 1), **os.environ}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode != 0:
        reason = done.stderr.strip()[-2000:]
        return f"kernels: the native kernels could not be built; packed weights are unpacked.\n{reason}"
    return "kernels: native kernels built"


def _installed(distribution: str) -> bool:
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


if __name__ == "__main__":
    if sys.platform == "linux" and _installed("mlx-cpu"):
        print(build_bridge(), flush=True)
        print(build_native())
    else:
        print("kernels: nothing to build here")
