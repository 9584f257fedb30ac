"""CUDA's own compiler, and the cubin cache: what was compiled once is not compiled again.

NVRTC lies beside MLX's CUDA build and is called by ctypes: a source in, a cubin for one architecture out. Cubins lie in
a folder of files that belongs to this user alone, as what lies in it is executed.

They also lie where MLX looks for them by name (`mlx_kernels`).
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import tempfile
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
        library, origin = _nvrtc_library()
        return cls(library, _cuda_headers(), origin)

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


def gpu_architecture(major: int, minor: int) -> str:
    """What a device of this compute capability, and no other, runs."""
    return f"sm_{major}{minor}{'a' if major >= _OLDEST_SPECIFIC else ''}"


def _nvrtc_library() -> tuple[ctypes.CDLL, str]:
    for name, mode in [
        *((name, os.RTLD_NOW | os.RTLD_NOLOAD) for name in SONAMES if hasattr(os, "RTLD_NOLOAD")),
        *((str(file), os.RTLD_NOW) for file in _packaged_files(PACKAGED, "lib/libnvrtc.so.*")),
        *((name, os.RTLD_NOW) for name in SONAMES),
    ]:
        try:
            return ctypes.CDLL(name, mode=mode), name
        except OSError:
            continue
    raise NvrtcError(f"none of {', '.join(SONAMES)} is found")


def _cuda_headers() -> Path:
    homes = [Path(os.environ[name]) for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    folders = [*_packaged_files(HEADERS, "include"), *(home / "include" for home in (*homes, Path("/usr/local/cuda")))]
    for folder in folders:
        if (folder / "cuda_fp16.h").exists() and (folder / "cuda_bf16.h").exists():
            return folder
    raise NvrtcError("CUDA's headers are nowhere: set CUDA_HOME")


def _packaged_files(folders: Sequence[str], pattern: str) -> Iterable[Path]:
    """What `nvidia` packages have of it, wherever those are installed."""
    found = importlib.util.find_spec("nvidia")
    roots = found.submodule_search_locations if found is not None else None
    for root in roots or ():
        for folder in folders:
            yield from sorted((Path(root) / folder).glob(pattern), reverse=True)


DEFAULT_CUBIN_FOLDER = Path("~/.cache/ingot/kernels")
MOST_CUBIN_BYTES = 64 << 20
"""Of all files: some thousand kernels. Those that were not used for the longest time go first."""
_DIGEST = hashlib.sha256().digest_size


class CubinCache:
    """Belongs to this user alone: what lies in it is executed. Any thread or process may read and write."""

    def __init__(self, folder: Path, most_bytes: int = MOST_CUBIN_BYTES) -> None:
        """Raises OSError where it cannot be made, or others may write to it."""
        self.folder, self._most_bytes = private_folder(folder.expanduser()), most_bytes

    def read(self, key: str) -> bytes | None:
        """None where there is none, or where it is damaged."""
        file = self._file(key)
        try:
            content = file.read_bytes()
            os.utime(file)
        except OSError:
            return None
        digest, cubin = content[:_DIGEST], content[_DIGEST:]
        return cubin if cubin and hashlib.sha256(cubin).digest() == digest else None

    def write(self, key: str, cubin: bytes) -> None:
        """Raises OSError. Nobody sees half of a file."""
        write_atomically(self._file(key), hashlib.sha256(cubin).digest() + cubin)

    def prune(self) -> None:
        """Let go of what is too much; what another process let go of meanwhile is gone as well."""
        files = []
        for file in self.folder.iterdir():
            try:
                found = file.stat()
            except FileNotFoundError:
                continue
            files.append((found.st_mtime, found.st_size, file))
        left = sum(size for _, size, _ in files)
        for _, size, file in sorted(files):
            if left <= self._most_bytes:
                return
            file.unlink(missing_ok=True)
            left -= size

    def _file(self, key: str) -> Path:
        return self.folder / f"{key}.cubin"


def private_folder(folder: Path) -> Path:
    """A folder whose files may be executed. Raises OSError where it cannot be made, or others may write to it."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.stat()
    if found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise PermissionError(f"{folder} is not this user's alone: remove it")
    return folder


def cubin_key(*parts: str) -> str:
    """Of everything that a cubin depends on."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:40]


def write_atomically(file: Path, content: bytes) -> None:
    """Write a file of which nobody sees half. Raises OSError."""
    descriptor, aside = tempfile.mkstemp(dir=file.parent, prefix=".")
    try:
        with os.fdopen(descriptor, "wb") as written:
            written.write(content)
        Path(aside).replace(file)
    except OSError:
        Path(aside).unlink(missing_ok=True)
        raise
