"""Looking at what requests show: slice by slice, within memory, for whoever still waits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from ingot.engine.looks import Eyes, LookFailed, LookMemory, Looks
from ingot.engine.sequence import Sequence as Running
from ingot.engine.sight import Sight
from ingot.errors import BadMedia, IngotError, TooLarge
from ingot.media.item import MediaItem
from ingot.media.layout import Grid, Layout
from ingot.media.size import Size
from ingot.models.vision.tower import Features, LookBytes, PixelArray, Slices
from tests.models.vision.looking import Frames
from tests.seeing_engines import asked

SLICES, FEATURES = 5, 8
NBYTES = 4 * FEATURES
LAYOUT = Layout(Size(32, 32), Grid(1, 2, 2), "?", "?", (FEATURES,))


@dataclass
class FakeTower:
    """Counts what it is asked for. What it sees in a picture is its digest's first byte."""

    deep: int = 0
    axes: None = None
    modules: Sequence[Any] = ()
    fails: type[Exception] | None = None
    sliced: list[int] = field(default_factory=list)
    unpacked: list[bytes] = field(default_factory=list)

    def positions(self, length: int, items: Sequence[MediaItem]) -> None:
        return None

    def pixels(self, item: MediaItem) -> PixelArray:
        self.unpacked.append(item.digest)
        if self.fails is not None:
            raise self.fails("damaged")
        return np.full((1, 1), item.digest[0], dtype=np.float32)

    def look(self, pixels: PixelArray, layout: Layout) -> Slices:
        seen = int(pixels[0, 0])
        for _ in range(SLICES):
            self.sliced.append(seen)
            yield [mx.array(0)]
        return Features(mx.full((FEATURES, 1), float(seen)))

    def needs(self, layout: Layout) -> LookBytes:
        return LookBytes(pixels=100, work=50, features=NBYTES)


def showing(name: str, *numbers: int) -> Running:
    """A sequence that shows pictures of these contents."""
    items = tuple(
        MediaItem("image", bytes([number]) * 32, ((10 * at, 10 * at + FEATURES),), LAYOUT, Frames(()))
        for at, number in enumerate(numbers)
    )
    prompt = (1,) * (10 * len(numbers) + 2)
    made = Running(asked(name, list(prompt), list(items)), 0, 0, prompt, 4, 0)
    made.sight = Sight(items)
    return made


@pytest.fixture
def tower() -> FakeTower:
    return FakeTower()


@pytest.fixture
def looks(tower: FakeTower) -> Iterator[Looks]:
    made = Looks(Eyes(tower, LookMemory(250, 3 * NBYTES)))
    yield made
    made.check()
    made.close()


def settle(looks: Looks) -> None:
    """Run the tower until there is nothing to do."""
    while any(look.features is None for look in looks._looks.values()):
        if not looks.advance(1.0):
            looks.pause()


def test_a_stream_waits_for_one_slice_at_a_time(looks: Looks, tower: FakeTower) -> None:
    sequence = showing("a", 7)
    assert not looks.ready(sequence, 0)
    while not looks.advance(0.0):
        looks.pause()
    assert tower.sliced == [7]
    assert looks.advance(-1.0) and tower.sliced == [7, 7]
    assert not looks.ready(sequence, 0)
    settle(looks)
    assert looks.ready(sequence, 0)
    assert sequence.sight is not None
    assert sequence.sight.features[b"\7" * 32].embeddings[0, 0].item() == 7.0


def test_what_is_taken_over_is_not_looked_at(looks: Looks, tower: FakeTower) -> None:
    sequence = showing("a", 1, 2)
    assert looks.ready(sequence, 20)
    assert not looks.ready(sequence, 10)
    settle(looks)
    assert looks.ready(sequence, 10) and tower.unpacked == [b"\2" * 32]


def test_a_content_is_looked_at_once_for_all_who_show_it_and_kept_behind_them(looks: Looks, tower: FakeTower) -> None:
    sequences = [showing("a", 1, 1), showing("b", 1)]
    assert [looks.ready(sequence, 0) for sequence in sequences] == [False, False]
    settle(looks)
    assert all(looks.ready(sequence, 0) for sequence in sequences)
    for sequence in sequences:
        sequence.ended = True
    assert looks.ready(showing("c", 1), 0)
    assert tower.unpacked == [b"\1" * 32] and looks.runs == 1


def test_who_does_not_fit_beside_others_waits_until_they_have_computed_their_prompts(looks: Looks) -> None:
    one, other = showing("a", 1, 2), showing("b", 3, 4)
    assert not looks.ready(one, 0) and not looks.ready(other, 0)
    settle(looks)
    assert looks.ready(one, 0) and not looks.ready(other, 0)
    one.decoding = True
    assert not looks.ready(other, 0)
    settle(looks)
    assert looks.ready(other, 0)
    assert one.sight is not None and not one.sight.features


def test_what_nobody_needs_makes_way_the_longest_unused_first(looks: Looks, tower: FakeTower) -> None:
    for number in (1, 2, 3, 1, 4):
        sequence = showing(f"s{number}", number)
        looks.ready(sequence, 0)
        settle(looks)
        assert looks.ready(sequence, 0)
        sequence.ended = True
        looks.check()
    assert [digest[0] for digest in tower.unpacked] == [1, 2, 3, 4]
    again = showing("again", 2)
    looks.ready(again, 0)
    settle(looks)
    assert [digest[0] for digest in tower.unpacked] == [1, 2, 3, 4, 2]


def test_nothing_is_looked_at_for_who_has_left(looks: Looks, tower: FakeTower) -> None:
    sequence = showing("a", 1, 2)
    looks.ready(sequence, 0)
    while not looks.advance(0.0):
        looks.pause()
    sequence.ended = True
    assert not looks.advance(1.0)
    assert len(tower.sliced) == 1


def test_pixels_wait_until_there_is_memory_for_them(looks: Looks, tower: FakeTower) -> None:
    looks.ready(showing("a", 1, 2, 3), 0)
    looks.advance(0.0)
    looks._threads.shutdown(wait=True)
    assert len(tower.unpacked) == 2  # two hundred bytes of pixels, and fifty of work


@pytest.mark.parametrize(("fails", "said"), [(BadMedia, BadMedia), (ZeroDivisionError, IngotError)])
def test_what_cannot_be_looked_at_ends_those_who_show_it(fails: type[Exception], said: type[IngotError]) -> None:
    looks = Looks(Eyes(FakeTower(fails=fails), LookMemory(250, 3 * NBYTES)))
    sequences = [showing("a", 1), showing("b", 1), showing("c", 2)]
    for sequence in sequences[:2]:
        looks.ready(sequence, 0)
    with pytest.raises(LookFailed) as failed:
        settle(looks)
    assert failed.value.requests == ["a", "b"] and type(failed.value.error) is said
    looks.close()


def test_memory_says_beforehand_what_it_does_not_hold(tower: FakeTower) -> None:
    items = showing("a", 1, 2, 3, 4).request.media
    Eyes(tower, LookMemory(150, 4 * NBYTES)).refuse(items)
    Eyes(tower, LookMemory(150, NBYTES)).refuse(showing("a", 1, 1).request.media)
    for memory in (LookMemory(149, 4 * NBYTES), LookMemory(150, 4 * NBYTES - 1)):
        with pytest.raises(TooLarge):
            Eyes(tower, memory).refuse(items)
