"""The device that MLX runs on: its name, its memory, and whether it is lost.

MLX submits work to a GPU in batches of commands (on an H100 up to a hundred operations), and frees what they read when
the whole batch is done, not after the last reader. So a pass holds more than it needs at any moment. MLX's limit is set
to the budget, so that it waits for running batches first, and the tenth of the device's memory that the budget leaves
to others is what one batch may exceed it by. `bench.unpacking` shows prediction and peak on a GPU.
"""

from __future__ import annotations

import os
import platform
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from ingot.config.checks import memory_bytes
from ingot.errors import ConfigError, DeviceLost

DeviceKind = Literal["metal", "cuda", "cpu"]
GPUS: Final[tuple[DeviceKind, ...]] = ("metal", "cuda")
DEVICE_SHARE: Final = {"metal": 0.9, "cuda": 0.9, "cpu": 0.7}
"""The default share of the device's memory."""


@dataclass(frozen=True, slots=True)
class Device:
    kind: DeviceKind
    name: str
    memory: int = field(compare=False)  # bytes that MLX may use at most, which changes over time

    @property
    def unfused_attention(self) -> bool:
        """Attention scores of a whole forward batch are in memory at once."""
        return self.kind == "cpu"


def current_device() -> Device:
    """The device that mlx runs on, or the one that it is to act as (`INGOT_AS`). Imports mlx.

    Raises ConfigError where `INGOT_AS` cannot be used.
    """
    actual, rules = _actual(), acting_as()
    if rules is None:
        return actual
    if actual.kind != "cpu":
        raise ConfigError("INGOT_AS is for machines without a GPU: unset it", param="INGOT_AS")
    return Device(rules, f"{actual.name}, acting as {rules}", actual.memory)


def multiply_in_full() -> None:
    """Have MLX multiply float32 numbers on NVIDIA GPUs as they are, not rounded to TF32, which depends on the batch.
    Only before anything was multiplied: MLX asks once."""
    os.environ["MLX_ENABLE_TF32"] = "0"


def acting_as() -> DeviceKind | None:
    """The kind of GPU that this process acts as, though it runs on a CPU: batching, KV state, pipelining, dtypes and
    plain mlx operations are chosen as they would be there."""
    name = os.environ.get("INGOT_AS") or None
    if name is None:
        return None
    for kind in GPUS:
        if name == kind:
            return kind
    raise ConfigError(f"INGOT_AS is {name!r}: it may be {' or '.join(GPUS)}", param="INGOT_AS")


def _actual() -> Device:
    import mlx.core as mx

    info = mx.device_info()
    if mx.default_device().type == mx.cpu:
        return Device("cpu", cpu_name(), available_memory())
    name = str(info.get("device_name", "GPU"))
    if mx.metal.is_available():
        return Device("metal", name, int(info["max_recommended_working_set_size"]))
    return Device("cuda", name, int(info.get("free_memory") or info.get("total_memory") or available_memory()))


def memory_budget(device: Device, asked: str | None) -> int:
    """Bytes for weights and sequences of all models. Raises ConfigError."""
    return int(device.memory * DEVICE_SHARE[device.kind]) if asked is None else memory_bytes(asked, device.memory)


def limit_memory(device: Device, total: int, transient: int) -> None:
    """Limit mlx to `total` bytes, of which it may cache `transient`: on GPUs it would otherwise cache every buffer that
    forward passes free. On CPUs it caches few. Imports mlx."""
    import mlx.core as mx

    mx.set_memory_limit(total)
    if device.kind != "cpu":
        mx.set_cache_limit(transient)
    if device.kind == "metal":
        # Memory that is not wired may be paged out between requests, and takes seconds to page in.
        mx.set_wired_limit(min(total, device.memory))


def active_memory() -> int:
    """Bytes of all arrays. Imports mlx."""
    import mlx.core as mx

    return mx.get_active_memory()


def leave_device() -> None:
    """Wait until the device is idle. The thread that uses mlx calls this last: mlx's threads must not outlive it."""
    import mlx.core as mx

    mx.synchronize()
    mx.clear_streams()


CUDA_LOST: Final = (
    (214, "uncorrectable ECC error", "ECCUncorrectable"),
    (220, "uncorrectable NVLink error", "NvlinkUncorrectable"),
    (226, "invalid access of peer GPU memory over nvlink or a hardware error", "Contained"),
    (700, "an illegal memory access was encountered", "IllegalAddress"),
    (702, "the launch timed out and was terminated", "LaunchTimeout"),
    (709, "context is destroyed", "ContextIsDestroyed"),
    (710, "device-side assert triggered", "Assert"),
    (714, "hardware stack error", "HardwareStackError"),
    (715, "an illegal instruction was encountered", "IllegalInstruction"),
    (716, "misaligned address", "MisalignedAddress"),
    (717, "operation not supported on global/shared address space", "InvalidAddressSpace"),
    (718, "invalid program counter", "InvalidPc"),
    (719, "unspecified launch failure", "LaunchFail"),  # LaunchFailure in the runtime, LAUNCH_FAILED in the driver
    (721, "tensor memory not completely freed", "TensorMemoryLeak"),
)
"""Codes, messages and names of CUDA errors after which the process must be restarted."""
METAL_LOST: Final = (
    *("Caused GPU Hang Error", "CallbackErrorHang"),
    *("Caused GPU Timeout Error", "CallbackErrorTimeout"),
    *("Caused GPU Address Fault Error", "CallbackErrorPageFault"),
    *("victim of GPU error/recovery", "CallbackErrorInnocentVictim"),
    *("for causing prior/excessive GPU errors", "CallbackErrorSubmissionsIgnored"),
    *("device was lost", "device removed"),
)
"""Metal's messages where it aborted a process's work, after which memory is in an unknown state. Out of memory is not
among them."""


def _lost_pattern() -> re.Pattern[str]:
    codes = "|".join(str(code) for code, _, _ in CUDA_LOST)
    names = "|".join(re.sub(r"(?<=[a-zC])(?=[A-Z][a-z])", "_?", name) for _, _, name in CUDA_LOST)
    words = "|".join(map(re.escape, (*(words for _, words, _ in CUDA_LOST), *METAL_LOST)))
    coded = rf"\bcu[a-z].*(?:\(|error\W{{1,2}}|code\W{{1,2}})(?:{codes})\b"
    return re.compile(rf"{words}|cuda_?error_?(?:{names})|{coded}", re.IGNORECASE)


_LOST: Final = _lost_pattern()
_OF_DEVICE: Final = re.compile(r"\bcu(?:[A-Z]|da|blas|dnn|fft)|\bCU(?:DA|BLAS|DNN)|\[METAL\]")


def is_device_lost(error: BaseException) -> bool:
    """Whether the device is lost: by the messages of the error and its causes; or, for other errors of the device, by
    trying it. For the thread that uses mlx."""
    chain: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in chain:
        chain.append(cause)
        cause = cause.__cause__ or cause.__context__
    messages = [str(each) for each in chain if isinstance(each, RuntimeError)]
    if any(isinstance(each, DeviceLost) for each in chain) or any(map(_LOST.search, messages)):
        return True
    return any(map(_OF_DEVICE.search, messages)) and not _device_answers()


def _device_answers() -> bool:
    """Whether the device still computes. The first attempt may report an earlier failure again."""
    import mlx.core as mx

    for _ in range(2):
        try:
            mx.eval(mx.zeros(1) + 1)
            mx.synchronize()
        except RuntimeError:
            continue
        return True
    return False


def available_memory() -> int:
    """Bytes that a new process could use without swapping."""
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        return min(int(fields["MemAvailable"].split()[0]) * 1024, _cgroup_limit())
    return total_memory()


def total_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _cgroup_limit() -> int:
    """The container's memory limit, if there is one."""
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.exists() else "max"
    return total_memory() if text == "max" else int(text)


def cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.lower().startswith(("model name", "hardware")):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
