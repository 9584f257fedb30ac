"""How English texts are pronounced, and in which pieces they are spoken."""

from __future__ import annotations

import random
import string

import pytest

from ingot.errors import BadRequest, Unsupported
from ingot.text.speech.phonemizer import Pronouncer
from ingot.text.speech.pieces import AT_ONCE, gathered
from ingot.text.speech.spelling import by_letters
from tests.speaking import SIGNS

KNOWN = Pronouncer(frozenset(SIGNS), 510)


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
    assert by_letters("blorpation", "us") == "blɔɹpˈAʃən"
    assert by_letters("zorgle", "gb") == "zˈɔːɡᵊl"
    assert said("xkcd") == "ˌɛkskˌAsˌidˈi"


def test_any_letters_have_a_pronunciation() -> None:
    draw = random.Random(3)
    for _ in range(2000):
        word = "".join(draw.choices(string.ascii_lowercase, k=draw.randint(1, 12)))
        assert set(by_letters(word, "us")) <= set(SIGNS)


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
        pieces = gathered(words, 510, speed)
        assert max(map(len, pieces)) <= AT_ONCE * min(1.0, speed)
        assert "".join(pieces).replace(" ", "") == "".join(words)
