"""Numbers as words."""

from __future__ import annotations

import pytest

from ingot.text.speech.numbers import cardinal, ordinal, spelled_out


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
    assert " ".join(spelled_out(text).split()) == said


def test_every_number_below_a_million_has_words() -> None:
    for number in (*range(0, 1200), *range(1200, 1_000_000, 997)):
        assert cardinal(number) and ordinal(number)


def test_a_number_of_any_length_is_read_at_once() -> None:
    assert len(spelled_out("9" * 4096)) > 4096
    assert spelled_out("1" + ",000" * 1000)
