"""`python -m ingot.kernels.build`: compiles what this machine needs compiled, in a clone on Linux: ingot-native, the
kernels and the BLAS bridge, for CPUs, and the extension that launches graphs for CUDA.

Never fails a set-up: without a compiler everything still works, slower, and `ingot doctor` says so.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys

from ingot.kernels.cpu.fastblas import BUILD_TOOLS, NATIVE_SOURCES, missing_kernels_advice


def build_native() -> str:
    """Compile and install ingot-native; returns one line that says what happened."""
    if not NATIVE_SOURCES.is_dir():
        return f"kernels: no sources here; {missing_kernels_advice()}"
    missing = [name for name in BUILD_TOOLS if shutil.which(name) is None]
    if missing:
        return (
            f"kernels: no {' and no '.join(missing)}; mlx keeps its own (slow). To change that, "
            f"{missing_kernels_advice()}."
        )
    options = ["--quiet", "--no-build-isolation", "--no-deps"]
    command = [sys.executable, "-m", "pip", "install", *options, str(NATIVE_SOURCES)]
    environment = {"CMAKE_BUILD_PARALLEL_LEVEL": str(os.cpu_count() or 1), **os.environ}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode != 0:
        return f"kernels: they could not be built; mlx keeps its own (slow).\n{done.stderr.strip()[-2000:]}"
    return "kernels: built"


def build_cuda_extension() -> str:
    """Compile the extension that launches graphs, as a first start would; returns one line that says what happened."""
    from ingot.kernels.gpu.cuda_graph import ExtensionBuildError, graph_extension

    try:
        graph_extension()
    except ExtensionBuildError as error:
        return f"kernels: the extension that launches CUDA graphs could not be built, steps are slower: {error}"
    return "kernels: built"


def _installed(distribution: str) -> bool:
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


if __name__ == "__main__":
    if sys.platform == "linux" and _installed("mlx-cpu"):
        print(build_native())
    elif sys.platform == "linux" and _installed("mlx-cuda-13"):
        print(build_cuda_extension())
    else:
        print("kernels: nothing to build here")
