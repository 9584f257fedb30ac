"""What becomes of ingot-native where it is there, where it is not, and where it was built for another mlx."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ingot.kernels import build
from ingot.kernels.cpu import fastblas, native

needs_kernels = pytest.mark.skipif(not native.available(), reason=f"{native.advice()}")


def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@needs_kernels
def test_the_bridge_is_loaded_from_the_kernels_package_before_mlx_is() -> None:
    code = "import sys; from ingot.kernels.cpu import fastblas; print(fastblas.install(), 'mlx.core' in sys.modules)"
    assert python(code) == "True False"


@needs_kernels
def test_kernels_that_were_built_for_another_mlx_are_left_alone() -> None:
    code = (
        "import mlx.core as mx; mx.__version__ = '0.0.1'\n"
        "from ingot.kernels.cpu import native\n"
        "print(native.available(), native.advice())"
    )
    assert python(code).startswith("False the native kernels were built for another mlx")


@needs_kernels
def test_kernels_with_another_interface_are_left_alone() -> None:
    code = (
        "import mlx.core, ingot_native; del ingot_native.INTERFACE\n"
        "from ingot.kernels.cpu import native\n"
        "print(native.available(), native.advice())"
    )
    assert python(code).startswith("False the native kernels were built for another mlx or ingot")


def test_a_clone_is_told_to_build_and_an_installation_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert "python -m ingot.kernels.build" in fastblas.missing_kernels_advice()
    for module in (build, fastblas):
        monkeypatch.setattr(module, "NATIVE_SOURCES", tmp_path / "native")
    assert fastblas.missing_kernels_advice() == "install ingot again, with the extra [cpu]"
    assert build.build_native() == f"kernels: no sources here; {fastblas.missing_kernels_advice()}"


def test_tools_that_are_missing_are_named_and_nothing_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build.shutil, "which", lambda name: None if name == "cmake" else name)
    monkeypatch.setattr(build.subprocess, "run", None)
    assert build.build_native().startswith("kernels: no cmake; mlx keeps its own (slow).")


def test_a_package_that_is_not_there_has_no_files() -> None:
    assert fastblas._file_of("no_such_package", "_fastblas.so") is None
