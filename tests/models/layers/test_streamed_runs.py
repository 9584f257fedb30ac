"""Decode graphs whose experts are read when they are needed: what is launched, checked, and launched again."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from ingot.models.adapter import ModelAdapter
from ingot.models.experts import guessing
from ingot.models.experts.files import WeightsUnreadable, read_bytes
from ingot.models.experts.slots import NOWHERE
from ingot.models.experts.streaming import LayerExperts
from ingot.models.layers import graph_layers, streamed_runs
from ingot.models.layers.decode_graph import DecodeGraphs, decode_graphs_of
from ingot.models.layers.streamed_runs import GraphRun, RunExperts
from tests.kernels.paged_attention.memory import emulated
from tests.launches import computed, decoded
from tests.models.experts.mixtures import IN_GRAPHS, PACKINGS, PROMPT, loaded, saved, store_of

pytestmark = [emulated, pytest.mark.usefixtures("on_cuda")]


@pytest.fixture
def on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INGOT_AS", "cuda")
    monkeypatch.setattr(graph_layers, "MOST_STREAMED", 1)
    monkeypatch.setattr(guessing.GuessTrial, "begin_pass", lambda trial, tokens: None)  # what is guessed is read


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return saved("qwen3_moe", tmp_path, PACKINGS["4 bits"], num_hidden_layers=4, **IN_GRAPHS)


def stack_of(adapter: ModelAdapter) -> DecodeGraphs:
    stack = decode_graphs_of(adapter.model)
    assert stack is not None and stack.refusal is None
    return stack


def runs_of(adapter: ModelAdapter) -> list[GraphRun]:
    return [run for run in stack_of(adapter).parts.runs if isinstance(run, GraphRun)]


class Session:
    """Rows behind a prompt."""

    def __init__(self, adapter: ModelAdapter, rows: int) -> None:
        self.adapter, self.states, self.events = adapter, adapter.new_batch_state(), list[str]()
        self.rows = [self.states.new() for _ in range(rows)]
        for number, row in enumerate(self.rows):
            computed(adapter, self.states, row, PROMPT[number:7])

    def step(self, token: int) -> mx.array:
        self.events.clear()
        return decoded(self.adapter, self.states, self.rows, [token + n for n, _ in enumerate(self.rows)])


class NotedSession(Session):
    """Notes what is launched and what the host waits for."""

    def __init__(self, adapter: ModelAdapter, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(adapter, rows)
        numbers = {id(run.experts): number for number, run in enumerate(runs_of(adapter))}
        choices, compute = RunExperts.choices, LayerExperts.compute
        own = streamed_runs.LaunchedRun

        def noted_choices(run: RunExperts, *given: object) -> list[np.ndarray]:
            self.events.append(f"check {numbers[id(run)]}")
            return choices(run, *given)  # type: ignore[arg-type]

        def noted_compute(layer: LayerExperts, *given: object) -> mx.array:
            self.events.append(f"layer {layer.number} by itself")
            return compute(layer, *given)  # type: ignore[arg-type]

        def noted_launch(*given: object) -> object:
            self.events.append("launch")
            return own(*given)  # type: ignore[arg-type]

        monkeypatch.setattr(RunExperts, "choices", noted_choices)
        monkeypatch.setattr(LayerExperts, "compute", noted_compute)
        monkeypatch.setattr(streamed_runs, "LaunchedRun", noted_launch)


def forget(layer: LayerExperts, kept: Sequence[int] = ()) -> None:
    """As though none of its other experts had been read."""
    for expert in np.flatnonzero(layer.slots.slot_of != NOWHERE).tolist():
        if expert not in kept:
            layer.slots.drop(expert)


def test_runs_whose_experts_are_all_there_are_launched_before_the_host_waits(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = NotedSession(loaded(folder, 2.0, always=True), 1, monkeypatch)
    session.step(5)
    assert session.events == ["launch"] * 3 + ["check 0", "check 1", "check 2"]


@pytest.mark.parametrize("is_reading", [False, True])
def test_a_run_without_an_expert_is_launched_again_and_so_are_those_behind_it_up_to_one_whose_experts_are_being_read(
    is_reading: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RunExperts, "is_reading", is_reading)
    adapter = loaded(folder, 0.7)
    whole = Session(loaded(folder), 1)
    session = NotedSession(adapter, 1, monkeypatch)
    store = store_of(adapter)
    for token in (5, 8, 11):
        session.step(token)
        whole.step(token)
    forget(store.layers[1])
    before = store.stats
    found = session.step(3)
    assert session.events[:5] == ["launch"] * 3 + ["check 0", "check 1"]
    again = ["launch", "check 1", "launch", "check 2"] if is_reading else ["launch", "launch", "check 1", "check 2"]
    assert session.events[-4:] == again
    assert store.stats.since(before).misses >= 2
    assert mx.array_equal(found, whole.step(3))
    store.check()


def test_what_later_runs_have_chosen_is_read_while_a_missing_expert_is(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = loaded(folder, 0.7)
    session, store, asked = NotedSession(adapter, 1, monkeypatch), store_of(adapter), list[int]()
    session.step(5)
    for layer in store.layers:
        forget(layer)
    for layer in store.layers[1:]:
        monkeypatch.setattr(layer, "read_ahead", lambda chosen, n=layer.number, **_: asked.append(n))
    session.step(8)
    assert asked[:2] == [1, 2]
    assert session.events[:6] == ["launch"] * 3 + ["check 0", "check 1", "check 2"]


def test_without_guesses_runs_are_launched_ahead_where_experts_are_mostly_there(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = loaded(folder, 0.7, read_ahead=False)
    session = NotedSession(adapter, 1, monkeypatch)
    for chance, launches in ((1.0, 3), (0.6, 1), (0.0, 1)):
        for run in runs_of(adapter):
            assert run.experts is not None
            run.experts.all_there = chance
        session.step(5)
        assert session.events[: launches + 1] == ["launch"] * launches + ["check 0"]


def test_an_expert_whose_slot_is_being_written_to_is_missing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = loaded(folder, 0.7)
    session, store = NotedSession(adapter, 1, monkeypatch), store_of(adapter)
    session.step(5)
    store.readers.most = 0  # none begins
    layer = store.layers[1]
    layer.read_ahead(np.flatnonzero(layer.slots.slot_of == NOWHERE)[None])
    victims = [each.victim for each in layer._arriving.values()]
    assert victims and None not in victims
    assert (layer.readable_slots(waits=False)[victims] == NOWHERE).all()
    assert (layer.slots.slot_of[victims] != NOWHERE).all()
    store.readers.most = 8


@pytest.mark.parametrize("needs", ["more experts than slots", "many more than slots"])
def test_runs_that_need_more_experts_than_slots_are_computed_part_by_part(
    needs: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = 4 if needs == "many more than slots" else 3
    adapter, whole = loaded(folder, 0.4), loaded(folder)
    of_whole = Session(whole, rows)
    session = NotedSession(adapter, rows, monkeypatch)
    for token in (5, 8, 11, 14):
        assert mx.array_equal(session.step(token), of_whole.step(token))
    assert any("by itself" in event for event in session.events)
    assert ("launch" in session.events) == (needs == "more experts than slots")
    store_of(adapter).check()


def test_a_read_that_fails_is_an_error_in_words_and_later_steps_are_right(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = list[bool]()

    def read(descriptor: int, into: Sequence[memoryview], offset: int) -> int:
        if broken:
            raise OSError(5, "Input/output error")
        return read_bytes(descriptor, into, offset)

    adapter, whole = loaded(folder, 0.7, read=read), loaded(folder)
    session = NotedSession(adapter, 1, monkeypatch)
    session.step(5)
    broken.append(True)
    for layer in store_of(adapter).layers:
        forget(layer)
    with pytest.raises(WeightsUnreadable, match="Input/output error"):
        session.step(8)
    broken.clear()
    again, of_whole = (Session(each, 2) for each in (adapter, whole))
    for token in (5, 8):
        assert mx.array_equal(again.step(token), of_whole.step(token))
    store_of(adapter).check()


def test_recurrent_states_are_written_once_whatever_is_launched_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = saved("qwen3_5_moe", tmp_path, PACKINGS["4 bits"], **IN_GRAPHS)
    adapter, whole = loaded(folder, 0.7), loaded(folder)
    kinds = [(len(run.parts), run.experts is not None) for run in runs_of(adapter)]
    assert kinds == [(1, False), (1, True), (2, True), (1, False), (1, True), (2, True)]
    session, of_whole = NotedSession(adapter, 1, monkeypatch), Session(whole, 1)
    for token in (5, 8, 11):
        for layer in store_of(adapter).layers:
            forget(layer)
        assert mx.array_equal(session.step(token), of_whole.step(token))
        assert session.events.count("launch") >= 8  # each run with experts, and once more
