"""CUDA's compiler: found where MLX has it, and believed when it says no."""

from __future__ import annotations

import ctypes
import importlib.machinery
import importlib.util
from pathlib import Path

import pytest

from ingot.kernels.gpu import nvrtc
from ingot.kernels.gpu.nvrtc import Nvrtc, NvrtcError, architecture
from tests.kernels.gpu.fake_nvrtc import fake_nvrtc, library, needs_compiler


def packages(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`nvidia` packages in this folder alone."""
    spec = importlib.machinery.ModuleSpec("nvidia", None, is_package=True)
    spec.submodule_search_locations = [str(folder)]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    monkeypatch.setattr(nvrtc, "SONAMES", ("libnvrtc-that-nobody-has.so.13",))


@needs_compiler
def test_a_source_becomes_a_cubin(tmp_path: Path) -> None:
    compiler = fake_nvrtc(tmp_path)
    assert compiler.version == (13, 7)
    assert compiler.compiled("k", "void k() {}", "sm_90a") == b"void k() {}"


@needs_compiler
def test_what_does_not_compile_says_why(tmp_path: Path) -> None:
    with pytest.raises(NvrtcError, match=r"k does not compile: kernel.cu\(7\): error: it was to fail"):
        fake_nvrtc(tmp_path).compiled("k", "#error", "sm_90a")


@needs_compiler
def test_a_refusal_is_named(tmp_path: Path) -> None:
    with pytest.raises(NvrtcError, match="INVALID_INPUT"):
        fake_nvrtc(tmp_path).compiled("k", "", "sm_90a")


def test_a_library_that_is_another_one_is_refused() -> None:
    with pytest.raises(NvrtcError, match="is no NVRTC"):
        Nvrtc(ctypes.CDLL(None), Path(), "libc")


@needs_compiler
@pytest.mark.parametrize("layout", nvrtc.PACKAGED)
def test_it_is_found_in_the_packages_that_mlx_requires(
    layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lib, include = tmp_path / layout / "lib", tmp_path / "cu13" / "include"
    lib.mkdir(parents=True)
    include.mkdir(parents=True)
    for header in ("cuda_fp16.h", "cuda_bf16.h"):
        (include / header).touch()
    library(lib)
    packages(tmp_path, monkeypatch)
    found = Nvrtc.find()
    assert found.origin == str(lib / "libnvrtc.so.13")
    assert f"--include-path={include}" in found.options("sm_90a")


def test_where_there_is_none_it_says_what_was_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packages(tmp_path, monkeypatch)
    with pytest.raises(NvrtcError, match="libnvrtc-that-nobody-has"):
        Nvrtc.find()


@needs_compiler
def test_without_cudas_headers_it_is_of_no_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cu13" / "lib").mkdir(parents=True)
    library(tmp_path / "cu13" / "lib")
    packages(tmp_path, monkeypatch)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    if not Path("/usr/local/cuda/include/cuda_fp16.h").exists():
        with pytest.raises(NvrtcError, match="set CUDA_HOME"):
            Nvrtc.find()


@pytest.mark.parametrize(("capability", "name"), [((8, 6), "sm_86"), ((9, 0), "sm_90a"), ((12, 0), "sm_120a")])
def test_an_architecture_is_the_devices_very_own(capability: tuple[int, int], name: str) -> None:
    assert architecture(*capability) == name
