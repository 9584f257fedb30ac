"""Copies into a device's memory, by threads of their own."""

from __future__ import annotations

import threading

import mlx.core as mx
import pytest

from ingot.kernels.device import current_device
from ingot.kernels.gpu.device_copies import find_device_copies
from tests.kernels.gpu.host_copies import host_copies


@pytest.fixture(autouse=True)
def cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INGOT_AS", "cuda")


def test_an_array_has_what_was_copied_into_it() -> None:
    assert host_copies().works()


def test_copies_that_bring_other_numbers_are_noticed() -> None:
    assert not host_copies(wrong=True).works()


def test_each_thread_has_a_stream_of_its_own() -> None:
    copies = host_copies()
    array = mx.zeros(8, mx.uint32) + 0
    mx.eval(array)
    [address] = copies.locate([array])
    memory, source = copies.pinned(16)
    memory[:] = bytes(range(16))
    threads = [threading.Thread(target=copies.copy, args=([(address + 16 * n, source, 16)],)) for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert array.view(mx.uint8).tolist() == [*range(16)] * 2


def test_where_the_devices_memory_is_the_hosts_there_are_none() -> None:
    assert find_device_copies(current_device()) is None
