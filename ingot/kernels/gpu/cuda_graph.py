"""CUDA graphs: built with the CUDA driver, and launched on MLX's own stream.

The driver is called by ctypes, in MLX's context. Launching a kernel through MLX costs the host microseconds, and
launching a whole graph about as much: so what is the same at every step becomes one graph.

The MLX extension that launches graphs (`source/graph_launch.cpp`) is compiled against the installed MLX, once for each
version, and stored next to the cubin cache. Without a C++ compiler there is none: then the host synchronises steps,
which is slower, and the ready line says so. Only the engine thread may call anything here.
"""

from __future__ import annotations

import ctypes
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
from collections.abc import Sequence
from functools import cache
from importlib.machinery import ExtensionFileLoader
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx

from ingot.extras import install_command
from ingot.kernels.gpu.nvrtc import DEFAULT_CUBIN_FOLDER, cubin_key, private_folder
from ingot.observe.logs import report_step

DRIVER_LIBRARY = "libcuda.so.1"
NON_BLOCKING = 1
PORTABLE = 1
"""Pinned for all threads and contexts."""


COMPUTE_CAPABILITY = 75
"""The device attribute of the major compute capability."""
SHARED_MEMORY_ATTRIBUTE = 8
"""The kernel attribute of the most dynamic shared memory."""
OVERLAPPING_CAPABILITY = 9
"""The first one with programmatic dependent launch."""


class CudaError(RuntimeError):
    """The driver is missing, or a call failed."""


class GraphKernelLaunch(NamedTuple):
    """A kernel, its groups and threads, the addresses of its arrays, and its scalar arguments."""

    function: int
    groups: tuple[int, int, int]
    threads: int
    addresses: Sequence[int]
    numbers: Sequence[int]
    lent: int = 0  # bytes of dynamic shared memory


class _Edge(ctypes.Structure):
    """A programmatic dependency: the second kernel may start once all groups of the first allow it, and waits for the
    first one's end itself."""

    _fields_ = (*((name, ctypes.c_ubyte) for name in ("begin", "end", "kind")), ("reserved", ctypes.c_ubyte * 5))


class _KernelNode(ctypes.Structure):
    _fields_ = (
        ("function", ctypes.c_void_p),
        *((name, ctypes.c_uint) for name in ("along", "down", "deep", "x", "y", "z", "shared")),
        ("arguments", ctypes.POINTER(ctypes.c_void_p)),
        ("extra", ctypes.c_void_p),
        ("kernel", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
    )


class CudaDriver:
    """The driver of the device that MLX uses, once MLX has initialised it."""

    def __init__(self, library: ctypes.CDLL, device: int = 0) -> None:
        """Raises CudaError."""
        self._library = library
        self._modules: dict[bytes, ctypes.c_void_p] = {}
        self._call("cuInit", 0)
        number, self._context = ctypes.c_int(), ctypes.c_void_p()
        self._call("cuDeviceGet", ctypes.byref(number), device)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), number)
        self.enter()
        self.overlaps = self._attribute(number, COMPUTE_CAPABILITY) >= OVERLAPPING_CAPABILITY
        """Whether a kernel of a graph may start before the previous one ends."""

    @classmethod
    def find(cls) -> CudaDriver:
        """This process's driver, which loads each kernel once for all models. Raises CudaError where there is none."""
        try:
            found = _process_driver()
        except OSError as error:
            raise CudaError(f"{DRIVER_LIBRARY}: {error}") from error
        found.enter()
        return found

    def enter(self) -> None:
        """Make the device's context current in this thread."""
        self._call("cuCtxSetCurrent", self._context)

    def _attribute(self, device: ctypes.c_int, which: int) -> int:
        value = ctypes.c_int()
        self._call("cuDeviceGetAttribute", ctypes.byref(value), which, device)
        return value.value

    def function(self, cubin: bytes, name: str) -> int:
        module, function = self._modules.get(cubin), ctypes.c_void_p()
        if module is None:
            module = ctypes.c_void_p()
            self._call("cuModuleLoadData", ctypes.byref(module), cubin)
            self._modules[cubin] = module
        self._call("cuModuleGetFunction", ctypes.byref(function), module, name.encode())
        return _handle_value(function)

    def stream(self) -> int:
        stream = ctypes.c_void_p()
        self._call("cuStreamCreate", ctypes.byref(stream), NON_BLOCKING)
        return _handle_value(stream)

    def end(self, stream: int) -> None:
        """Destroy a stream once its work is done."""
        self._call("cuStreamDestroy_v2", ctypes.c_void_p(stream))

    def graph(self, launches: Sequence[GraphKernelLaunch]) -> int:
        """An instantiated graph in which each kernel waits for the previous one, by itself where the device can
        (`AFTER_OTHERS`)."""
        graph, instance = ctypes.c_void_p(), ctypes.c_void_p()
        self._call("cuGraphCreate", ctypes.byref(graph), 0)
        try:
            previous: ctypes.c_void_p | None = None
            for launch in launches:
                previous = self._add_kernel(graph, launch, previous)
            self._call("cuGraphInstantiateWithFlags", ctypes.byref(instance), graph, ctypes.c_uint64(0))
        finally:
            self._call("cuGraphDestroy", graph)
        return _handle_value(instance)

    def _add_kernel(
        self, graph: ctypes.c_void_p, launch: GraphKernelLaunch, previous: ctypes.c_void_p | None
    ) -> ctypes.c_void_p:
        if launch.lent:
            self._call("cuFuncSetAttribute", ctypes.c_void_p(launch.function), SHARED_MEMORY_ATTRIBUTE, launch.lent)
        values: list[Any] = [ctypes.c_uint64(address) for address in launch.addresses]
        values += [ctypes.c_int(number) for number in launch.numbers]
        arguments = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        parameters = _KernelNode(launch.function, *launch.groups, launch.threads, 1, 1, launch.lent, arguments)
        node, none = ctypes.c_void_p(), ctypes.c_size_t(0)
        self._call("cuGraphAddKernelNode_v2", ctypes.byref(node), graph, None, none, ctypes.byref(parameters))
        if previous is not None:
            edge = _Edge(begin=self.overlaps, kind=self.overlaps)
            both = (ctypes.byref(previous), ctypes.byref(node), ctypes.byref(edge))
            self._call("cuGraphAddDependencies_v2", graph, *both, ctypes.c_size_t(1))
        return node

    def launch(self, graph: int, stream: int) -> None:
        self._call("cuGraphLaunch", ctypes.c_void_p(graph), ctypes.c_void_p(stream))

    def forget(self, graph: int) -> None:
        """Destroy a graph, which may still be running."""
        self._call("cuGraphExecDestroy", ctypes.c_void_p(graph))

    def pinned(self, size: int) -> int:
        """The address of so many bytes of the host's that the device copies by itself."""
        address = ctypes.c_void_p()
        self._call("cuMemHostAlloc", ctypes.byref(address), ctypes.c_size_t(size), PORTABLE)
        return _handle_value(address)

    def copy_to_device(self, to: int, source: int, size: int, stream: int) -> None:
        """From pinned memory, which is read until the stream is done."""
        copied = ctypes.c_uint64(to), ctypes.c_void_p(source), ctypes.c_size_t(size)
        self._call("cuMemcpyHtoDAsync_v2", *copied, ctypes.c_void_p(stream))

    def synchronize(self, stream: int) -> None:
        self._call("cuStreamSynchronize", ctypes.c_void_p(stream))

    def _call(self, name: str, *arguments: Any) -> None:
        try:
            result = getattr(self._library, name)(*arguments)
        except AttributeError as error:
            raise CudaError(f"{DRIVER_LIBRARY} has no {name}: it is too old") from error
        if result != 0:
            message = ctypes.c_char_p()
            self._library.cuGetErrorString(result, ctypes.byref(message))
            raise CudaError(f"{name}: {(message.value or b'unknown').decode(errors='replace')} ({result})")


@cache
def _process_driver() -> CudaDriver:
    return CudaDriver(ctypes.CDLL(DRIVER_LIBRARY))


def _handle_value(handle: ctypes.c_void_p) -> int:
    assert handle.value is not None
    return handle.value


log = logging.getLogger("ingot.kernels")
EXTENSION_MODULE = "ingot_graph_launch"
EXTENSION_SOURCE = Path(__file__).parent / "source" / "graph_launch.cpp"
COMPILER_OPTIONS = (
    *("-std=c++20", "-O1", "-shared", "-fPIC", "-fvisibility=hidden", "-fno-strict-aliasing"),
    *("-DNDEBUG", "-DNB_DOMAIN=mlx"),  # MLX's domain: the extension shares its array type
)
STAND_INS = ("cuda.h", "cuda_runtime.h", "fmt/format.h")
"""Headers that MLX's own include, left empty: the source declares what it needs of them."""
COMPILER_LIMIT_S = 300


class ExtensionBuildError(RuntimeError):
    """The extension cannot be compiled or loaded here."""


@cache
def graph_extension() -> Any:
    """The module, with `Graph` and `launch`. Raises ExtensionBuildError, the same one at every call."""
    found = _find_graph_extension()
    if isinstance(found, ExtensionBuildError):
        raise found
    return found


@cache
def _find_graph_extension() -> Any:
    try:
        return load_graph_extension(
            build_graph_extension(private_folder((DEFAULT_CUBIN_FOLDER.parent / "extensions").expanduser()))
        )
    except ExtensionBuildError as error:
        return error
    except OSError as error:
        return ExtensionBuildError(str(error))


def build_graph_extension(folder: Path) -> Path:
    """The compiled extension in `folder`. Raises ExtensionBuildError or OSError."""
    target = folder / f"{EXTENSION_MODULE}-{_extension_key()}.so"
    if not target.exists():
        began = time.monotonic()
        report_step("compiling the extension that launches graphs")
        with tempfile.TemporaryDirectory(dir=folder, prefix=".") as temporary:
            built = Path(temporary) / target.name
            _run_compiler([*compiler_command(Path(temporary)), "-o", str(built)])
            built.replace(target)
        log.info("the extension that launches graphs was compiled, in %.1f s", time.monotonic() - began)
    return target


def load_graph_extension(file: Path) -> Any:
    """Raises ExtensionBuildError."""
    loader = ExtensionFileLoader(EXTENSION_MODULE, str(file))
    spec = importlib.util.spec_from_file_location(EXTENSION_MODULE, file, loader=loader)
    assert spec is not None
    try:
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
    except ImportError as error:
        raise ExtensionBuildError(f"the compiled extension does not load: {error}") from error
    return module


def compiler_command(headers_folder: Path) -> list[str]:
    """All but the output; empty headers are put into `headers_folder`. Raises ExtensionBuildError."""
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CXX") or "g++", "c++", "clang++"))), None)
    if compiler is None:
        raise ExtensionBuildError("no C++ compiler is found: install g++")
    python = Path(sysconfig.get_path("include"))
    if not (python / "Python.h").exists():
        raise ExtensionBuildError("Python's headers are not installed: install python3-dev")
    nanobind = _nanobind_folder()
    if nanobind is None:
        raise ExtensionBuildError(f"nanobind is not installed: run {install_command(['nanobind>=3.1,<3.2'])}")
    for header in STAND_INS:
        (headers_folder / header).parent.mkdir(exist_ok=True)
        (headers_folder / header).touch()
    mlx = _mlx_folder()
    headers = (nanobind / "include", nanobind / "ext/robin_map/include", python)
    foreign = [option for folder in (headers_folder, mlx / "include", *headers) for option in ("-isystem", str(folder))]
    sources = (str(EXTENSION_SOURCE), str(nanobind / "src/nb_combined.cpp"))
    return [compiler, *COMPILER_OPTIONS, *foreign, *sources, f"-L{mlx / 'lib'}", "-lmlx", "-ldl"]


def _extension_key() -> str:
    """A digest of everything that the extension depends on."""
    versions = (
        importlib.metadata.version("mlx"),
        importlib.metadata.version("nanobind") if _nanobind_folder() else "none",
    )
    here = (sys.implementation.cache_tag, platform.machine(), str(_mlx_folder()))
    return cubin_key(EXTENSION_SOURCE.read_text(), *COMPILER_OPTIONS, *versions, *here)


def _mlx_folder() -> Path:
    return Path(mx.__file__).parent


def _nanobind_folder() -> Path | None:
    found = importlib.util.find_spec("nanobind")
    return None if found is None or found.origin is None else Path(found.origin).parent


def _run_compiler(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=COMPILER_LIMIT_S)
    except subprocess.TimeoutExpired as error:
        raise ExtensionBuildError(f"{command[0]} did not end within {COMPILER_LIMIT_S} s") from error
    if done.returncode != 0:
        wrong = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
        raise ExtensionBuildError(f"{command[0]} fails: {' '.join(wrong[:3])[:500]}")
