from hypothesis import given
from hypothesis import strategies as st

from foundry import vocabulary


@given(st.text())
def test_any_text_survives_encoding(text):
    assert vocabulary.tokenizer().decode(vocabulary.encoded(text), skip_special_tokens=False) == text


@given(st.from_regex(r"[0-9.,!?\\\"']{1,20}", fullmatch=True))
def test_digits_and_punctuation_are_tokens_of_their_own(text):
    assert len(vocabulary.encoded(text)) == len(text)


def test_marks_are_single_tokens_and_stay_in_decoded_text():
    for mark in vocabulary.MARKS:
        (token,) = vocabulary.encoded(mark)
        assert vocabulary.tokenizer().decode([token]) == mark


def test_special_tokens_are_single_and_leave_no_text():
    for mark in vocabulary.SPECIAL:
        (token,) = vocabulary.encoded(mark)
        assert vocabulary.tokenizer().decode([token]) == ""


def test_the_recall_words_are_single_tokens_with_their_space():
    words = vocabulary.recall_words()
    assert len(words) > 1400
    assert all(vocabulary.encoded(f" {word}") == [number] for word, number in words.items())
