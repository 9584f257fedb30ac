"""What mlx is told about this machine's memory, and what its errors say of the device."""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx
import pytest

import ingot.engine  # noqa: F401  (binds the fast BLAS before mlx)
from ingot.errors import ConfigError, DeviceLost, IngotError, Unavailable
from ingot.kernels.cpu import native
from ingot.kernels.device import CUDA_LOST, Device, current_device, is_device_lost, limit_memory
from ingot.kernels.gpu.cuda_graph import CudaError

GB = 1 << 30
FAILED_ON_METAL = "[METAL] Command buffer execution failed"


@pytest.fixture(autouse=True)
def limits() -> Iterator[None]:
    memory, cache = mx.set_memory_limit(64 * GB), mx.set_cache_limit(7)
    yield
    mx.set_memory_limit(memory)
    mx.set_cache_limit(cache)


@pytest.mark.parametrize(("kind", "cache"), [("cuda", 2 * GB), ("metal", 2 * GB), ("cpu", 7)])
def test_mlx_is_held_to_the_budget_and_keeps_no_more_than_a_pass_needs(kind: str, cache: int) -> None:
    limit_memory(Device(kind, "a device", 16 * GB), 10 * GB, 2 * GB)  # type: ignore[arg-type]
    assert mx.set_memory_limit(GB) == 10 * GB
    assert mx.set_cache_limit(GB) == cache


def test_what_metal_wires_is_within_what_the_device_recommends(monkeypatch: pytest.MonkeyPatch) -> None:
    wired: list[int] = []
    monkeypatch.setattr(mx, "set_wired_limit", wired.append)
    limit_memory(Device("metal", "a device", 8 * GB), 10 * GB, GB)
    limit_memory(Device("cuda", "a device", 8 * GB), 10 * GB, GB)
    assert wired == [8 * GB]


here = pytest.mark.skipif(mx.default_device() != mx.cpu, reason="a GPU has its own rules")


@here
@pytest.mark.parametrize("kind", ["metal", "cuda"])
def test_a_cpu_acts_as_the_gpu_that_it_is_told_to_be(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = current_device()
    monkeypatch.setenv("INGOT_AS", kind)
    assert current_device().kind == kind and current_device().memory > 0 and kind in current_device().name
    assert not native.available(), "a GPU has no use for kernels of CPUs"
    monkeypatch.delenv("INGOT_AS")
    assert current_device().kind == plain.kind == "cpu"


@here
def test_a_kind_of_device_that_nobody_knows_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INGOT_AS", "vulkan")
    with pytest.raises(ConfigError, match="'vulkan': it may be metal or cuda"):
        current_device()


def test_a_gpu_acts_as_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ingot.kernels.device._actual", lambda: Device("metal", "a GPU", GB))
    assert current_device().kind == "metal"
    monkeypatch.setenv("INGOT_AS", "cuda")
    with pytest.raises(ConfigError, match="machines without a GPU"):
        current_device()


@pytest.mark.parametrize(
    "text",
    [
        "cudaStreamSynchronize(stream) failed: unspecified launch failure",
        "cudaGraphLaunch(graph_exec_, stream_) failed: an illegal memory access was encountered",
        "cudaEventRecord(*event_, stream) failed: device-side assert triggered",
        "parallel_for failed: cudaErrorIllegalAddress: something",
        "cuLaunchKernel failed: CUDA_ERROR_LAUNCH_FAILED",
        "CUDA error 719",
        f"{FAILED_ON_METAL}: Caused GPU Hang Error (00000003:kIOGPUCommandBufferCallbackErrorHang).",
        f"{FAILED_ON_METAL}: Discarded (victim of GPU error/recovery) "
        "(00000005:kIOGPUCommandBufferCallbackErrorInnocentVictim).",
        f"{FAILED_ON_METAL}: Ignored (for causing prior/excessive GPU errors) "
        "(00000004:kIOGPUCommandBufferCallbackErrorSubmissionsIgnored).",
    ],
)
def test_errors_that_stick_say_that_the_device_is_lost(text: str) -> None:
    assert is_device_lost(RuntimeError(text))


@pytest.mark.parametrize("code", [code for code, _, _ in CUDA_LOST])
def test_an_error_of_the_driver_is_known_by_its_number(code: int) -> None:
    assert is_device_lost(CudaError(f"cuStreamSynchronize: unknown ({code})"))


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("cudaMallocAsync(&data, size, stream) failed: out of memory"),
        RuntimeError("[malloc] Unable to allocate 719 bytes."),
        RuntimeError(f"{FAILED_ON_METAL}: Insufficient Memory (00000008:kIOGPUCommandBufferCallbackErrorOutOfMemory)."),
        RuntimeError("cuLaunchKernel failed: too many resources requested for launch"),
        RuntimeError("cudaMalloc of 719 bytes failed: out of memory"),
        RuntimeError("[matmul] Last dimension of first input with shape (1,719) must match"),
        ValueError("this prompt speaks of an unspecified launch failure"),
        IngotError("this one of a device-side assert triggered"),
    ],
)
def test_too_little_memory_and_other_faults_do_not(error: Exception) -> None:
    assert not is_device_lost(error)


def test_what_came_of_a_lost_device_is_one() -> None:
    lost = RuntimeError("cudaStreamSynchronize(stream) failed: unspecified launch failure")
    wrapped, amid = Unavailable("a rank is gone"), ValueError("while that was handled")
    wrapped.__cause__, amid.__context__ = lost, lost
    lost.__context__ = wrapped  # a circle
    assert is_device_lost(wrapped) and is_device_lost(amid) and is_device_lost(DeviceLost())


def test_another_error_of_the_device_is_told_by_trying_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    error = RuntimeError("cublasLtMatmul(handle) failed with code: 14")
    told = [error]

    def fail(*arrays: object) -> None:
        if told:
            raise told.pop()

    monkeypatch.setattr(mx, "eval", fail)
    assert not is_device_lost(error), "it told of the same once more, and then went on"
    told += [error, error]
    assert is_device_lost(error)
