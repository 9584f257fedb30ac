"""A model that was unloaded comes back to the experts that are still in memory."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from ingot.models.experts.files import read_bytes
from ingot.models.experts.kept import KEPT
from tests.launches import prompt_logits
from tests.models.experts.mixtures import PACKINGS, PROMPT, loaded, saved, store_of
from tests.one_path import one_path

__all__ = ["one_path"]
LAYERS, PARTS = 2, 9
pytestmark = pytest.mark.usefixtures("rules")


@pytest.fixture(autouse=True)
def room() -> Iterator[None]:
    KEPT.room = 1 << 30
    yield
    KEPT.room = 0
    KEPT.make_room(0)


def resident(folder: Path, share: float, **options: Any) -> None:
    """Load the model, compute, and unload it."""
    adapter = loaded(folder, share, **options)
    prompt_logits(adapter, PROMPT)
    adapter.close()


class Reads:
    """As the operating system reads, and how often."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, descriptor: int, into: Sequence[memoryview], offset: int) -> int:
        self.count += 1
        return read_bytes(descriptor, into, offset)


@pytest.mark.parametrize("packing", ["4 bits", "32 bits"])
def test_it_reads_nothing_of_what_is_there(packing: str, tmp_path: Path) -> None:
    folder, first, second = saved("qwen3_moe", tmp_path, PACKINGS[packing]), Reads(), Reads()
    resident(folder, 2.0, always=True, read=first)
    held = KEPT.nbytes
    assert first.count and held > 0
    resident(folder, 2.0, always=True, read=second)
    # What a slot is measured with is no expert: the last one of each layer is read when it is needed.
    assert second.count <= LAYERS * PARTS < first.count
    assert KEPT.nbytes == held


@pytest.mark.parametrize("packing", ["4 bits", "32 bits"])
def test_what_is_there_stays_while_the_model_is_loaded(packing: str, tmp_path: Path) -> None:
    folder = saved("qwen3_moe", tmp_path, PACKINGS[packing])
    whole = prompt_logits(loaded(folder, 2.0, always=True), PROMPT)
    KEPT.make_room(0)
    first = loaded(folder, 0.6)
    prompt_logits(first, PROMPT)
    before = [set(layer.slots.expert_in.tolist()) for layer in store_of(first).layers]
    first.close()
    again = loaded(folder, 0.6)
    for own, layer in zip(before, store_of(again).layers, strict=True):
        # All probes of the model go to one expert, and a few steps show how fast it is.
        assert len(own - set(layer.slots.expert_in.tolist())) <= 2
    assert mx.array_equal(prompt_logits(again, PROMPT), whole)
    store_of(again).check()
    again.close()


def test_files_that_were_written_anew_are_read_anew(tmp_path: Path) -> None:
    folder = saved("qwen3_moe", tmp_path)
    resident(folder, 0.6)
    os.utime(folder / "model.safetensors", ns=(1, 1))
    adapter = loaded(folder, 0.6)
    assert KEPT.nbytes > 0  # of the files as they were
    adapter.close()


def test_another_number_of_slots_begins_anew(tmp_path: Path) -> None:
    folder = saved("qwen3_moe", tmp_path)
    resident(folder, 0.6)
    held = KEPT.nbytes
    adapter = loaded(folder, 0.4)
    assert KEPT.nbytes == held
    adapter.close()


def test_slots_make_room_when_memory_is_needed(tmp_path: Path) -> None:
    folder, other = saved("qwen3_moe", tmp_path / "one"), saved("qwen3_moe", tmp_path / "other")
    resident(folder, 0.6)
    held = KEPT.nbytes
    resident(other, 0.6)
    assert KEPT.nbytes == 2 * held
    KEPT.make_room(held)  # that which was put there first goes
    assert KEPT.nbytes == held
    KEPT.make_room(0, but=other)  # it comes back to its own
    assert KEPT.nbytes == held
    KEPT.make_room(0)
    assert KEPT.nbytes == 0


def test_what_there_is_no_room_for_is_not_kept(tmp_path: Path) -> None:
    KEPT.room = 1
    resident(saved("qwen3_moe", tmp_path), 0.6)
    assert KEPT.nbytes == 0
