"""Kernels that MLX finds by name."""

from __future__ import annotations

import os
from pathlib import Path

import mlx.core as mx
import pytest

from ingot.kernels.gpu.launcher import CudaLauncher
from ingot.kernels.gpu.shelf import NO_BYTES, VARIABLE, Shelf
from tests.kernels.gpu.fake_nvrtc import fake_nvrtc, needs_compiler
from tests.kernels.gpu.test_launcher import Device, halve

pytestmark = needs_compiler


@pytest.fixture
def device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Device:
    made = Device(tmp_path)
    shelf = Shelf(tmp_path / "shelf")
    made.run = CudaLauncher(fake_nvrtc(tmp_path), "sm_90a", None, made.compiled_by_mlx, shelf)
    monkeypatch.setattr(mx.fast, "precompiled_cuda_kernel", lambda **call: made.precompiled(**call))
    return made


def test_a_launch_carries_a_name_under_which_mlx_finds_the_bytes(device: Device, tmp_path: Path) -> None:
    for dtype in (mx.float32, mx.bfloat16):
        halve(device.run, dtype)
    assert [call["compiled_source"] for call in device.calls] == [b"", b""]
    for call in device.calls:
        kernel = tmp_path / "shelf" / f"{call['name']}_{NO_BYTES:x}.ptx"
        name, function = kernel.with_suffix(".txt").read_text().split()
        assert name == call["name"]
        assert f"void {function}(" in kernel.read_text()
    assert len({call["name"] for call in device.calls}) == 2


def test_where_mlx_looks_elsewhere_the_bytes_are_carried_after_all(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    def looks_elsewhere(**call: object) -> list[mx.array]:
        if not call["compiled_source"]:
            raise RuntimeError("Failed to load compiled kernel")
        return device.precompiled(**call)

    monkeypatch.setattr(mx.fast, "precompiled_cuda_kernel", looks_elsewhere)
    for _ in range(3):
        halve(device.run)
    assert len(device.calls) == 3 and not device.by_mlx
    for call in device.calls:
        assert f"void {call['name']}(".encode() in call["compiled_source"]


def test_mlx_is_told_of_the_folder_unless_it_was_told_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv(VARIABLE, raising=False)
    assert Shelf.usual().folder == Path(os.environ[VARIABLE]) == tmp_path / ".cache/ingot/mlx-kernels"
    monkeypatch.setenv(VARIABLE, str(tmp_path / "other"))
    assert Shelf.usual().folder == tmp_path / "other"


def test_what_lies_there_is_not_written_again(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path)
    shelf.lay("a", "f", b"123")
    [kernel] = tmp_path.glob("*.ptx")
    before = kernel.stat().st_mtime_ns
    shelf.lay("a", "f", b"123")
    assert kernel.stat().st_mtime_ns == before
    shelf.lay("a", "f", b"1234")
    assert kernel.read_bytes() == b"1234" and len(list(tmp_path.iterdir())) == 2


def test_what_was_damaged_there_is_written_again(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path)
    shelf.lay("a", "f", b"123")
    [kernel] = tmp_path.glob("*.ptx")
    kernel.write_bytes(b"1x3")
    shelf.lay("a", "f", b"123")
    assert kernel.read_bytes() == b"123"


def test_a_folder_that_others_write_to_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o777)
    with pytest.raises(PermissionError, match="not this user's alone"):
        Shelf(tmp_path / "shared")
