"""What mlx is told about this machine's memory."""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx
import pytest

import ingot.engine  # noqa: F401  (binds the fast BLAS before mlx)
from ingot.errors import ConfigError
from ingot.kernels import native
from ingot.kernels.device import Device, bound_memory, current

GB = 1 << 30


@pytest.fixture(autouse=True)
def limits() -> Iterator[None]:
    memory, cache = mx.set_memory_limit(64 * GB), mx.set_cache_limit(7)
    yield
    mx.set_memory_limit(memory)
    mx.set_cache_limit(cache)


@pytest.mark.parametrize(("kind", "cache"), [("cuda", 2 * GB), ("metal", 2 * GB), ("cpu", 7)])
def test_mlx_is_held_to_the_budget_and_keeps_no_more_than_a_pass_needs(kind: str, cache: int) -> None:
    bound_memory(Device(kind, "a device", 16 * GB), 10 * GB, 2 * GB)  # type: ignore[arg-type]
    assert mx.set_memory_limit(GB) == 10 * GB
    assert mx.set_cache_limit(GB) == cache


def test_what_metal_wires_is_within_what_the_device_recommends(monkeypatch: pytest.MonkeyPatch) -> None:
    wired: list[int] = []
    monkeypatch.setattr(mx, "set_wired_limit", wired.append)
    bound_memory(Device("metal", "a device", 8 * GB), 10 * GB, GB)
    bound_memory(Device("cuda", "a device", 8 * GB), 10 * GB, GB)
    assert wired == [8 * GB]


here = pytest.mark.skipif(mx.default_device() != mx.cpu, reason="a GPU has its own rules")


@here
@pytest.mark.parametrize("kind", ["metal", "cuda"])
def test_a_cpu_acts_as_the_gpu_that_it_is_told_to_be(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = current()
    monkeypatch.setenv("INGOT_AS", kind)
    assert current().kind == kind and current().memory > 0 and kind in current().name
    assert not native.available(), "a GPU has no use for kernels of CPUs"
    monkeypatch.delenv("INGOT_AS")
    assert current().kind == plain.kind == "cpu"


@here
def test_a_kind_of_device_that_nobody_knows_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INGOT_AS", "vulkan")
    with pytest.raises(ConfigError, match="'vulkan': it may be metal or cuda"):
        current()


def test_a_gpu_acts_as_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ingot.kernels.device._actual", lambda: Device("metal", "a GPU", GB))
    assert current().kind == "metal"
    monkeypatch.setenv("INGOT_AS", "cuda")
    with pytest.raises(ConfigError, match="machines without a GPU"):
        current()
