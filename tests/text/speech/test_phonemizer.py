"""Numbers as words."""

from __future__ import annotations

import random
import string

import pytest

from ingot.errors import BadRequest, Unsupported
from ingot.text.speech.dictionary import phonemes_by_letters
from ingot.text.speech.phonemizer import (
    PIECE_PHONEMES,
    Phonemizer,
    cardinal_words,
    gather_pieces,
    ordinal_words,
    spell_out_numbers,
)
from tests.speaking import SIGNS


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("0 7 13 40 99", "zero seven thirteen forty ninety-nine"),
        ("1,234,567", "one million two hundred thirty-four thousand five hundred sixty-seven"),
        (
            "in 1984, 2005, 1900 and 2000",
            "in nineteen eighty-four , two thousand five , nineteen hundred and two thousand",
        ),
        ("the 1990s", "the nineteen nineties"),
        ("3.14 and -5", "three point one four and minus five"),
        ("007", "zero zero seven"),
        ("1st, 22nd, 100th, 12th, 20th", "first , twenty-second , one hundredth , twelfth , twentieth"),
        (
            "$3.50, $1, £2.01, €0.99",
            "three dollars and fifty cents , one dollar , two pounds and one penny , ninety-nine cents",
        ),
        ("$3.5 million", "three point five million dollars"),
        ("at 10:30, 9:05 or 12:00", "at ten thirty , nine oh five or twelve o'clock"),
        ("version 3.11.7", "version three dot eleven dot seven"),
        ("a4 and 2x", "a four and two x"),
        (
            "12345678901234567890",
            " ".join(["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "zero"] * 2),
        ),
    ],
)
def test_numbers_are_said_as_people_say_them(text: str, said: str) -> None:
    assert " ".join(spell_out_numbers(text).split()) == said


def test_every_number_below_a_million_has_words() -> None:
    for number in (*range(0, 1200), *range(1200, 1_000_000, 997)):
        assert cardinal_words(number) and ordinal_words(number)


def test_a_number_of_any_length_is_read_at_once() -> None:
    assert len(spell_out_numbers("9" * 4096)) > 4096
    assert spell_out_numbers("1" + ",000" * 1000)


KNOWN = Phonemizer(frozenset(SIGNS), 510)


def said(text: str, voice: str = "af_heart") -> str:
    return " ".join(KNOWN.pieces(text, voice))


@pytest.mark.parametrize(
    ("text", "phonemes"),
    [
        ("hello world", "həlˈO wˈɜɹld"),
        ("the apple, the pear", "ði ˈæpᵊl, ðə pˈɛɹ"),
        ("I want to go to Italy", "ˌI wˈɑnt tə ɡˌO tʊ ˈɪTəli"),
        ("to record a record", "tə ɹəkˈɔɹd ɐ ɹˈɛkəɹd"),
        ("I used to", "ˌI jˈust tu"),
        ("boxes jumped running", "bˈɑksᵻz ʤˈʌmpt ɹˈʌnɪŋ"),
        ("Dr. Smith's", "dˈɑktəɹ smˈɪθs"),
        ("20%", "twˈɛnti pəɹsˈɛnt"),
        ("NASA", "nˈæsə"),
        ("the USA", "ðə jˌuˌɛsˈA"),
        ("café", "kæfˈA"),
        ("wait... what", "wˈAt… wˌʌt"),
        ("it's don’t", "ɪts dˈOnt"),
        ("hello 👋 world ★", "həlˈO wˈɜɹld"),
    ],
)
def test_words_are_pronounced_as_they_stand_in_the_text(text: str, phonemes: str) -> None:
    assert said(text) == phonemes


def test_a_british_voice_has_a_british_accent() -> None:
    assert said("the bird sees water", "bf_emma") == "ðə bˈɜːd sˈiːz wˈɔːtə"


def test_words_that_nobody_knows_are_read_by_their_letters() -> None:
    assert phonemes_by_letters("blorpation", "us") == "blɔɹpˈAʃən"
    assert phonemes_by_letters("zorgle", "gb") == "zˈɔːɡᵊl"
    assert said("xkcd") == "ˌɛkskˌAsˌidˈi"


def test_any_letters_have_a_pronunciation() -> None:
    draw = random.Random(3)
    for _ in range(2000):
        word = "".join(draw.choices(string.ascii_lowercase, k=draw.randint(1, 12)))
        assert set(phonemes_by_letters(word, "us")) <= set(SIGNS)


@pytest.mark.parametrize("voice", ["jf_alpha", "zm_yunxi", "ef_dora", "x"])
def test_voices_of_other_languages_are_refused_by_name(voice: str) -> None:
    with pytest.raises(Unsupported, match=voice):
        KNOWN.pieces("hello", voice)


@pytest.mark.parametrize("text", ["Привет", "你好", "γειά", "hello שלום"])
def test_letters_of_other_alphabets_are_refused(text: str) -> None:
    with pytest.raises(Unsupported, match="English"):
        KNOWN.pieces(text, "af_heart")


@pytest.mark.parametrize("text", [" ", "...", "👋", "“”", "\n\n"])
def test_a_text_without_words_is_refused(text: str) -> None:
    with pytest.raises(BadRequest, match="no word"):
        KNOWN.pieces(text, "af_heart")


def test_sentences_are_pieces_and_the_first_is_cut_at_a_pause() -> None:
    text = (
        "When it was cold outside and dark, nobody left the house at all for days. "
        "In summer, they all went to the sea, and swam there."
    )
    first, rest, second = KNOWN.pieces(text, "af_heart")
    assert first.endswith("dˈɑɹk,") and rest.endswith(".") and second.count(",") == 2


def test_short_sentences_are_spoken_together() -> None:
    assert len(KNOWN.pieces("No. Yes. Why? Go! So it is.", "af_heart")) == 1


def test_no_piece_is_longer_than_the_model_takes() -> None:
    draw = random.Random(4)
    for speed in (0.25, 1.0, 4.0):
        parts = ["".join(draw.choices("abc", k=draw.randint(1, 200))) for _ in range(60)]
        words = [part for each in parts for part in (each, draw.choice([",", ".", "", "—"])) if part]
        pieces = gather_pieces(words, 510, speed)
        assert max(map(len, pieces)) <= PIECE_PHONEMES * min(1.0, speed)
        assert "".join(pieces).replace(" ", "") == "".join(words)
