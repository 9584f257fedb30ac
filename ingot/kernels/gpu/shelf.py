"""Compiled kernels where MLX looks for them by name, so that no launch carries their bytes.

MLX copies and hashes what it is given at every launch, tens of kilobytes a kernel. Before it loads a module for the
first time it looks into a folder for a file named after the kernel and that hash; so a kernel that lies there under the
name for no bytes at all is launched with none. Where MLX looks elsewhere, loading fails, and bytes are given after all.
"""

from __future__ import annotations

import os
from pathlib import Path

from ingot.kernels.gpu.cubins import USUAL, private, put

VARIABLE = "MLX_PTX_CACHE_DIR"
NO_BYTES = 0x553E93901E462A6E
"""The hash of no bytes, by the C++ library that MLX is built with on Linux."""


class Shelf:
    """A folder of MLX's. Any thread or process may write to it."""

    def __init__(self, folder: Path) -> None:
        """Raises OSError where it cannot be made, or others may write to it."""
        self.folder = private(folder)

    @classmethod
    def usual(cls) -> Shelf:
        """The one that MLX is told to use, or one beside other kernels of ours, of which MLX is told. That must be said
        before MLX compiles its first kernel: it listens once."""
        return cls(Path(os.environ.setdefault(VARIABLE, str(USUAL.expanduser().parent / "mlx-kernels"))))

    def lay(self, name: str, function: str, cubin: bytes) -> None:
        """Let a function be launched by a name, which is another one for other bytes. Raises OSError."""
        kernel = self.folder / f"{name}_{NO_BYTES:x}.ptx"
        if kernel.exists() and kernel.read_bytes() == cubin:
            return
        put(kernel.with_suffix(".txt"), f"{name}\t{function}\n".encode())
        put(kernel, cubin)
