"""CUDA's driver, by ctypes, in the context that MLX computes in: graphs of kernels that were compiled here.

A launch through MLX costs the host microseconds, a launch of a whole graph costs it about as much: so what is the same
at every step is put into one. Only the engine thread may call anything here.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

SONAME = "libcuda.so.1"
NON_BLOCKING = 1


COMPUTE_CAPABILITY = 75
"""The attribute of a device that is its compute capability, before the dot."""
MOST_LENT = 8
"""The attribute of a kernel that is how much shared memory launches of it may ask for."""
OVERLAPPING = 9
"""The first one whose kernels wait by themselves."""


class CudaError(RuntimeError):
    """The driver is not there, or refuses something."""


class Launch(NamedTuple):
    """A kernel, its groups and threads, the addresses of its arrays, and the numbers behind those."""

    function: int
    groups: tuple[int, int, int]
    threads: int
    addresses: Sequence[int]
    numbers: Sequence[int]
    lent: int = 0  # bytes of shared memory that it asks for


class _Edge(ctypes.Structure):
    """Between kernels: the second may begin once all groups of the first have said so, and waits for its end itself."""

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


class Driver:
    """Of the device that MLX uses, which it has begun to use."""

    def __init__(self, library: ctypes.CDLL, device: int = 0) -> None:
        """Raises CudaError."""
        self._library = library
        self._modules: dict[bytes, ctypes.c_void_p] = {}
        self._call("cuInit", 0)
        number, self._context = ctypes.c_int(), ctypes.c_void_p()
        self._call("cuDeviceGet", ctypes.byref(number), device)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), number)
        self.enter()
        self.overlaps = self._attribute(number, COMPUTE_CAPABILITY) >= OVERLAPPING
        """Whether a kernel of a graph begins before the one before it ends."""

    @classmethod
    def find(cls) -> Driver:
        """The one of this process, whose kernels are loaded once however many models use them. Raises CudaError where
        there is none."""
        try:
            found = _of_process()
        except OSError as error:
            raise CudaError(f"{SONAME}: {error}") from error
        found.enter()
        return found

    def enter(self) -> None:
        """Let the thread that calls this use the device."""
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
        return _known(function)

    def stream(self) -> int:
        stream = ctypes.c_void_p()
        self._call("cuStreamCreate", ctypes.byref(stream), NON_BLOCKING)
        return _known(stream)

    def end(self, stream: int) -> None:
        """What is on it is still done."""
        self._call("cuStreamDestroy_v2", ctypes.c_void_p(stream))

    def graph(self, launches: Sequence[Launch]) -> int:
        """Each waits for the one before it, by itself where the device knows how to (`AFTER_OTHERS`)."""
        graph, whole = ctypes.c_void_p(), ctypes.c_void_p()
        self._call("cuGraphCreate", ctypes.byref(graph), 0)
        try:
            before: ctypes.c_void_p | None = None
            for launch in launches:
                before = self._added(graph, launch, before)
            self._call("cuGraphInstantiateWithFlags", ctypes.byref(whole), graph, ctypes.c_uint64(0))
        finally:
            self._call("cuGraphDestroy", graph)
        return _known(whole)

    def _added(self, graph: ctypes.c_void_p, launch: Launch, before: ctypes.c_void_p | None) -> ctypes.c_void_p:
        if launch.lent:
            self._call("cuFuncSetAttribute", ctypes.c_void_p(launch.function), MOST_LENT, launch.lent)
        values: list[Any] = [ctypes.c_uint64(address) for address in launch.addresses]
        values += [ctypes.c_int(number) for number in launch.numbers]
        arguments = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        described = _KernelNode(launch.function, *launch.groups, launch.threads, 1, 1, launch.lent, arguments)
        node, none = ctypes.c_void_p(), ctypes.c_size_t(0)
        self._call("cuGraphAddKernelNode_v2", ctypes.byref(node), graph, None, none, ctypes.byref(described))
        if before is not None:
            edge = _Edge(begin=self.overlaps, kind=self.overlaps)
            both = (ctypes.byref(before), ctypes.byref(node), ctypes.byref(edge))
            self._call("cuGraphAddDependencies_v2", graph, *both, ctypes.c_size_t(1))
        return node

    def launch(self, graph: int, stream: int) -> None:
        self._call("cuGraphLaunch", ctypes.c_void_p(graph), ctypes.c_void_p(stream))

    def forget(self, graph: int) -> None:
        """Whoever launched it may still be waiting for it."""
        self._call("cuGraphExecDestroy", ctypes.c_void_p(graph))

    def synchronize(self, stream: int) -> None:
        self._call("cuStreamSynchronize", ctypes.c_void_p(stream))

    def _call(self, name: str, *arguments: Any) -> None:
        try:
            result = getattr(self._library, name)(*arguments)
        except AttributeError as error:
            raise CudaError(f"{SONAME} has no {name}: it is too old") from error
        if result != 0:
            said = ctypes.c_char_p()
            self._library.cuGetErrorString(result, ctypes.byref(said))
            raise CudaError(f"{name}: {(said.value or b'unknown').decode(errors='replace')} ({result})")


@cache
def _of_process() -> Driver:
    return Driver(ctypes.CDLL(SONAME))


def _known(handle: ctypes.c_void_p) -> int:
    assert handle.value is not None
    return handle.value
