"""CUDA's driver, of which a stand-in notes what it is asked for."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from ingot.kernels.gpu.cuda_graph import CudaError, Driver, Launch


class Library:
    """Hands out handles, and fails where it is told to."""

    def __init__(self, capability: int = 9, failing: str = "", missing: str = "") -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self._capability, self._failing, self._missing, self._handles = capability, failing, missing, 100

    def __getattr__(self, name: str) -> Any:
        if name == self._missing:
            raise AttributeError(name)
        return lambda *given: self._call(name, given)

    def _call(self, name: str, given: tuple[Any, ...]) -> int:
        self.calls.append((name, given))
        if name == "cuGetErrorString":
            given[1]._obj.value = b"out of luck"
        elif name == "cuDeviceGetAttribute":
            given[0]._obj.value = self._capability
        elif given and hasattr(given[0], "_obj") and name != "cuDeviceGet":
            self._handles += 1
            given[0]._obj.value = self._handles
        return 700 if name == self._failing else 0

    def named(self, name: str) -> list[tuple[Any, ...]]:
        return [given for called, given in self.calls if called == name]


def launches(count: int) -> list[Launch]:
    return [Launch(7, (3, 2, 1), 64, [1 << 40, 2 << 40], [5]) for _ in range(count)]


@pytest.mark.parametrize(("capability", "overlaps"), [(9, 1), (8, 0)])
def test_each_kernel_of_a_graph_waits_for_the_one_before(capability: int, overlaps: int) -> None:
    library = Library(capability)
    Driver(library).graph(launches(3))  # type: ignore[arg-type]
    assert len(library.named("cuGraphAddKernelNode_v2")) == 3
    edges = library.named("cuGraphAddDependencies_v2")
    nodes = [(given[1]._obj.value, given[2]._obj.value) for given in edges]
    assert len(edges) == 2 and nodes[0][1] == nodes[1][0]
    assert {(given[3]._obj.begin, given[3]._obj.end, given[3]._obj.kind) for given in edges} == {
        (overlaps, 0, overlaps)
    }
    assert len(library.named("cuGraphDestroy")) == 1, "what it was made of goes"


def test_a_kernel_is_given_addresses_and_then_numbers() -> None:
    library = Library()
    seen: list[tuple[int, ...]] = []
    added = library._call

    def noted(name: str, given: tuple[Any, ...]) -> int:
        if name == "cuGraphAddKernelNode_v2":
            node = given[4]._obj
            addresses = [ctypes.cast(node.arguments[i], ctypes.POINTER(ctypes.c_uint64))[0] for i in range(2)]
            number = ctypes.cast(node.arguments[2], ctypes.POINTER(ctypes.c_int))[0]
            seen.append((*addresses, number, node.along, node.down, node.deep, node.x, node.y, node.z, node.shared))
        return added(name, given)

    library._call = noted  # type: ignore[method-assign]
    Driver(library).graph(launches(1))  # type: ignore[arg-type]
    assert seen == [(1 << 40, 2 << 40, 5, 3, 2, 1, 64, 1, 1, 0)]


def test_shared_memory_that_a_launch_asks_for_is_allowed_first() -> None:
    library = Library()
    [launch] = launches(1)
    Driver(library).graph([launch, launch._replace(lent=80_000)])  # type: ignore[arg-type]
    assert [given[4]._obj.shared for given in library.named("cuGraphAddKernelNode_v2")] == [0, 80_000]
    [(function, attribute, lent)] = library.named("cuFuncSetAttribute")
    assert (function.value, attribute, lent) == (7, 8, 80_000)


def test_a_cubin_is_loaded_once() -> None:
    library = Library()
    driver = Driver(library)  # type: ignore[arg-type]
    for name in ("one", "other"):
        driver.function(b"cubin", name)
    assert len(library.named("cuModuleLoadData")) == 1
    assert [given[2] for given in library.named("cuModuleGetFunction")] == [b"one", b"other"]


def test_what_the_driver_refuses_is_told_with_its_words() -> None:
    driver = Driver(Library(failing="cuGraphLaunch"))  # type: ignore[arg-type]
    with pytest.raises(CudaError, match=r"cuGraphLaunch: out of luck \(700\)"):
        driver.launch(1, 2)


def test_a_driver_that_lacks_something_is_too_old() -> None:
    driver = Driver(Library(missing="cuGraphLaunch"))  # type: ignore[arg-type]
    with pytest.raises(CudaError, match=r"has no cuGraphLaunch: it is too old"):
        driver.launch(1, 2)


def test_a_graph_that_cannot_be_made_leaves_nothing_behind() -> None:
    library = Library(failing="cuGraphInstantiateWithFlags")
    driver = Driver(library)  # type: ignore[arg-type]
    with pytest.raises(CudaError):
        driver.graph(launches(2))
    assert len(library.named("cuGraphDestroy")) == 1
