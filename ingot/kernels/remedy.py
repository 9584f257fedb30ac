"""What can be done where the kernels are missing."""

from __future__ import annotations

from pathlib import Path

NATIVE = Path(__file__).parents[2] / "native"
TOOLS = ("gcc", "g++", "cmake")


def remedy() -> str:
    """What to do where the kernels are missing, or were built for another mlx."""
    if NATIVE.is_dir():
        return f"install {', '.join(TOOLS[:-1])} and {TOOLS[-1]}, then run python -m ingot.kernels.build"
    return "install ingot again, with the extra [cpu]"
