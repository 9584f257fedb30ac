"""CUDA's own compiler, which lies beside MLX's CUDA build, by ctypes: a source in, a cubin for one architecture out."""

from __future__ import annotations

import ctypes
import importlib.util
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

SONAMES = ("libnvrtc.so.13", "libnvrtc.so.12")
PACKAGED = ("cu13", "cuda_nvrtc")
"""Folders of `nvidia` packages that hold it."""
HEADERS = ("cu13", "cuda_runtime")
"""Folders of `nvidia` packages that hold CUDA's headers."""
_OLDEST_SPECIFIC = 9
"""Compute capability from which on an architecture has instructions that no later one has."""


class NvrtcError(RuntimeError):
    """It is not there, or does not compile what it was given."""


class Nvrtc:
    """Any thread may call; compiling does not hold the interpreter."""

    def __init__(self, library: ctypes.CDLL, headers: Path, origin: str) -> None:
        """Raises NvrtcError where `library` is none."""
        self._library, self._headers, self.origin = library, headers, origin
        major, minor = ctypes.c_int(), ctypes.c_int()
        try:
            self._check(library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
        except AttributeError as error:
            raise NvrtcError(f"{origin} is no NVRTC: {error}") from error
        self.version = (major.value, minor.value)

    @classmethod
    def find(cls) -> Nvrtc:
        """The one that MLX has loaded; else one of the `nvidia` packages; else what the system knows. Raises NvrtcError
        where there is none, or where CUDA's headers are nowhere."""
        library, origin = _library()
        return cls(library, _headers(), origin)

    def options(self, architecture: str) -> tuple[str, ...]:
        return (
            f"--gpu-architecture={architecture}",
            "--device-as-default-execution-space",
            f"--include-path={self._headers}",
        )

    def compiled(self, name: str, source: str, architecture: str) -> bytes:
        """A cubin. Raises NvrtcError with what the compiler said."""
        program, options = ctypes.c_void_p(), self.options(architecture)
        given = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        library = self._library
        self._check(
            library.nvrtcCreateProgram(ctypes.byref(program), source.encode(), f"{name}.cu".encode(), 0, None, None)
        )
        try:
            if library.nvrtcCompileProgram(program, len(options), given) != 0:
                raise NvrtcError(f"{name} does not compile: {' '.join(self._said(program).split())[:2000]}")
            return self._taken(program, "CUBIN")
        finally:
            library.nvrtcDestroyProgram(ctypes.byref(program))

    def _said(self, program: ctypes.c_void_p) -> str:
        return self._taken(program, "ProgramLog").rstrip(b"\0").decode(errors="replace")

    def _taken(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        self._check(getattr(self._library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
        taken = ctypes.create_string_buffer(size.value)
        self._check(getattr(self._library, f"nvrtcGet{what}")(program, taken))
        return taken.raw

    def _check(self, result: int) -> None:
        if result != 0:
            self._library.nvrtcGetErrorString.restype = ctypes.c_char_p
            raise NvrtcError(f"NVRTC: {self._library.nvrtcGetErrorString(result).decode(errors='replace')}")


def architecture(major: int, minor: int) -> str:
    """What a device of this compute capability, and no other, runs."""
    return f"sm_{major}{minor}{'a' if major >= _OLDEST_SPECIFIC else ''}"


def _library() -> tuple[ctypes.CDLL, str]:
    for name, mode in [
        *((name, os.RTLD_NOW | os.RTLD_NOLOAD) for name in SONAMES if hasattr(os, "RTLD_NOLOAD")),
        *((str(file), os.RTLD_NOW) for file in _packaged(PACKAGED, "lib/libnvrtc.so.*")),
        *((name, os.RTLD_NOW) for name in SONAMES),
    ]:
        try:
            return ctypes.CDLL(name, mode=mode), name
        except OSError:
            continue
    raise NvrtcError(f"none of {', '.join(SONAMES)} is found")


def _headers() -> Path:
    homes = [Path(os.environ[name]) for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    folders = [*_packaged(HEADERS, "include"), *(home / "include" for home in (*homes, Path("/usr/local/cuda")))]
    for folder in folders:
        if (folder / "cuda_fp16.h").exists() and (folder / "cuda_bf16.h").exists():
            return folder
    raise NvrtcError("CUDA's headers are nowhere: set CUDA_HOME")


def _packaged(folders: Sequence[str], pattern: str) -> Iterable[Path]:
    """What `nvidia` packages have of it, wherever those are installed."""
    found = importlib.util.find_spec("nvidia")
    roots = found.submodule_search_locations if found is not None else None
    for root in roots or ():
        for folder in folders:
            yield from sorted((Path(root) / folder).glob(pattern), reverse=True)
