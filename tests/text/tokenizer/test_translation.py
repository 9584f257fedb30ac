"""A prompt in another tokenizer's tokens, and back."""

from __future__ import annotations

import numpy as np
import pytest
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, pre_tokenizers

from foundry.package import MODELS
from ingot.text.tokenizer.tokenizer import Tokenizer
from ingot.text.tokens.translation import Translation

TEXT = "The ferry leaves at nine. Grüße, 東京! <|im_start|>user\n  and so on 🙂 <|im_end|>"


@pytest.fixture(scope="module")
def ours() -> Tokenizer:
    return Tokenizer.load(MODELS / "dense")


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """One that knows nothing but bytes."""
    folder = tmp_path_factory.mktemp("theirs")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Library(models.BPE({char: at for at, char in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.save(str(folder / "tokenizer.json"))
    return Tokenizer.load(folder)


def test_the_text_is_the_same_in_both(ours: Tokenizer, theirs: Tokenizer) -> None:
    prompt = ours.encode(TEXT, add_special=False)
    told = Translation.of(prompt, ours, theirs)
    assert theirs.decode(told.tokens, skip_special=False) == ours.decode(prompt, skip_special=False)
    assert len(told.tokens) > len(prompt) == len(told.ends) and told.ends[-1] == len(told.tokens)


@pytest.mark.parametrize("way", ["to shorter tokens", "to longer ones"])
def test_what_is_said_of_a_word_counts_for_the_same_word(ours: Tokenizer, theirs: Tokenizer, way: str) -> None:
    mine, other = (ours, theirs) if way == "to shorter tokens" else (theirs, ours)
    prompt = mine.encode(TEXT, add_special=False)
    told = Translation.of(prompt, mine, other)
    before, upto = TEXT.index("ferry"), TEXT.index("ferry") + len("ferry")

    def within(tokenizer: Tokenizer, tokens: list[int]) -> list[bool]:
        counts = [len(tokenizer.decode(tokens[: at + 1], skip_special=False)) for at in range(len(tokens))]
        return [before < end <= upto for end in counts]

    numbers = np.array(within(other, list(told.tokens)), np.float32)
    back = told.back(numbers)
    assert back.shape == (len(prompt),)
    wanted = within(mine, prompt)
    assert all(back[at] > 0 for at, inside in enumerate(wanted) if inside)
    assert back[[not inside for inside in wanted]].sum() <= 1


def test_a_token_that_is_part_of_theirs_has_its_number() -> None:
    told = Translation((7, 8), (0, 0, 1, 2))
    np.testing.assert_allclose(told.back(np.array([1.0, 3.0], np.float32)), [1, 1, 1, 3])


def test_a_token_that_holds_several_of_theirs_has_their_mean() -> None:
    told = Translation((7, 8, 9), (2, 3))
    np.testing.assert_allclose(told.back(np.array([1.0, 3.0, 5.0], np.float32)), [2, 5])


def test_lengths_are_told_in_theirs() -> None:
    assert Translation((7, 8, 9), (2, 3)).places({0, 1, 2, 5}) == {2, 3}


def test_what_is_no_text_at_its_end_is_told_as_such(ours: Tokenizer, theirs: Tokenizer) -> None:
    cut = ours.encode("東", add_special=False)[:-1] or [next(t for t in range(300) if ours.token_bytes(t) == b"\xe6")]
    told = Translation.of(cut, ours, theirs)
    assert told.back(np.ones(len(told.tokens), np.float32)).tolist() == [1.0] * len(cut)
