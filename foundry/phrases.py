"""The words, names and awkward strings that lessons are made of."""

from __future__ import annotations

import random
import string

PEOPLE = (
    "Ana Ben Carla David Elena Farid Greta Hugo Ines Jonas Kira Liam Mona Nils Olga Pavel Quinn Rosa Samir Tara "
    "Umar Vera Wendy Xena Yusuf Zoe Marta Felix Nadia Oscar"
).split()
PLACES = (
    "Oslo Paris Lima Cairo Tokyo Rome Delhi Quito Vienna Dublin Prague Athens Madrid Berlin Lisbon Warsaw Helsinki "
    "Bogota Nairobi Hanoi Seoul Havana Zagreb Riga"
).split()
WORDS = (
    "apple river stone green morning paper window garden silver bread winter yellow forest music bridge candle "
    "summer ocean letter basket market purple hammer island mirror pencil rabbit shadow ticket valley wagon "
    "cotton danger engine finger guitar honey jacket kitchen ladder meadow needle orange pepper quiet rocket "
    "saddle tunnel velvet whisper yogurt zebra the a and with for under over new old small big red blue my your"
).split()

_AWKWARD = (
    '"yes"', '"', "it's", "don't", "C:\\temp\\new", "\\", "\\n", "a\\b", '{"a": [1, 2]}', "[x]", "{}", "<b>", "</p>",
    "<br/>", "&amp;", "a < b", "naïve", "café", "Grüße", "東京", "привет", "🙂", "→", "…", "100%", "$HOME", "#tag", "x=1;",
    "`ls`", "/usr/bin", "user@mail.org", "k: v", "'single'", '\\"both\\"', "a|b", "~", "^", "*bold*", "(see)", "é", "ß",
)  # fmt: skip
_BREAKS = ("\n", "\t", "\n\n", "\\t")
DELIMITERS = (("«", "»"), ("`", "`"), ('"', '"'), ("<<<", ">>>"), ("'", "'"), ("[[", "]]"))


def number_words(count: int, chance: random.Random) -> list[str]:
    return [chance.choice(WORDS) for _ in range(count)]


def gibberish(chance: random.Random) -> str:
    letters = chance.choice((string.ascii_lowercase, string.ascii_letters, string.ascii_letters + string.digits))
    return "".join(chance.choices(letters, k=chance.randint(2, 9)))


def awkward(chance: random.Random) -> str:
    """A string that is hard to quote: quotes, backslashes, newlines, other scripts. White space never at its ends."""
    pieces = [_piece(chance) for _ in range(chance.randint(1, 5))]
    text = pieces[0]
    for piece in pieces[1:]:
        text += chance.choice(_BREAKS) if chance.random() < 0.12 else chance.choice((" ", " ", " ", ""))
        text += piece
    return text


def _piece(chance: random.Random) -> str:
    draw = chance.random()
    if draw < 0.4:
        return chance.choice(WORDS)
    if draw < 0.6:
        return gibberish(chance)
    return chance.choice(_AWKWARD)


def plain(chance: random.Random) -> str:
    return " ".join(number_words(chance.randint(1, 5), chance))


def text_value(chance: random.Random) -> str:
    return awkward(chance) if chance.random() < 0.5 else plain(chance)


def quoted(text: str, chance: random.Random) -> str:
    """The text between delimiters that do not occur in it."""
    fitting = [pair for pair in DELIMITERS if not any(mark in text for mark in pair)]
    opening, closing = chance.choice(fitting or [("<<<<", ">>>>")])
    return f"{opening}{text}{closing}"
