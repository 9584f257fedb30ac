"""Looking at what requests show: slice by slice, within memory, for whoever still waits."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import wait
from dataclasses import replace

import numpy as np
import pytest

from ingot.engine.sequence import PromptMedia
from ingot.engine.sequence import TokenSequence as Running
from ingot.engine.vision_encoder import (
    PIXEL_THREADS_EACH,
    VisionEncoder,
    VisionEncoderRunner,
    VisionEncodingFailed,
    VisionMemory,
    make_vision_memory,
)
from ingot.errors import BadMedia, Cancelled, IngotError, RequestTooLarge
from ingot.media import worker
from ingot.media.items import MediaItem
from ingot.media.layout import ImageLayoutOptions, Layout, Size
from ingot.models.vision.tower import EncodingBytes, PixelArray
from tests.fake_tower import FEATURES, LAYOUT, NBYTES, FakeTower
from tests.models.vision.looking import Frames
from tests.seeing_engines import asked


def showing(name: str, *numbers: int, tenant: str = "") -> Running:
    """A sequence that shows pictures of these contents."""
    items = tuple(
        MediaItem("image", bytes([number]) * 32, ((10 * at, 10 * at + FEATURES),), LAYOUT, Frames(()))
        for at, number in enumerate(numbers)
    )
    prompt = (1,) * (10 * len(numbers) + 2)
    made = Running(asked(name, list(prompt), list(items), tenant=tenant), 0, 0, prompt, 4, 0)
    made.prompt_media = PromptMedia(items)
    return made


@pytest.fixture
def tower() -> FakeTower:
    return FakeTower()


@pytest.fixture
def looks(tower: FakeTower) -> Iterator[VisionEncoderRunner]:
    made = VisionEncoderRunner(VisionEncoder(tower, VisionMemory(250, 3 * NBYTES)))
    yield made
    made.check()
    made.close()


def settle(looks: VisionEncoderRunner) -> None:
    """Run the tower until there is nothing to do."""
    while any(look.features is None for look in looks._encodings.values()):
        if not looks.advance(1.0):
            looks.pause()


def test_a_stream_waits_for_one_slice_at_a_time(looks: VisionEncoderRunner, tower: FakeTower) -> None:
    sequence = showing("a", 7)
    assert not looks.ready(sequence, 0)
    while not looks.advance(0.0):
        looks.pause()
    assert tower.sliced == [7]
    assert looks.advance(-1.0) and tower.sliced == [7, 7]
    assert not looks.ready(sequence, 0)
    settle(looks)
    assert looks.ready(sequence, 0)
    assert sequence.prompt_media is not None
    assert sequence.prompt_media.features[b"\7" * 32].embeddings[0, 0].item() == 7.0


@pytest.mark.parametrize(("slice_s", "left_s", "fit"), [(0.03, 0.1, 3), (0.06, 0.1, 1), (0.2, 0.1, 1), (0.01, -1.0, 1)])
def test_no_slice_begins_that_would_not_end_in_time(
    looks: VisionEncoderRunner,
    tower: FakeTower,
    monkeypatch: pytest.MonkeyPatch,
    slice_s: float,
    left_s: float,
    fit: int,
) -> None:
    monkeypatch.setattr("ingot.engine.vision_encoder.time.monotonic", lambda: tower.now)
    looks.ready(showing("a", 1, 2, 3), 0)
    tower.slice_s = slice_s
    while not looks.advance(0.0):
        looks.pause()
    assert looks.advance(left_s) and len(tower.sliced) == 1 + fit


def test_one_long_slice_is_forgotten_in_time(
    looks: VisionEncoderRunner, tower: FakeTower, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ingot.engine.vision_encoder.time.monotonic", lambda: tower.now)
    looks.ready(showing("a", 1, 2, 3), 0)
    tower.slice_s = 1.0
    while not looks.advance(0.1):
        looks.pause()
    tower.slice_s = 0.001
    turns = []
    while any(look.features is None for look in looks._encodings.values()):
        if looks.advance(0.1):
            turns.append(looks._expected_s)
        else:
            looks.pause()
    assert turns == sorted(turns, reverse=True) and turns[-1] < 0.5


def test_what_is_taken_over_is_not_looked_at(looks: VisionEncoderRunner, tower: FakeTower) -> None:
    sequence = showing("a", 1, 2)
    assert looks.ready(sequence, 20)
    assert not looks.ready(sequence, 10)
    settle(looks)
    assert looks.ready(sequence, 10) and tower.unpacked == [b"\2" * 32]


def test_a_content_is_looked_at_once_for_all_who_show_it_and_kept_behind_them(
    looks: VisionEncoderRunner, tower: FakeTower
) -> None:
    sequences = [showing("a", 1, 1), showing("b", 1)]
    assert [looks.ready(sequence, 0) for sequence in sequences] == [False, False]
    settle(looks)
    assert all(looks.ready(sequence, 0) for sequence in sequences)
    for sequence in sequences:
        sequence.ended = True
    assert looks.ready(showing("c", 1), 0)
    assert tower.unpacked == [b"\1" * 32] and looks.runs == 1


def test_who_does_not_fit_beside_others_waits_until_they_have_computed_their_prompts(
    looks: VisionEncoderRunner,
) -> None:
    one, other = showing("a", 1, 2), showing("b", 3, 4)
    assert not looks.ready(one, 0) and not looks.ready(other, 0)
    settle(looks)
    assert looks.ready(one, 0) and not looks.ready(other, 0)
    one.decoding = True
    assert not looks.ready(other, 0)
    settle(looks)
    assert looks.ready(other, 0)
    assert one.prompt_media is not None and not one.prompt_media.features


def test_what_nobody_needs_makes_way_the_longest_unused_first(looks: VisionEncoderRunner, tower: FakeTower) -> None:
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


def test_nothing_is_looked_at_for_who_has_left(looks: VisionEncoderRunner, tower: FakeTower) -> None:
    sequence = showing("a", 1, 2)
    looks.ready(sequence, 0)
    while not looks.advance(0.0):
        looks.pause()
    sequence.ended = True
    assert not looks.advance(1.0)
    assert len(tower.sliced) == 1


def test_pixels_wait_until_there_is_memory_for_them(looks: VisionEncoderRunner, tower: FakeTower) -> None:
    looks.ready(showing("a", 1, 2, 3), 0)
    looks.advance(0.0)
    looks._threads.shutdown(wait=True)
    assert len(tower.unpacked) == 2  # two hundred bytes of pixels, and fifty of work


@pytest.mark.parametrize(("fails", "said"), [(BadMedia, BadMedia), (ZeroDivisionError, IngotError)])
def test_what_cannot_be_looked_at_ends_those_who_show_it(fails: type[Exception], said: type[IngotError]) -> None:
    looks = VisionEncoderRunner(VisionEncoder(FakeTower(fails=fails), VisionMemory(250, 3 * NBYTES)))
    sequences = [showing("a", 1), showing("b", 1), showing("c", 2)]
    for sequence in sequences[:2]:
        looks.ready(sequence, 0)
    with pytest.raises(VisionEncodingFailed) as failed:
        settle(looks)
    assert failed.value.requests == ["a", "b"] and type(failed.value.error) is said
    looks.close()


def test_memory_says_beforehand_what_it_does_not_hold(tower: FakeTower) -> None:
    items = showing("a", 1, 2, 3, 4).request.media
    VisionEncoder(tower, VisionMemory(150, 4 * NBYTES)).refuse(items)
    VisionEncoder(tower, VisionMemory(150, NBYTES)).refuse(showing("a", 1, 1).request.media)
    for memory in (VisionMemory(149, 4 * NBYTES), VisionMemory(150, 4 * NBYTES - 1)):
        with pytest.raises(RequestTooLarge):
            VisionEncoder(tower, memory).refuse(items)


class ByArea:
    """As many features as an image has pixels."""

    def image_layout(self, size: Size, options: ImageLayoutOptions) -> Layout:
        return replace(LAYOUT, size=size)


class TowerByArea(FakeTower):
    def needs(self, layout: Layout) -> EncodingBytes:
        return EncodingBytes(pixels=3 * layout.size.area, work=layout.size.area, features=NBYTES)


def test_there_is_memory_for_two_images_or_a_video_if_that_is_a_share_of_what_is_free() -> None:
    image, video = EncodingBytes(100, 50, 10), EncodingBytes(900, 100, 500)
    of_images, of_both = (make_vision_memory(largest, 1 << 40) for largest in ([image], [image, video]))
    assert (of_images.work, of_images.features) == (300, 300)
    assert (of_both.work, of_both.features) == (1000, 500)
    little = make_vision_memory([image, video], 1600)
    assert (little.work, little.features) == (100, 100)


def test_an_image_that_is_too_large_is_refused_with_what_would_do() -> None:
    [[item]] = showing("a", 1).request.media
    picture = Frames((np.zeros((300, 400, 3), np.uint8),))
    large = replace(item, layout=replace(LAYOUT, size=Size(400, 300)), source=picture)
    encoder = VisionEncoder(TowerByArea(), VisionMemory(4 * 200 * 150, NBYTES), ByArea())  # type: ignore[arg-type]
    with pytest.raises(RequestTooLarge, match="at most 200 by 150, or serve the model with more --memory"):
        encoder.refuse([[large]])
    with pytest.raises(RequestTooLarge, match="Send a smaller one, or serve the model with more --memory"):
        replace(encoder, processor=None).refuse([[large]])


def test_what_was_looked_at_before_counts_as_found(looks: VisionEncoderRunner) -> None:
    first, second = showing("a", 1, 2), showing("b", 2, 3)
    looks.ready(first, 0)
    settle(looks)
    assert looks.ready(first, 0) and (looks.asked, looks.found) == (2, 0)
    looks.ready(second, 0)
    settle(looks)
    assert looks.ready(second, 0) and (looks.asked, looks.found) == (4, 1)
    first.ended = second.ended = True
    looks.ready(showing("c", 1), 0)
    assert (looks.asked, looks.found) == (5, 2)


class SlowTower(FakeTower):
    """Unpacks until nobody waits for it any more, as a worker does."""

    def pixels(self, item: MediaItem) -> PixelArray:
        self.unpacked.append(item.digest)
        client = worker._client.get()
        while client.wanted():
            threading.Event().wait(0.001)
        raise Cancelled("Nobody waits for this any more.")


def test_one_keys_pictures_leave_threads_for_anothers_and_stop_when_their_request_ends() -> None:
    tower = SlowTower()
    looks = VisionEncoderRunner(VisionEncoder(tower, VisionMemory(1 << 20, 64 * NBYTES)))
    greedy, polite = showing("a", *range(20), tenant="greedy"), showing("b", 100, tenant="polite")
    looks.ready(greedy, 0)
    looks.advance(0.0)
    looks.ready(polite, 0)
    looks.advance(0.0)
    begun = {digest: look.pixels for digest, look in looks._encodings.items() if look.pixels is not None}
    assert len(begun) == PIXEL_THREADS_EACH + 1 and bytes([100]) * 32 in begun
    greedy.ended = polite.ended = True
    looks.check()
    assert not wait(list(begun.values()), 10).not_done
    looks.close()
