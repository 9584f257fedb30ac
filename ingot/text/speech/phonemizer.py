"""From English text to phonemes, in pieces that are spoken at once.

Other languages would need dictionaries of their own; their voices are refused by name, and so are letters of other
alphabets. What is neither a letter, a digit nor a sign that is read out is not spoken.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from ingot.errors import BadRequest, Unsupported
from ingot.text.speech.dictionary import PRIMARY, SECONDARY, VOWELS, Accent, Dictionary, dictionary, stressed
from ingot.text.speech.numbers import spelled_out
from ingot.text.speech.pieces import MARKS, gathered
from ingot.text.speech.spelling import by_letters

ACCENTS: dict[str, Accent] = {"a": "us", "b": "gb"}
"""By the first letter of a voice."""
LANGUAGES = {
    "e": "Spanish",
    "f": "French",
    "h": "Hindi",
    "i": "Italian",
    "j": "Japanese",
    "p": "Portuguese",
    "z": "Chinese",
}
SAID = {
    "%": "percent",
    "&": "and",
    "+": "plus",
    "=": "equals",
    "@": "at",
    "°": "degrees",
    "×": "times",
    "÷": "divided by",
}
SIGNS = str.maketrans(
    {"‘": "'", "’": "'", "ʼ": "'", "«": "“", "»": "”", "–": "—", "―": "—", "‐": "-", "‑": "-"}
    | {sign: f" {word} " for sign, word in SAID.items()}
)
ABBREVIATED = re.compile(r"\b(Mr|Mrs|Ms|Dr|Prof|St|Jr|Sr|vs|etc)\.(?=\s+\S|$)")
ABBREVIATIONS = {"Ms": "mizz", "Prof": "professor", "St": "saint", "Jr": "junior", "Sr": "senior", "vs": "versus"}
DOTTED = re.compile(r"\b(?:[A-Za-z]\.){2,}")
INNER_DOT = re.compile(r"(?<=[A-Za-z])\.(?=[A-Za-z])")
HUMPS = re.compile(r"(?<=[a-z])(?=[A-Z])")
TOKEN = re.compile(r"[A-Za-z]+(?:'[A-Za-z]+)*'?|\.\.\.|[;:,.!?—…\"“”()]|--|\n+")
TO_VERB = frozenset(
    [
        "to",
        "will",
        "would",
        "can",
        "could",
        "shall",
        "should",
        "may",
        "might",
        "must",
        "i",
        "you",
        "we",
        "they",
        "not",
        "don't",
        "didn't",
        "can't",
    ]
)


@dataclass(frozen=True, slots=True)
class Pronouncer:
    """`signs` are the phonemes that the model knows, `most` how many of them it speaks at once."""

    signs: Collection[str]
    most: int

    def pieces(self, text: str, voice: str, speed: float = 1.0) -> tuple[str, ...]:
        """What is spoken of `text`, in order. Raises BadRequest or Unsupported."""
        words = dictionary(accent_of(voice))
        said = list(_spoken(TOKEN.findall(_plain(text)), words))
        found = gathered(("".join(sign for sign in each if sign in self.signs) for each in said), self.most, speed)
        if not any(any(sign not in MARKS for sign in piece) for piece in found):
            raise BadRequest("input has no word or number in it that could be spoken.", param="input")
        return found


def accent_of(voice: str) -> Accent:
    """Raises Unsupported for a voice of another language."""
    if voice[:1] in ACCENTS:
        return ACCENTS[voice[:1]]
    language = LANGUAGES.get(voice[:1], "another language")
    raise Unsupported(f"The voice {voice} speaks {language}; what is pronounced here is English.", param="voice")


def _plain(text: str) -> str:
    """With letters from a to z alone, and words for what is written otherwise."""
    text = unicodedata.normalize("NFKC", text).translate(SIGNS)
    text = "".join(sign for sign in unicodedata.normalize("NFD", text) if not unicodedata.combining(sign))
    text = text.replace("ß", "ss").replace("æ", "ae").replace("œ", "oe").replace("ø", "o").replace("ł", "l")
    foreign = next((sign for sign in text if sign.isalpha() and not sign.isascii()), None)
    if foreign is not None:
        raise Unsupported(
            f"input holds {foreign!r} ({unicodedata.name(foreign, 'a letter').lower()}), a letter that no English is "
            "written in; what is pronounced here is English.",
            param="input",
        )
    text = ABBREVIATED.sub(lambda found: ABBREVIATIONS.get(found[1], found[1]), text)
    text = DOTTED.sub(lambda found: found[0].replace(".", "").upper(), text)
    return HUMPS.sub(" ", INNER_DOT.sub(" dot ", spelled_out(text)))


def _spoken(tokens: list[str], words: Dictionary) -> Iterator[str]:
    """Phonemes of words, and marks between them. How some are said depends on what follows."""
    said: list[str] = []
    following: bool | None = None  # whether a vowel does; None: the clause ends
    for at in reversed(range(len(tokens))):
        token = tokens[at]
        if not token[0].isalpha():
            mark = {"...": "…", "--": "—"}.get(token, "." if token.isspace() else token)
            said.append(mark)
            following = None if mark not in '“”"()' else following
            continue
        before, after = (tokens[near].lower() if 0 <= near < len(tokens) else "" for near in (at - 1, at + 1))
        said.append(_word(token, words, following, before, after).replace("ɾ", "T").replace("ʔ", "t"))
        following = next((sign in VOWELS for sign in said[-1] if sign not in PRIMARY + SECONDARY), None)
    return reversed(said)


def _word(word: str, words: Dictionary, following: bool | None, before: str, after: str) -> str:
    small = word.lower()
    match small:
        case "a":
            return "ɐ"
        case "an":
            return "ɐn"
        case "the":
            return "ði" if following else "ðə"
        case "to" if following is not None:
            return "tʊ" if following else "tə"
        case "am" if following is not None:
            return "ɐm"
        case "in" if following is None:
            return PRIMARY + "ɪn"
        case "i":
            return SECONDARY + "I"
        case "used" if after == "to":
            return "jˈuːst" if words.accent == "gb" else "jˈust"
    entry = words.entry(word)
    if entry is not None:
        usual = entry.verb if entry.verb and before in TO_VERB else entry.usual
        said = entry.last if entry.last and following is None else usual
    else:
        said = words.inflected(small.strip("'")) or _unknown(word, words)
    if len(word) > 1 and word.isupper():
        return stressed(said)
    return stressed(said, SECONDARY) if word[0].isupper() else said


def _unknown(word: str, words: Dictionary) -> str:
    plain = word.replace("'", "")
    owned = word.lower().endswith("'s")
    if owned:
        plain = plain[:-1]
    vowels = sum(letter in "aeiouy" for letter in plain.lower())
    if (plain.isupper() and len(plain) <= 5) or not vowels:
        said = words.letters(plain)
    else:
        said = _joined(plain.lower(), words) or by_letters(plain.lower(), words.accent)
    return words.plural(said) if owned else said


def _joined(word: str, words: Dictionary) -> str | None:
    """Of two words that are written as one."""
    for cut in range(len(word) - 3, 2, -1):
        first, second = words.entry(word[:cut]), words.entry(word[cut:])
        if first is not None and second is not None:
            return first.usual + second.usual.replace(PRIMARY, SECONDARY)
    return None
