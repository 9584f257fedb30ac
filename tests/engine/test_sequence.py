"""What a prompt shows: keys of the prefix index, positions and the places of features."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as some

from ingot.engine.request import Request
from ingot.engine.sequence import GAP_KEY, PromptMedia, ThinnedPrompt, TokenSequence
from ingot.media.image_processors import QwenProcessor
from ingot.media.items import MediaItem
from ingot.media.layout import ImageLayoutOptions, Size
from ingot.models.vision.qwen import mrope_positions
from tests.media.seeing import TIMED
from tests.models.vision.looking import Frames, prompt_with


def picture(begin: int, digest: bytes, processor: QwenProcessor = TIMED, width: int = 96) -> MediaItem:
    layout = processor.image_layout(Size(width, 64), ImageLayoutOptions())
    return MediaItem("image", digest, ((begin, begin + layout.features),), layout, Frames(()))


def test_prompts_of_the_same_tokens_are_the_same_up_to_the_first_picture_that_differs() -> None:
    one, other = picture(4, b"1" * 32), picture(4, b"2" * 32)
    second = picture(20, b"3" * 32)
    tokens = [5] * 40
    keys = [PromptMedia((item, second)).keyed(tokens) for item in (one, other, one)]
    assert keys[0] == keys[2] and keys[0][:4] == keys[1][:4] == tokens[:4]
    assert keys[0][4] != keys[1][4]
    assert keys[0][20:] == keys[1][20:]


@given(some.lists(some.binary(min_size=32, max_size=32), min_size=2, max_size=6, unique=True))
def test_no_two_contents_have_one_key_and_none_is_a_token(digests: list[bytes]) -> None:
    keys = [tuple(PromptMedia((picture(2, digest),)).keyed([7] * 16)) for digest in digests]
    assert len(set(keys)) == len(keys)
    for key in keys:
        assert all(word >= -(2**63) for word in key)
        assert sum(word < 0 for word in key) == 4


def test_a_sequence_that_ends_in_a_picture_is_told_which() -> None:
    item = picture(4, b"1" * 32)
    prompt_media = PromptMedia((item,))
    assert prompt_media.inside(4) is prompt_media.inside(item.end) is None
    assert prompt_media.inside(5) is prompt_media.inside(item.end - 1) is item


def test_text_behind_a_picture_goes_on_behind_its_longer_side_also_beyond_the_prompt() -> None:
    item = picture(4, b"1" * 32)  # three columns, two rows
    prompt_media = PromptMedia((item,), mrope_positions(14, [item], 2))
    assert [prompt_media.position(offset) for offset in (0, 4, 10, 13, 14, 20)] == [0, 4, 7, 10, 11, 17]
    assert prompt_media.explicit_positions(0, 4) is prompt_media.explicit_positions(10, 20) is None
    stated = prompt_media.explicit_positions(3, 16)
    assert stated is not None and stated.shape == (3, 13)
    assert (stated[:, -6:] == np.arange(7, 13)).all()


@given(some.integers(0, 1000), some.lists(some.sampled_from(["image", "video"]), min_size=1, max_size=3), some.data())
def test_pieces_of_a_prompt_see_together_what_the_whole_sees(
    seed: int, shown: list[str], data: some.DataObject
) -> None:
    tokens, items = prompt_with(TIMED, seed, shown)
    prompt_media = PromptMedia(tuple(items))
    cuts = sorted(data.draw(some.lists(some.integers(0, len(tokens)), max_size=4)))
    seen: dict[bytes, list[tuple[int, int]]] = {}
    for begin, end in zip([0, *cuts], [*cuts, len(tokens)], strict=True):
        for digest, numbers, positions in prompt_media.seen(begin, end):
            seen.setdefault(digest, []).extend(zip(numbers, positions, strict=True))
    for item in items:
        positions = [offset for begin, end in item.runs for offset in range(begin, end)]
        assert seen[item.digest] == list(enumerate(positions))


WHOLE = tuple(range(100, 120))
LEFT = np.array([0, 1, 2, 5, 6, 12, 19], np.int32)


def sequence() -> TokenSequence:
    made = TokenSequence(Request("r", (WHOLE,)), 0, 0, WHOLE, 8, 0)
    made.marks = frozenset({2, 6, 20})
    return made


def test_tokens_stand_where_they_stood_and_those_behind_the_prompt_behind_all_of_it() -> None:
    thinned = ThinnedPrompt(WHOLE, LEFT)
    assert thinned.tokens == (100, 101, 102, 105, 106, 112, 119)
    assert [thinned.position(offset) for offset in range(10)] == [0, 1, 2, 5, 6, 12, 19, 20, 21, 22]


def test_positions_are_stated_only_where_one_does_not_follow_another() -> None:
    thinned = ThinnedPrompt(WHOLE, LEFT)
    assert thinned.explicit_positions(0, 2) is None
    assert thinned.explicit_positions(7, 9) is None
    assert thinned.explicit_positions(6, 9) is None
    for begin, end in ((0, 3), (2, 4), (3, 7), (0, 9)):
        stated = thinned.explicit_positions(begin, end)
        assert stated is not None and stated.dtype == np.int32
        assert stated.tolist() == [thinned.position(offset) for offset in range(begin, end)]


def test_what_stands_behind_a_gap_is_known_by_nothing_that_a_whole_prompt_could_hold() -> None:
    keys = ThinnedPrompt(WHOLE, LEFT).keyed([*ThinnedPrompt(WHOLE, LEFT).tokens, 7])
    assert keys == [100, 101, 102, 105 + 2 * GAP_KEY, 106, 112 + 5 * GAP_KEY, 119 + 6 * GAP_KEY, 7]


def test_the_same_tokens_at_other_positions_have_other_keys() -> None:
    one, other = ThinnedPrompt((1, 2, 2, 3), np.array([0, 1, 3])), ThinnedPrompt((1, 2, 2, 3), np.array([0, 2, 3]))
    assert one.tokens == other.tokens
    assert one.keyed(one.tokens) != other.keyed(other.tokens)


def test_keys_of_a_beginning_are_the_beginning_of_the_keys() -> None:
    thinned = ThinnedPrompt(WHOLE, LEFT)
    whole = thinned.keyed(thinned.tokens)
    for count in range(len(whole) + 1):
        assert thinned.keyed(thinned.tokens[:count]) == whole[:count]


def test_a_sequence_goes_on_with_what_is_left_and_knows_what_was_sent() -> None:
    thin = sequence()
    thin.thin(LEFT)
    assert thin.total == len(LEFT) and thin.peak == len(LEFT) + 7
    assert thin.whole_prompt == WHOLE and thin.tokens == list(thin.prompt)
    assert thin.marks == {2, 4, 7}  # as much is stored when so much of the prompt has passed


def test_nothing_left_out_is_nothing_changed() -> None:
    thin = sequence()
    thin.thin(np.arange(20, dtype=np.int32))
    assert thin.keys == list(WHOLE) and thin.explicit_positions(0, 20) is None and thin.position(25) == 25
