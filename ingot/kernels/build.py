"""`python -m ingot.kernels.build`: compiles ingot-native, the kernels and the BLAS bridge, in a clone on a Linux CPU.

Never fails a set-up: without a compiler everything still works, slower, and `ingot doctor` says so.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys

from ingot.kernels.remedy import NATIVE, TOOLS, remedy


def build() -> str:
    """Compile and install ingot-native; returns one line that says what happened."""
    if not NATIVE.is_dir():
        return f"kernels: no sources here; {remedy()}"
    missing = [name for name in TOOLS if shutil.which(name) is None]
    if missing:
        return f"kernels: no {' and no '.join(missing)}; mlx keeps its own (slow). To change that, {remedy()}."
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-build-isolation", "--no-deps", str(NATIVE)]
    environment = {"CMAKE_BUILD_PARALLEL_LEVEL": str(os.cpu_count() or 1), **os.environ}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode != 0:
        return f"kernels: they could not be built; mlx keeps its own (slow).\n{done.stderr.strip()[-2000:]}"
    return "kernels: built"


def _installed(distribution: str) -> bool:
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


if __name__ == "__main__":
    if sys.platform == "linux" and _installed("mlx-cpu"):
        print(build())
    else:
        print("kernels: nothing to build here")
