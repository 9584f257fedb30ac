"""Copies to a device whose memory is the host's."""

from __future__ import annotations

import ctypes
import threading

from ingot.kernels.decode_graph.capture import locate_arrays
from ingot.kernels.device import current_device
from ingot.kernels.gpu.device_copies import DeviceCopies
from ingot.kernels.gpu.launcher import required_launcher
from ingot.models.experts.files import SparePiece, page_memory


class HostDriver:
    """Copies at once, and notes on which streams threads wait."""

    def __init__(self, wrong: bool = False) -> None:
        self.kept: list[SparePiece] = []
        self.streams: dict[int, set[int]] = {}
        self._wrong = wrong

    def pinned(self, size: int) -> int:
        self.kept.append(page_memory(size))
        return self.kept[-1].address

    def enter(self) -> None:
        self.streams[threading.get_ident()] = set()

    def stream(self) -> int:
        return threading.get_ident()

    def copy_to_device(self, to: int, source: int, size: int, stream: int) -> None:
        self.streams[threading.get_ident()].add(stream)
        ctypes.memmove(to, source, size - 4 * self._wrong)

    def synchronize(self, stream: int) -> None:
        assert stream == threading.get_ident()


def host_copies(wrong: bool = False) -> DeviceCopies:
    run = required_launcher(current_device())
    return DeviceCopies(HostDriver(wrong), lambda arrays: locate_arrays(run, arrays))  # type: ignore[arg-type]
