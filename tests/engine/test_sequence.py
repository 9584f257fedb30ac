"""What a prompt shows: keys of the prefix index, positions and the places of features."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as some

from ingot.engine.sight import Sight
from ingot.media.image_processors import Qwen
from ingot.media.items import MediaItem
from ingot.media.layout import PictureWish
from ingot.media.size import Size
from ingot.models.vision.positions import three_axes
from tests.media.seeing import TIMED
from tests.models.vision.looking import Frames, prompt_with


def picture(begin: int, digest: bytes, processor: Qwen = TIMED, width: int = 96) -> MediaItem:
    layout = processor.picture(Size(width, 64), PictureWish())
    return MediaItem("image", digest, ((begin, begin + layout.features),), layout, Frames(()))


def test_prompts_of_the_same_tokens_are_the_same_up_to_the_first_picture_that_differs() -> None:
    one, other = picture(4, b"1" * 32), picture(4, b"2" * 32)
    second = picture(20, b"3" * 32)
    tokens = [5] * 40
    keys = [Sight((item, second)).keyed(tokens) for item in (one, other, one)]
    assert keys[0] == keys[2] and keys[0][:4] == keys[1][:4] == tokens[:4]
    assert keys[0][4] != keys[1][4]
    assert keys[0][20:] == keys[1][20:]


@given(some.lists(some.binary(min_size=32, max_size=32), min_size=2, max_size=6, unique=True))
def test_no_two_contents_have_one_key_and_none_is_a_token(digests: list[bytes]) -> None:
    keys = [tuple(Sight((picture(2, digest),)).keyed([7] * 16)) for digest in digests]
    assert len(set(keys)) == len(keys)
    for key in keys:
        assert all(word >= -(2**63) for word in key)
        assert sum(word < 0 for word in key) == 4


def test_a_sequence_that_ends_in_a_picture_is_told_which() -> None:
    item = picture(4, b"1" * 32)
    sight = Sight((item,))
    assert sight.inside(4) is sight.inside(item.end) is None
    assert sight.inside(5) is sight.inside(item.end - 1) is item


def test_text_behind_a_picture_goes_on_behind_its_longer_side_also_beyond_the_prompt() -> None:
    item = picture(4, b"1" * 32)  # three columns, two rows
    sight = Sight((item,), three_axes(14, [item], 2))
    assert [sight.position(place) for place in (0, 4, 10, 13, 14, 20)] == [0, 4, 7, 10, 11, 17]
    assert sight.stated(0, 4) is sight.stated(10, 20) is None
    stated = sight.stated(3, 16)
    assert stated is not None and stated.shape == (3, 13)
    assert (stated[:, -6:] == np.arange(7, 13)).all()


@given(some.integers(0, 1000), some.lists(some.sampled_from(["image", "video"]), min_size=1, max_size=3), some.data())
def test_pieces_of_a_prompt_see_together_what_the_whole_sees(
    seed: int, shown: list[str], data: some.DataObject
) -> None:
    tokens, items = prompt_with(TIMED, seed, shown)
    sight = Sight(tuple(items))
    cuts = sorted(data.draw(some.lists(some.integers(0, len(tokens)), max_size=4)))
    seen: dict[bytes, list[tuple[int, int]]] = {}
    for begin, end in zip([0, *cuts], [*cuts, len(tokens)], strict=True):
        for digest, numbers, places in sight.seen(begin, end):
            seen.setdefault(digest, []).extend(zip(numbers, places, strict=True))
    for item in items:
        places = [place for begin, end in item.runs for place in range(begin, end)]
        assert seen[item.digest] == list(enumerate(places))
