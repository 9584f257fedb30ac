"""The extension of MLX that launches CUDA graphs on MLX's own stream (`source/graph_launch.cpp`).

It is compiled against the MLX that is installed, once for each version, and kept beside the compiled kernels. Without a
C++ compiler there is none: then the host orders steps, which is slower, and the ready line says so.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import logging
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from functools import cache
from importlib.machinery import ExtensionFileLoader
from pathlib import Path
from typing import Any

import mlx.core as mx

from ingot.extras import install_command
from ingot.kernels.gpu.cubins import USUAL, cubin_key, private

log = logging.getLogger("ingot.kernels")
MODULE = "ingot_graph_launch"
SOURCE = Path(__file__).parent / "source" / "graph_launch.cpp"
OPTIONS = (
    *("-std=c++20", "-O1", "-shared", "-fPIC", "-fvisibility=hidden", "-fno-strict-aliasing"),
    *("-DNDEBUG", "-DNB_DOMAIN=mlx"),  # MLX's domain: the extension shares its array type
)
STAND_INS = ("cuda.h", "cuda_runtime.h", "fmt/format.h")
"""Headers that MLX's own include. What they would declare, the source declares."""
COMPILER_LIMIT_S = 300


class BuildError(RuntimeError):
    """The extension cannot be compiled or loaded here."""


@cache
def extension() -> Any:
    """The module, with `Graph` and `launch`. Raises BuildError; the same one however often it is asked for."""
    found = _extension()
    if isinstance(found, BuildError):
        raise found
    return found


@cache
def _extension() -> Any:
    try:
        return load(build(private((USUAL.parent / "extensions").expanduser())))
    except BuildError as error:
        return error
    except OSError as error:
        return BuildError(str(error))


def build(folder: Path) -> Path:
    """The compiled extension in `folder`. Raises BuildError or OSError."""
    target = folder / f"{MODULE}-{_key()}.so"
    if not target.exists():
        began = time.monotonic()
        with tempfile.TemporaryDirectory(dir=folder, prefix=".") as aside:
            made = Path(aside) / target.name
            _run([*compiler_command(Path(aside)), "-o", str(made)])
            made.replace(target)
        log.info("the extension that launches graphs was compiled, in %.1f s", time.monotonic() - began)
    return target


def load(file: Path) -> Any:
    """Raises BuildError."""
    loader = ExtensionFileLoader(MODULE, str(file))
    spec = importlib.util.spec_from_file_location(MODULE, file, loader=loader)
    assert spec is not None
    try:
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
    except ImportError as error:
        raise BuildError(f"the compiled extension does not load: {error}") from error
    return module


def compiler_command(aside: Path) -> list[str]:
    """All but where the result goes; empty headers are put into `aside`. Raises BuildError."""
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CXX") or "g++", "c++", "clang++"))), None)
    if compiler is None:
        raise BuildError("no C++ compiler is found: install g++")
    python = Path(sysconfig.get_path("include"))
    if not (python / "Python.h").exists():
        raise BuildError("Python's headers are not installed: install python3-dev")
    nanobind = _package("nanobind")
    if nanobind is None:
        raise BuildError(f"nanobind is not installed: run {install_command(['nanobind>=3.1,<3.2'])}")
    for header in STAND_INS:
        (aside / header).parent.mkdir(exist_ok=True)
        (aside / header).touch()
    mlx = _mlx()
    headers = (nanobind / "include", nanobind / "ext/robin_map/include", python)
    foreign = [option for folder in (aside, mlx / "include", *headers) for option in ("-isystem", str(folder))]
    sources = (str(SOURCE), str(nanobind / "src/nb_combined.cpp"))
    return [compiler, *OPTIONS, *foreign, *sources, f"-L{mlx / 'lib'}", "-lmlx", "-ldl"]


def _key() -> str:
    """Of everything that the extension depends on."""
    versions = (
        importlib.metadata.version("mlx"),
        importlib.metadata.version("nanobind") if _package("nanobind") else "none",
    )
    here = (sys.implementation.cache_tag, platform.machine(), str(_mlx()))
    return cubin_key(SOURCE.read_text(), *OPTIONS, *versions, *here)


def _mlx() -> Path:
    return Path(mx.__file__).parent


def _package(name: str) -> Path | None:
    found = importlib.util.find_spec(name)
    return None if found is None or found.origin is None else Path(found.origin).parent


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=COMPILER_LIMIT_S)
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"{command[0]} did not end within {COMPILER_LIMIT_S} s") from error
    if done.returncode != 0:
        wrong = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
        raise BuildError(f"{command[0]} fails: {' '.join(wrong[:3])[:500]}")
