"""The extension that launches graphs: that it compiles here, and what is said where it cannot."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import mlx.core as mx
import pytest

from ingot.kernels.gpu import graph_launch
from ingot.kernels.gpu.graph_launch import SOURCE, BuildError, build, compiler_command, load

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

    monkeypatch.setattr(graph_launch, "_run", run)
    monkeypatch.setattr(graph_launch, "compiler_command", lambda aside: ["c++", str(SOURCE)])
    first = build(tmp_path)
    assert first.read_bytes() == b"built" and build(tmp_path) == first
    assert len(made) == 1
    assert [*tmp_path.iterdir()] == [first], "nothing else is left in the folder"


def test_without_a_compiler_there_is_none_and_what_to_install_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(BuildError, match=r"no C\+\+ compiler is found: install g\+\+"):
        compiler_command(tmp_path)


def test_what_the_compiler_says_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "g++"
    compiler.write_text("#!/bin/sh\necho 'x.cpp:1: error: no such luck' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    with pytest.raises(BuildError, match="no such luck"):
        build(tmp_path)
    assert not [file for file in tmp_path.iterdir() if file.suffix == ".so"]


def test_a_damaged_file_is_an_error_in_words(tmp_path: Path) -> None:
    damaged = tmp_path / "ingot_graph_launch-0.so"
    damaged.write_bytes(os.urandom(1000))
    with pytest.raises(BuildError, match="does not load"):
        load(damaged)
