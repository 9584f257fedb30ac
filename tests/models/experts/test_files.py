"""Threads that read experts: what is needed comes first, guesses can be called off, and the page cache passed by."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from ingot.models.experts.files import (
    MOST_GUESSES,
    ExpertFiles,
    ExpertRead,
    ExpertReaders,
    FileRange,
    SpareMemory,
    read_bytes,
)
from ingot.models.files.drive_speed import ALIGNED

SIZE = 3 * ALIGNED + 100


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    numbers = mx.array(np.random.default_rng(1).integers(0, 255, SIZE, np.uint8))
    mx.save_safetensors(str(tmp_path / "model.safetensors"), {"numbers": numbers})
    return tmp_path


class Gate:
    """Reads as the operating system does, once it is open."""

    def __init__(self) -> None:
        self.open, self.begun = threading.Event(), threading.Semaphore(0)
        self.offsets: list[int] = []

    def __call__(self, descriptor: int, into: Sequence[memoryview], offset: int) -> int:
        self.offsets.append(offset)
        self.begun.release()
        self.open.wait(30)
        return read_bytes(descriptor, into, offset)


class Room:
    """Memory of its own, from where an expert is brought into its slot."""

    at_once = False

    def __init__(self, size: int, at_once: bool = False) -> None:
        self.at_once, self.memory = at_once, bytearray(size)
        self.delivered, self.ended = False, 0

    def begin(self) -> Sequence[Sequence[memoryview]]:
        return [[memoryview(self.memory)]]

    def deliver(self) -> bool:
        self.delivered = True
        return True

    def end(self) -> None:
        self.ended += 1


@pytest.fixture
def gate(folder: Path) -> Iterator[Gate]:
    made = Gate()
    yield made
    made.open.set()


def read_of(offset: int, *, ahead: bool, at_once: bool = False) -> ExpertRead:
    return ExpertRead([FileRange(0, offset, 1)], Room(1, at_once), ahead)


def test_what_is_needed_comes_before_guesses_and_few_of_these_are_under_way(folder: Path, gate: Gate) -> None:
    readers = ExpertReaders(ExpertFiles(folder, gate))
    guesses = [read_of(number, ahead=True) for number in range(10)]
    readers.submit(guesses)
    for _ in range(MOST_GUESSES):
        assert gate.begun.acquire(timeout=10)
    needed = read_of(100, ahead=False)
    readers.submit([needed])
    assert gate.begun.acquire(timeout=10)
    assert sorted(gate.offsets) == [*range(MOST_GUESSES), 100]
    readers.hurry(guesses[9])  # it is waited for now: no guess any more
    assert gate.begun.acquire(timeout=10)
    assert gate.offsets[-1] == 9
    gate.open.set()
    assert all(read.done.wait(10) and read.error is None for read in (*guesses, needed))
    assert sorted(gate.offsets) == [*range(10), 100]
    readers.close()


def test_a_guess_that_is_called_off_leaves_its_slot_as_it_was(folder: Path, gate: Gate) -> None:
    readers = ExpertReaders(ExpertFiles(folder, gate))
    guesses = [read_of(number, ahead=True) for number in range(MOST_GUESSES + 1)]
    readers.submit(guesses)
    for _ in range(MOST_GUESSES):
        assert gate.begun.acquire(timeout=10)
    assert readers.cancel(guesses[-1])  # which waits
    assert readers.cancel(guesses[0])  # which is being read beside its slot
    gate.open.set()
    assert guesses[1].done.wait(10)
    readers.close()
    first, last = guesses[0].room, guesses[-1].room
    assert isinstance(first, Room) and isinstance(last, Room)
    assert (first.delivered, first.ended, last.delivered) == (False, 1, False)
    assert MOST_GUESSES not in gate.offsets
    assert not readers.cancel(guesses[1])  # it is there


def test_a_large_guess_is_read_piece_by_piece_until_it_is_called_off(
    folder: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ingot.models.experts.files.GUESS_BYTES", 100)
    readers = ExpertReaders(ExpertFiles(folder, gate))
    wrong, right = (ExpertRead([FileRange(0, begin, 250)], Room(250), True) for begin in (0, 1000))
    readers.submit([wrong, right])
    for _ in range(2):
        assert gate.begun.acquire(timeout=10)
    assert readers.cancel(wrong)
    gate.open.set()
    assert right.done.wait(10)
    readers.close()
    assert sorted(gate.offsets) == [0, 1000, 1100, 1200]
    assert isinstance(right.room, Room)
    assert right.room.memory == (folder / "model.safetensors").read_bytes()[1000:1250]


def test_a_guess_that_is_read_into_its_slot_itself_goes_on(folder: Path, gate: Gate) -> None:
    readers = ExpertReaders(ExpertFiles(folder, gate))
    guess = read_of(0, ahead=True, at_once=True)
    readers.submit([guess])
    assert gate.begun.acquire(timeout=10)
    assert not readers.cancel(guess)
    gate.open.set()
    assert guess.done.wait(10) and guess.delivered
    readers.close()


def test_memory_that_the_drive_cannot_write_to_is_read_into_through_the_page_cache(folder: Path) -> None:
    files = ExpertFiles(folder)
    if not files.pass_cache():
        pytest.skip("this file system has no direct reads")
    span = files.span(FileRange(0, 0, ALIGNED))
    askew = memoryview(bytearray(2 * ALIGNED + 1))[1 : ALIGNED + 1]
    files.read_span(span, [askew])
    assert askew == (folder / "model.safetensors").read_bytes()[:ALIGNED]
    files.close()


def test_reads_past_the_page_cache_give_the_same_bytes(folder: Path) -> None:
    files, spare = ExpertFiles(folder), SpareMemory()
    _, tensor = files.tensors["numbers"]
    place = FileRange(0, tensor.offset + 5, SIZE - 5)
    expected = bytearray(place.size)
    files.read(place, [memoryview(expected)[:1000], memoryview(expected)[1000:]])
    assert files.span(place) == place
    if not files.pass_cache():
        pytest.skip("this file system has no direct reads")
    span = files.span(place)
    assert (span.offset % ALIGNED, span.size % ALIGNED) == (0, 0)
    piece = spare.take(span.size)
    assert piece.address % ALIGNED == 0
    files.read_span(span, [piece.memory])
    at = place.offset - span.offset
    assert piece.memory[at : at + place.size] == expected
    spare.give_back(piece)
    assert spare.take(span.size) is piece
    files.close()
