"""CUDA's driver, of which a stand-in notes what it is asked for."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from ingot.kernels.gpu import cuda_graph
from ingot.kernels.gpu.cuda_graph import (
    EXTENSION_SOURCE,
    CudaDriver,
    CudaError,
    ExtensionBuildError,
    GraphKernelLaunch,
    build_graph_extension,
    compiler_command,
    load_graph_extension,
)


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


def launches(count: int) -> list[GraphKernelLaunch]:
    return [GraphKernelLaunch(7, (3, 2, 1), 64, [1 << 40, 2 << 40], [5]) for _ in range(count)]


@pytest.mark.parametrize(("capability", "overlaps"), [(9, 1), (8, 0)])
def test_each_kernel_of_a_graph_waits_for_the_one_before(capability: int, overlaps: int) -> None:
    library = Library(capability)
    CudaDriver(library).graph(launches(3))  # type: ignore[arg-type]
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
    CudaDriver(library).graph(launches(1))  # type: ignore[arg-type]
    assert seen == [(1 << 40, 2 << 40, 5, 3, 2, 1, 64, 1, 1, 0)]


def test_shared_memory_that_a_launch_asks_for_is_allowed_first() -> None:
    library = Library()
    [launch] = launches(1)
    CudaDriver(library).graph([launch, launch._replace(lent=80_000)])  # type: ignore[arg-type]
    assert [given[4]._obj.shared for given in library.named("cuGraphAddKernelNode_v2")] == [0, 80_000]
    [(function, attribute, lent)] = library.named("cuFuncSetAttribute")
    assert (function.value, attribute, lent) == (7, 8, 80_000)


def test_a_cubin_is_loaded_once() -> None:
    library = Library()
    driver = CudaDriver(library)  # type: ignore[arg-type]
    for name in ("one", "other"):
        driver.function(b"cubin", name)
    assert len(library.named("cuModuleLoadData")) == 1
    assert [given[2] for given in library.named("cuModuleGetFunction")] == [b"one", b"other"]


def test_what_the_driver_refuses_is_told_with_its_words() -> None:
    driver = CudaDriver(Library(failing="cuGraphLaunch"))  # type: ignore[arg-type]
    with pytest.raises(CudaError, match=r"cuGraphLaunch: out of luck \(700\)"):
        driver.launch(1, 2)


def test_a_driver_that_lacks_something_is_too_old() -> None:
    driver = CudaDriver(Library(missing="cuGraphLaunch"))  # type: ignore[arg-type]
    with pytest.raises(CudaError, match=r"has no cuGraphLaunch: it is too old"):
        driver.launch(1, 2)


def test_a_graph_that_cannot_be_made_leaves_nothing_behind() -> None:
    library = Library(failing="cuGraphInstantiateWithFlags")
    driver = CudaDriver(library)  # type: ignore[arg-type]
    with pytest.raises(CudaError):
        driver.graph(launches(2))
    assert len(library.named("cuGraphDestroy")) == 1


HEADERS = Path(mx.__file__).parent / "include/mlx/backend/cuda/device.h"
needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None or not HEADERS.exists(), reason="needs g++ and MLX's headers"
)


@needs_compiler
def test_it_compiles_without_a_warning_against_the_installed_mlx_and_without_cuda(tmp_path: Path) -> None:
    command = compiler_command(tmp_path)
    checked = [
        option for option in command if not option.startswith(("-l", "-L")) and not option.endswith("combined.cpp")
    ]
    done = subprocess.run(
        [*checked, "-fsyntax-only", "-Wall", "-Wextra", "-Werror"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_build_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[list[str]] = []

    def run(command: list[str]) -> None:
        made.append(command)
        Path(command[-1]).write_bytes(b"built")

    monkeypatch.setattr(cuda_graph, "_run_compiler", run)
    monkeypatch.setattr(cuda_graph, "compiler_command", lambda aside: ["c++", str(EXTENSION_SOURCE)])
    first = build_graph_extension(tmp_path)
    assert first.read_bytes() == b"built" and build_graph_extension(tmp_path) == first
    assert len(made) == 1
    assert [*tmp_path.iterdir()] == [first], "nothing else is left in the folder"


def test_without_a_compiler_there_is_none_and_what_to_install_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(ExtensionBuildError, match=r"no C\+\+ compiler is found: install g\+\+"):
        compiler_command(tmp_path)


def test_what_the_compiler_says_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "g++"
    compiler.write_text("#!/bin/sh\necho 'x.cpp:1: error: no such luck' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    with pytest.raises(ExtensionBuildError, match="no such luck"):
        build_graph_extension(tmp_path)
    assert not [file for file in tmp_path.iterdir() if file.suffix == ".so"]


def test_a_damaged_file_is_an_error_in_words(tmp_path: Path) -> None:
    damaged = tmp_path / "ingot_graph_launch-0.so"
    damaged.write_bytes(os.urandom(1000))
    with pytest.raises(ExtensionBuildError, match="does not load"):
        load_graph_extension(damaged)
