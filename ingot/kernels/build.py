"""`python -m ingot.kernels.build`: compiles the small BLAS bridge where Linux has a C compiler.

Never fails a set-up: without a compiler everything still works, slower, and `ingot doctor` says so.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).with_name("fastblas.c")
LIBRARY = Path(__file__).with_name("_fastblas.so")


def compiler() -> str | None:
    return next(
        (found for name in (os.environ.get("CC"), "cc", "gcc", "clang") if name and (found := shutil.which(name))), None
    )


def build() -> str:
    """Compile the bridge; returns one line that says what happened."""
    if sys.platform != "linux":
        return "kernels: nothing to build on this platform"
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


if __name__ == "__main__":
    print(build())
