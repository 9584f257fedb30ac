"""How graphs are launched, and that nothing on a device waits for anything but its own stream."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest

import ingot.kernels
from ingot.kernels.decode_graph.capture import GraphStage
from ingot.kernels.gpu.cuda_graph import Launch
from ingot.kernels.gpu.graph_launch import BuildError

SOURCES = sorted(Path(ingot.kernels.__file__).parent.glob("*/source/*"))
WAITING = re.compile(
    r"ld\.acquire|ld\.volatile|globaltimer|nanosleep|__threadfence_system|atomic_thread_fence\w*system"
)


@pytest.mark.parametrize("source", SOURCES, ids=lambda file: f"{file.parts[-3]}/{file.name}")
def test_no_kernel_watches_memory_that_others_write(source: Path) -> None:
    """Loading a kernel waits for those that run: one that waited for something launched later would never end."""
    assert not WAITING.search(source.read_text())


class Driver:
    def __init__(self) -> None:
        self.calls: list[str] = []

    def stream(self) -> int:
        self.calls.append("stream")
        return 7

    def graph(self, launches: Sequence[Launch]) -> int:
        return 42

    def launch(self, graph: int, stream: int) -> None:
        self.calls.append(f"launch {graph} on {stream}")

    def synchronize(self, stream: int) -> None:
        self.calls.append(f"wait for {stream}")

    def forget(self, graph: int) -> None:
        self.calls.append(f"forget {graph}")

    def end(self, stream: int) -> None:
        self.calls.append(f"end {stream}")


def stage(driver: Driver, library: Any) -> GraphStage:
    return GraphStage(None, driver, library)  # type: ignore[arg-type]


def test_without_the_extension_the_host_waits_for_each_graph_and_says_that_this_is_slower() -> None:
    driver = Driver()
    where = stage(driver, BuildError("no C++ compiler is found: install g++"))
    assert where.slower is not None and "install g++" in where.slower
    graph = where.launched([])
    done = graph(mx.array([1]) + 1)
    assert done.item() == 2
    del graph, where
    assert driver.calls == ["stream", "launch 42 on 7", "wait for 7", "forget 42", "end 7"]


def test_with_the_extension_graphs_are_operations_of_mlx_and_own_their_handles() -> None:
    driver, launched = Driver(), list[tuple[Any, int]]()

    def launch(graph: Any, before: mx.array) -> mx.array:
        launched.append((graph, before.item()))
        return before

    where = stage(driver, SimpleNamespace(launch=launch, Graph=lambda handle: ("graph", handle)))
    assert where.slower is None
    where.launched([])(mx.array([3]))
    assert launched == [(("graph", 42), 3)] and driver.calls == []
