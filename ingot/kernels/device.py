"""What MLX runs on here: its name, its memory, and the dtypes that suit it."""

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
"""The part of the device's memory that is used when nobody says otherwise."""


@dataclass(frozen=True, slots=True)
class Device:
    kind: DeviceKind
    name: str
    memory: int = field(compare=False)  # bytes MLX may use at most: another number at another time

    @property
    def unfused_attention(self) -> bool:
        """Attention scores of a whole launch exist in memory at once."""
        return self.kind == "cpu"


def current_device() -> Device:
    """The device that this process's mlx runs on, or on whose rules it is to act (`INGOT_AS`). Imports mlx.

    Raises ConfigError where `INGOT_AS` asks for what cannot be.
    """
    here, rules = _actual(), acting_as()
    if rules is None:
        return here
    if here.kind != "cpu":
        raise ConfigError("INGOT_AS is for machines without a GPU: unset it", param="INGOT_AS")
    return Device(rules, f"{here.name}, acting as {rules}", here.memory)


def acting_as() -> DeviceKind | None:
    """The kind of GPU whose rules hold in this process, though it runs on a CPU: launches, states, pipelining, number
    formats and plain mlx operations are chosen as they would be there."""
    asked = os.environ.get("INGOT_AS") or None
    if asked is None:
        return None
    for kind in GPUS:
        if asked == kind:
            return kind
    raise ConfigError(f"INGOT_AS is {asked!r}: it may be {' or '.join(GPUS)}", param="INGOT_AS")


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
    """Hold mlx to a budget of `total` bytes, of which it may keep `transient` for later: on GPUs it would hold on to
    every buffer that forward passes gave back. On CPUs it keeps few by itself. Imports mlx."""
    import mlx.core as mx

    mx.set_memory_limit(total)
    if device.kind != "cpu":
        mx.set_cache_limit(transient)
    if device.kind == "metal":
        # What is not wired may be paged out between two requests, and takes seconds to come back.
        mx.set_wired_limit(min(total, device.memory))


def active_memory() -> int:
    """Bytes that arrays have. Imports mlx."""
    import mlx.core as mx

    return mx.get_active_memory()


def leave_device() -> None:
    """Wait for what the device still does. The thread that uses mlx calls it last: mlx's threads must not outlive
    it."""
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
"""Codes, words and names of CUDA's errors after which all further work of the process fails: it has to be started
again."""
METAL_LOST: Final = (
    *("Caused GPU Hang Error", "CallbackErrorHang"),
    *("Caused GPU Timeout Error", "CallbackErrorTimeout"),
    *("Caused GPU Address Fault Error", "CallbackErrorPageFault"),
    *("victim of GPU error/recovery", "CallbackErrorInnocentVictim"),
    *("for causing prior/excessive GPU errors", "CallbackErrorSubmissionsIgnored"),
    *("device was lost", "device removed"),
)
"""What Metal says where it gave up what a process computes: nobody knows what was written by then. Too little memory is
not among them."""


def _lost_pattern() -> re.Pattern[str]:
    codes = "|".join(str(code) for code, _, _ in CUDA_LOST)
    names = "|".join(re.sub(r"(?<=[a-zC])(?=[A-Z][a-z])", "_?", name) for _, _, name in CUDA_LOST)
    words = "|".join(map(re.escape, (*(words for _, words, _ in CUDA_LOST), *METAL_LOST)))
    coded = rf"\bcu[a-z].*(?:\(|error\W{{1,2}}|code\W{{1,2}})(?:{codes})\b"
    return re.compile(rf"{words}|cuda_?error_?(?:{names})|{coded}", re.IGNORECASE)


_LOST: Final = _lost_pattern()
_OF_DEVICE: Final = re.compile(r"\bcu(?:[A-Z]|da|blas|dnn|fft)|\bCU(?:DA|BLAS|DNN)|\[METAL\]")


def is_device_lost(error: BaseException) -> bool:
    """Whether the device is lost: by what the error says, or those that it came of; where that is another error of the
    device's, by trying. The thread that uses mlx calls it."""
    chain: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in chain:
        chain.append(cause)
        cause = cause.__cause__ or cause.__context__
    said = [str(each) for each in chain if isinstance(each, RuntimeError)]
    if any(isinstance(each, DeviceLost) for each in chain) or any(map(_LOST.search, said)):
        return True
    return any(map(_OF_DEVICE.search, said)) and not _device_answers()


def _device_answers() -> bool:
    """Whether the device still computes anything. The first try may be told again what failed before it."""
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
