"""What MLX is asked for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from ingot.kernels.device import Device
from ingot.kernels.gpu import launchers
from ingot.kernels.gpu.launcher import CudaLauncher
from ingot.kernels.gpu.launchers import MlxLauncher, compilation, launcher
from ingot.kernels.gpu.nvrtc import Nvrtc, NvrtcError
from ingot.kernels.gpu.texts import Kernel, Prelude, Work
from ingot.kernels.paged.slabs import Slabs
from ingot.kernels.paged.tuning import TUNINGS
from ingot.kernels.paged_attention.inputs import Rows, token_slots
from ingot.kernels.paged_attention.kernels import PagedAttention
from ingot.kernels.paged_attention.shapes import Shape
from tests.kernels.gpu.fake_nvrtc import fake_nvrtc, needs_compiler
from tests.kernels.paged_attention.memory import START

H200 = Device("cuda", "H200", 1)


@pytest.fixture
def on_cuda(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """As far as choosing a launcher goes."""
    monkeypatch.delenv("INGOT_AS", raising=False)
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    monkeypatch.setattr(mx, "device_info", lambda: {"compute_capability_major": 9, "compute_capability_minor": 0})
    monkeypatch.setattr(launchers, "USUAL", tmp_path / "kernels")
    launcher.cache_clear()
    yield
    launcher.cache_clear()


@needs_compiler
def test_on_cuda_kernels_are_compiled_here_for_the_very_device(
    on_cuda: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(Nvrtc, "find", lambda: fake_nvrtc(tmp_path))
    run = launcher(H200)
    assert isinstance(run, CudaLauncher) and run._architecture == "sm_90a"
    assert str(compilation(H200)) == "0 compiled, in 0.0 s" and (tmp_path / "kernels").is_dir()


def test_without_nvrtc_mlx_compiles_all_kernels_and_it_is_said(on_cuda: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere() -> Nvrtc:
        raise NvrtcError("none of libnvrtc.so.13 is found")

    monkeypatch.setattr(Nvrtc, "find", nowhere)
    assert isinstance(launcher(H200), MlxLauncher)
    done = compilation(H200)
    assert done is not None and "all (none of libnvrtc.so.13 is found)" in str(done.slower)


def test_on_metal_compiling_is_not_ours(on_cuda: None) -> None:
    assert isinstance(launcher(Device("metal", "M5", 1)), MlxLauncher)
    assert compilation(Device("metal", "M5", 1)) is None


@needs_compiler
def test_a_folder_that_cannot_be_used_is_said_and_done_without(
    on_cuda: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "kernels").touch()
    monkeypatch.setattr(Nvrtc, "find", lambda: fake_nvrtc(tmp_path))
    assert isinstance(launcher(H200), CudaLauncher)
    assert "compiled kernels are not kept" in caplog.text


@pytest.mark.parametrize("prelude", ["cuda", "metal"])
def test_a_kernel_is_made_once_and_called_with_threads_not_groups(
    prelude: Prelude, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[dict[str, Any]] = []
    called: dict[str, dict[str, Any]] = {}

    def make(**options: Any) -> Any:
        def run(**call: Any) -> list[mx.array]:
            called.setdefault(options["name"].split("_")[2], call)
            return list(map(mx.zeros, call["output_shapes"], call["output_dtypes"]))

        made.append(options)
        return run

    monkeypatch.setattr(mx.fast, f"{prelude}_kernel", make)
    slabs = Slabs(*[[mx.zeros((2, 2, 64, 32), mx.float16)] * 3] * 2)
    attention = PagedAttention(MlxLauncher(prelude), TUNINGS[prelude], Shape(12, 2, 32, 32), mx.float16, scale=1.0)
    keys = mx.zeros((5, 2, 32), mx.float16)
    for _ in range(2):
        done = attention.write(keys, keys, token_slots([(0, place) for place in range(5)]), slabs, START)
        attended = attention.attend(
            mx.zeros((3, 12, 32), mx.float16), Rows.of([[0, 1] * 5] * 3, [7, 9, 600]), slabs, done
        )
    assert attended.shape == (3, 12, 32) and attended.dtype == mx.float16

    names = [options["name"].split("_")[2] for options in made]
    located = ["locate"] if prelude == "cuda" else []
    assert names == [*located, "write", "attend", "merge"], "once each"
    assert not any(options["ensure_row_contiguous"] for options in made), "a slab must not be copied"
    write, attend, merge = called["write"], called["attend"], called["merge"]
    assert (write["grid"], write["threadgroup"]) == ((5 * 128, 2, 1), (128, 1, 1))
    parts = 1 if prelude == "cuda" else 2
    assert (attend["grid"], attend["threadgroup"]) == ((2 * parts * 128, 2, 3), (128, 1, 1))
    assert (merge["grid"], merge["threadgroup"]) == ((128, 12, 3), (128, 1, 1))
    assert [len(call["inputs"]) for call in called.values()] == [len(options["input_names"]) for options in made]
    assert dict(attend["template"])["PART"] == (16 if prelude == "cuda" else 3)
    assert attend["output_shapes"] == [(3, 12, 2, 36), (1,)]


def test_mlx_is_asked_for_shared_memory_that_a_text_does_not_declare(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[dict[str, Any]] = []
    monkeypatch.setattr(mx.fast, "cuda_kernel", lambda **options: made.append(options) or (lambda **call: []))
    run, kernel = MlxLauncher("cuda"), Kernel("test", "none", ("x",), ("y",), "", "")
    for lent in (0, 100_000, 100_000):
        run(kernel, [mx.zeros(1)], Work((), (1, 1, 1), 32, (), lent))
    assert [options.get("shared_memory", 0) for options in made] == [0, 100_000]
