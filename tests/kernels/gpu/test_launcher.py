"""What is compiled for CUDA, when, and what MLX is then asked to launch."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from ingot.kernels.gpu.cubins import CubinFolder
from ingot.kernels.gpu.kernel_source import TYPES, Rehearsal, program
from ingot.kernels.gpu.launcher import CudaLauncher
from ingot.kernels.gpu.texts import Kernel, Output, Work
from ingot.kernels.paged.slabs import Slabs
from ingot.kernels.paged.tuning import TUNINGS
from ingot.kernels.paged_attention.inputs import Rows, page_copies, token_slots
from ingot.kernels.paged_attention.kernels import PagedAttention
from ingot.kernels.paged_attention.shapes import Shape
from tests.kernels.gpu.fake_nvrtc import fake_nvrtc, needs_compiler
from tests.kernels.paged_attention.memory import START

pytestmark = needs_compiler
Call = dict[str, Any]
SLABS, EVERY = 3, ["locate", "write", "copy", "attend_wide", "merge"]
HALVE = Kernel("test", "halve", ("x", "y_0", "y_1"), ("z",), "", "z[0] = x[x_strides[0] * x_shape[1]] / 2;")


class Device:
    """Stands in for MLX's launching and MLX's compiling."""

    def __init__(self, folder: Path, kept: CubinFolder | None = None) -> None:
        self.calls: list[Call] = []
        self.by_mlx: list[str] = []
        self.fault: str | None = None
        self.run = CudaLauncher(fake_nvrtc(folder), "sm_90a", kept, self.compiled_by_mlx)

    def precompiled(self, **call: Any) -> list[mx.array]:
        if self.fault is not None:
            raise RuntimeError(self.fault)
        self.calls.append(call)
        return _zeros(zip(call["output_shapes"], call["output_dtypes"], strict=True))

    def compiled_by_mlx(self, kernel: Kernel, inputs: list[mx.array], work: Work) -> list[mx.array]:
        self.by_mlx.append(kernel.name)
        return _zeros(work.outputs)


def _zeros(outputs: Any) -> list[mx.array]:
    return [mx.zeros(shape, dtype) for shape, dtype in outputs]


@pytest.fixture
def device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Device:
    made = Device(tmp_path, CubinFolder(tmp_path / "kernels"))
    monkeypatch.setattr(mx.fast, "precompiled_cuda_kernel", lambda **call: made.precompiled(**call))
    return made


def halve(run: Callable[..., list[mx.array]], dtype: mx.Dtype = mx.float32, kernel: Kernel = HALVE) -> mx.array:
    x, y = mx.zeros((4, 6), dtype), mx.zeros(3, mx.int32)
    work = Work((("T", dtype), ("N", 3), ("DEEP", True)), (2, 3, 4), 64, (Output((5,), mx.float16),))
    return run(kernel, [x, y, y], work)[0]


def every_kernel(run: Any) -> None:
    slabs = Slabs(*[[mx.zeros((2, 2, 64, 32), mx.bfloat16)] * SLABS] * 2)
    attention = PagedAttention(run, TUNINGS["cuda"], Shape(12, 2, 32, 32), mx.bfloat16, scale=1.0)
    keys = mx.zeros((2, 5, 32), mx.bfloat16).transpose(1, 0, 2)
    done = attention.write(keys, keys, token_slots([(0, place) for place in range(5)]), slabs, START)
    done = attention.copy(page_copies([(0, 1, 3)]), slabs, done)
    attention.attend(mx.zeros((3, 12, 32), mx.bfloat16), Rows.of([[0, 1], [0, 1], [0] * 9], [7, 9, 540]), slabs, done)


def test_arrays_are_passed_first_then_the_sizes_that_the_text_reads(device: Device) -> None:
    assert halve(device.run).shape == (5,)
    [call] = device.calls
    arrays = "const float* x, const int32_t* y_0, const int32_t* y_1, __half* z"
    function = (
        f'extern "C" __global__ void {call["name"]}({arrays}, int x_size_0, int x_size_1) {{\n'
        "const int x_shape[] = {x_size_0, x_size_1};\n"
        "const int64_t x_strides[] = {(int64_t)1 * x_size_1, (int64_t)1};\n"
        f"using T = float;\nconstexpr int N = 3;\nconstexpr bool DEEP = true;\nAFTER_OTHERS()\n{HALVE.body}\n}}\n"
    )
    assert call["compiled_source"].decode().endswith(function)
    assert call["scalars"] == [4, 6]
    assert (call["grid"], call["threadgroup"]) == ((2 * 64, 3, 4), (64, 1, 1))
    assert (call["output_shapes"], call["output_dtypes"]) == ([(5,)], [mx.float16])


def test_shared_memory_that_a_text_does_not_declare_is_asked_for_at_launch(device: Device) -> None:
    x, y = mx.zeros((4, 6)), mx.zeros(3, mx.int32)
    for lent in (0, 100_000):
        device.run(HALVE, [x, y, y], Work((), (1, 1, 1), 32, (Output((5,), mx.float16),), lent))
    assert [call["shared_memory"] for call in device.calls] == [0, 100_000]


def test_every_call_fits_the_signature_that_was_compiled(device: Device) -> None:
    for _ in range(2):
        every_kernel(device.run)
    assert len(device.calls) == 2 * (SLABS + 4) and not device.by_mlx
    for call in device.calls:
        source = call["compiled_source"].decode()
        [arguments] = re.findall(rf"void {call['name']}\((.*)\) {{", source)
        inputs = [f"const {TYPES[array.dtype]}*" for array in call["inputs"]]
        outputs = [f"{TYPES[dtype]}*" for dtype in call["output_dtypes"]]
        passed = [*inputs, *outputs, *["int"] * len(call["scalars"])]
        assert [argument.rsplit(" ", 1)[0] for argument in arguments.split(", ")] == passed


def test_what_a_kernel_reads_by_strides_lies_as_it_was_said(device: Device) -> None:
    every_kernel(device.run)
    write = next(call for call in device.calls if "_write_" in call["name"])
    assert write["scalars"] == [5, 2, 32, 5, 2, 32]
    for keys in write["inputs"][:2]:
        mx.eval(keys)
        assert memoryview(keys.view(mx.uint16)).c_contiguous


def test_a_kind_is_compiled_once_and_one_of_another_dtype_by_itself(device: Device) -> None:
    for dtype in (mx.float32, mx.float32, mx.bfloat16, mx.float32):
        halve(device.run, dtype)
    assert (device.run.compilation.compiled, len(device.calls)) == (2, 4)
    assert len({call["name"] for call in device.calls}) == 2


def test_the_next_process_finds_what_this_one_compiled(device: Device, tmp_path: Path) -> None:
    every_kernel(device.run)
    assert device.run.compilation.compiled == len(EVERY)
    again = Device(tmp_path, CubinFolder(tmp_path / "kernels"))
    rehearsal = Rehearsal()
    every_kernel(rehearsal)
    again.run.prepare(rehearsal.kinds)
    assert (again.run.compilation.compiled, again.run.compilation.found) == (0, len(EVERY))
    assert str(again.run.compilation).startswith(f"0 compiled, {len(EVERY)} found in {tmp_path / 'kernels'}, in ")
    assert again.run.compilation.slower is None


def test_a_damaged_file_is_compiled_anew(device: Device, tmp_path: Path) -> None:
    halve(device.run)
    [file] = (tmp_path / "kernels").iterdir()
    file.write_bytes(file.read_bytes()[:-1])
    again = Device(tmp_path, CubinFolder(tmp_path / "kernels"))
    halve(again.run)
    assert (again.run.compilation.compiled, again.run.compilation.found) == (1, 0)


def test_what_was_prepared_is_not_compiled_when_it_is_launched(device: Device) -> None:
    rehearsal = Rehearsal()
    every_kernel(rehearsal)
    assert [kind.kernel.name for kind in rehearsal.kinds] == EVERY
    device.run.prepare(rehearsal.kinds)
    seconds = device.run.compilation.seconds
    every_kernel(device.run)
    assert device.run.compilation.compiled == len(EVERY) and device.run.compilation.seconds == seconds


def test_what_does_not_compile_is_compiled_by_mlx_and_the_log_says_why(
    device: Device, caplog: pytest.LogCaptureFixture
) -> None:
    broken = HALVE._replace(body="#error")
    for _ in range(2):
        halve(device.run, kernel=broken)
    assert device.by_mlx == ["halve", "halve"] and not device.calls
    assert "halve: MLX compiles this kernel, which takes longer: ingot_test_halve_" in caplog.text
    assert "error: it was to fail" in caplog.text
    assert device.run.compilation.by_mlx.keys() == {"test.halve"}


def test_what_does_not_launch_is_compiled_by_mlx_and_the_log_says_why(
    device: Device, caplog: pytest.LogCaptureFixture
) -> None:
    device.fault = "Failed to load compiled kernel: no image"
    halve(device.run)
    device.fault = None
    halve(device.run)
    assert device.by_mlx == ["halve", "halve"] and not device.calls
    assert "Failed to load compiled kernel: no image" in caplog.text
    said = "MLX compiles kernels when they are first used, which takes longer: test.halve (Failed to load compiled"
    assert str(device.run.compilation.slower).startswith(said)


def test_without_a_folder_kernels_are_compiled_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(tmp_path)
    monkeypatch.setattr(mx.fast, "precompiled_cuda_kernel", lambda **call: device.precompiled(**call))
    halve(device.run)
    assert len(device.calls) == 1


def test_numbers_of_another_width_are_another_kind_though_the_template_is_the_same(device: Device) -> None:
    work = Work((("N", 1),), (1, 1, 1), 32, (Output((1,), mx.float32),))
    for dtype in (mx.float32, mx.bfloat16, mx.float32):
        device.run(HALVE, [mx.zeros((4, 6), dtype), *[mx.zeros(3, mx.int32)] * 2], work)
    first, second, third = (call["compiled_source"].decode() for call in device.calls)
    assert "const float* x" in first and "const __nv_bfloat16* x" in second and third == first


def test_another_text_is_another_name() -> None:
    rehearsal = Rehearsal()
    for dtype in (mx.float32, mx.float16):
        halve(rehearsal, dtype)
    halve(rehearsal, kernel=HALVE._replace(body="z[0] = 1;"))
    assert len({program(kind).name for kind in rehearsal.kinds}) == 3
