"""CUDA's compiler: found where MLX has it, and believed when it says no."""

from __future__ import annotations

import ctypes
import importlib.machinery
import importlib.util
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingot.kernels.gpu import nvrtc
from ingot.kernels.gpu.nvrtc import (
    CubinCache,
    Nvrtc,
    NvrtcError,
    cubin_key,
    gpu_architecture,
)
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
    assert gpu_architecture(*capability) == name


@pytest.fixture
def folder(tmp_path: Path) -> CubinCache:
    return CubinCache(tmp_path / "deep" / "kernels")


def test_what_was_written_is_read_again(folder: CubinCache) -> None:
    folder.write("some", b"code")
    assert folder.read("some") == b"code"
    assert folder.read("other") is None


def test_the_folder_is_its_users_alone(folder: CubinCache) -> None:
    assert folder.folder.stat().st_mode & 0o777 == 0o700
    folder.folder.chmod(0o770)
    with pytest.raises(PermissionError, match="not this user's alone"):
        CubinCache(folder.folder)


@pytest.mark.parametrize("damaged", [b"", b"code", b"\0" * 32, b"\0" * 32 + b"code"])
def test_a_damaged_file_is_none_and_is_written_anew(folder: CubinCache, damaged: bytes) -> None:
    (folder.folder / "some.cubin").write_bytes(damaged)
    assert folder.read("some") is None
    folder.write("some", b"code")
    assert folder.read("some") == b"code"


def test_a_file_that_was_cut_anywhere_is_none(folder: CubinCache) -> None:
    folder.write("some", b"some code")
    whole = (folder.folder / "some.cubin").read_bytes()
    for length in range(len(whole)):
        (folder.folder / "some.cubin").write_bytes(whole[:length])
        assert folder.read("some") is None


def test_what_fails_to_be_written_leaves_nothing(folder: CubinCache) -> None:
    (folder.folder / "some.cubin").mkdir()
    with pytest.raises(OSError):
        folder.write("some", b"code")
    assert [file.name for file in folder.folder.iterdir()] == ["some.cubin"]


def test_beyond_its_bound_it_forgets_what_was_used_longest_ago(tmp_path: Path) -> None:
    folder = CubinCache(tmp_path / "kernels", most_bytes=2 * (32 + 4))
    for age, name in enumerate(("oldest", "middle", "newest")):
        folder.write(name, b"code")
        os.utime(folder.folder / f"{name}.cubin", (1000 + age, 1000 + age))
    assert folder.read("oldest") == b"code"
    folder.prune()
    assert {file.name for file in folder.folder.iterdir()} == {"oldest.cubin", "newest.cubin"}


@given(st.lists(st.text(alphabet="ab"), max_size=4), st.lists(st.text(alphabet="ab"), max_size=4))
def test_a_key_tells_everything_apart(some: list[str], others: list[str]) -> None:
    if some and others:
        assert (cubin_key(*some) == cubin_key(*others)) == (some == others)
