"""Scores: what is noted down, and where in memory it can be replayed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ingot.kernels
from ingot.kernels.decode_graph.capture import ALIGNMENT_BYTES, CudaReplayStage, GraphCapture
from ingot.kernels.gpu.cuda_graph import ExtensionBuildError, GraphKernelLaunch
from ingot.kernels.gpu.kernel_source import Kernel, LaunchConfig, OutputSpec

SUM = Kernel("test", "sum", ("one", "other"), ("sum",), "", "sum[0] = one[0] + other[0] + one_shape[0];")


def launch(score: GraphCapture, one: mx.array, other: mx.array, size: int) -> mx.array:
    [made] = score(SUM, [one, other], LaunchConfig((), (1, 1, 1), 32, (OutputSpec((size,), mx.float32),)))
    return made


@given(
    sizes=st.lists(st.integers(0, 900), min_size=1, max_size=40),
    picks=st.lists(st.tuples(st.integers(0, 99), st.integers(0, 99)), min_size=40, max_size=40),
)
def test_nothing_that_is_still_read_shares_its_memory(sizes: list[int], picks: list[tuple[int, int]]) -> None:
    score = GraphCapture()
    known = [score.give((7,), mx.float32), score.give((100, 3), mx.float32)]
    for size, (one, other) in zip(sizes, picks, strict=False):
        known.append(launch(score, known[one % len(known)], known[other % len(known)], size))
    score.result = known[-1]
    places, whole = score.layout()

    begun = {id(array): 0 for array in score.given}
    ended = {id(score.result): len(score.notes)}
    for when, note in enumerate(score.notes):
        for array in note.outputs:
            begun[id(array)] = when
        for array in (*note.inputs, *note.outputs):
            ended[id(array)] = max(when, ended.get(id(array), 0))
    alive = [(places[id(array)], array.nbytes, begun[id(array)], ended.get(id(array), 0)) for array in known]
    for number, (begin, size, first, last) in enumerate(alive):
        assert begin % ALIGNMENT_BYTES == 0 and begin + size <= whole
        for other, more, start, end in alive[:number]:
            together = first <= end and start <= last
            assert not together or begin + size <= other or other + more <= begin


def test_memory_that_nobody_reads_any_more_is_used_again() -> None:
    score = GraphCapture()
    x = score.give((1024,), mx.float32)
    for _ in range(50):
        x = launch(score, x, x, 1024)
    score.result = x
    assert score.layout()[1] == 2 * 4096


def test_what_is_neither_given_nor_made_is_kept() -> None:
    score, weight = GraphCapture(), mx.ones(3)
    made = launch(score, score.give((3,), mx.float32), weight, 3)
    launch(score, made, weight, 3)
    assert [id(array) for array in score.fixed()] == [id(weight)]


def test_numbers_in_another_shape_are_the_same_numbers() -> None:
    score = GraphCapture()
    x = score.give((2, 6), mx.float32)
    view = score.shaped(score.shaped(x, (3, 4)), (12,))
    made = launch(score, view, view, 1)
    assert score.origin(view) is x and score.origin(made) is made
    assert score.notes[0].sizes == [12], "kernels are told the shape that they were given"
    assert not score.fixed()


def test_kinds_are_told_once() -> None:
    score = GraphCapture()
    x = score.give((3,), mx.float32)
    launch(score, launch(score, x, x, 3), x, 3)
    assert len(score.kinds) == 1


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

    def graph(self, launches: Sequence[GraphKernelLaunch]) -> int:
        return 42

    def launch(self, graph: int, stream: int) -> None:
        self.calls.append(f"launch {graph} on {stream}")

    def synchronize(self, stream: int) -> None:
        self.calls.append(f"wait for {stream}")

    def forget(self, graph: int) -> None:
        self.calls.append(f"forget {graph}")

    def end(self, stream: int) -> None:
        self.calls.append(f"end {stream}")


def stage(driver: Driver, library: Any) -> CudaReplayStage:
    return CudaReplayStage(None, driver, library)  # type: ignore[arg-type]


def test_without_the_extension_the_host_waits_for_each_graph_and_says_that_this_is_slower() -> None:
    driver = Driver()
    where = stage(driver, ExtensionBuildError("no C++ compiler is found: install g++"))
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
