"""How words are pronounced that a dictionary has, and those that end in -s, -ed and -ing beside them."""

from __future__ import annotations

import lzma
import re
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Literal

Accent = Literal["us", "gb"]

PRIMARY, SECONDARY = "ˈ", "ˌ"
VOWELS = frozenset("AIOQWYaiuæɑɒɔəɛɜɪʊʌᵻ")
FLAPS = frozenset("AIOWYiuæɑəɛɪɹʊʌ")
"""After these an American t is a flap before a vowel."""
_reading = threading.Lock()
DOUBLED = re.compile(r"([bcdgklmnprstvxz])\1ing$|cking$")


@dataclass(frozen=True, slots=True)
class Entry:
    usual: str
    verb: str | None = None
    last: str | None = None  # where a clause ends

    @classmethod
    def read(cls, line: str) -> Entry:
        usual, *further = line.split("\t")
        told = dict(each.split(":", 1) for each in further)
        return cls(usual, told.get("verb"), told.get("last"))


def dictionary(accent: Accent) -> Dictionary:
    """Read once, which takes a few tenths of a second; whoever comes meanwhile waits for it."""
    with _reading:
        return _read(accent)


def read_ahead(accents: Iterable[Accent]) -> threading.Thread:
    """Read dictionaries in a thread, before anybody asks for them."""

    def read() -> None:
        for accent in accents:
            dictionary(accent)

    thread = threading.Thread(target=read, name="ingot-dictionaries", daemon=True)
    thread.start()
    return thread


@cache
def _read(accent: Accent) -> Dictionary:
    packed = files("ingot.text.speech").joinpath("data", f"{accent}.tsv.xz").read_bytes()
    lines = lzma.decompress(packed).decode().splitlines()
    return Dictionary(dict(line.split("\t", 1) for line in lines), accent)


class Dictionary:
    """`entries` are read when they are asked for: there are near 200,000."""

    def __init__(self, entries: dict[str, str], accent: Accent) -> None:
        self._entries, self.accent = entries, accent
        self._unstressed = "ɪ" if accent == "gb" else "ᵻ"

    def entry(self, word: str) -> Entry | None:
        """As it is written, else in small letters, else with a capital."""
        for spelled in dict.fromkeys((word, word.lower(), word.capitalize())):
            if spelled in self._entries:
                return Entry.read(self._entries[spelled])
        return None

    def letters(self, word: str) -> str:
        """Each letter by its name; the last is stressed most."""
        named = "".join(Entry.read(self._entries[letter]).usual for letter in word.upper() if letter in self._entries)
        head, mark, tail = named.replace(PRIMARY, SECONDARY).rpartition(SECONDARY)
        return f"{head}{PRIMARY if mark else ''}{tail}"

    def inflected(self, word: str) -> str | None:
        """A word that is another with an ending."""
        for endings in (self._plural, self._past, self._ing):
            if (said := endings(word)) is not None:
                return said
        return None

    def _stem(self, *spelled: str) -> str | None:
        for word in spelled:
            if len(word) > 1 and (found := self.entry(word)) is not None:
                return found.usual
        return None

    def _plural(self, word: str) -> str | None:
        if word.endswith("'s") or word.endswith("s'"):
            stem = self._stem(word[:-2], word[:-1].removesuffix("'"))
        elif word.endswith("ies"):
            stem = self._stem(word[:-3] + "y", word[:-1])
        elif word.endswith("s") and not word.endswith("ss"):
            stem = self._stem(word[:-1], *([word[:-2]] if word.endswith("es") else []))
        else:
            return None
        return None if stem is None else self.plural(stem)

    def plural(self, stem: str) -> str:
        if stem[-1] in "ptkfθ":
            return stem + "s"
        return stem + (self._unstressed if stem[-1] in "szʃʒʧʤ" else "") + "z"

    def _past(self, word: str) -> str | None:
        if not word.endswith("ed"):
            return None
        double = [word[:-3]] if len(word) > 4 and word[-3] == word[-4] else []
        stem = self._stem(word[:-1], word[:-2], *double, *([word[:-3] + "y"] if word.endswith("ied") else []))
        if stem is None:
            return None
        if stem[-1] in "pkfθʃsʧ":
            return stem + "t"
        if stem[-1] == "t" and self.accent == "us" and len(stem) > 1 and stem[-2] in FLAPS:
            return stem[:-1] + "ɾᵻd"
        return stem + (self._unstressed if stem[-1] in "td" else "") + "d"

    def _ing(self, word: str) -> str | None:
        if not word.endswith("ing"):
            return None
        double = [word[:-4]] if DOUBLED.search(word) else []
        stem = self._stem(word[:-3], word[:-3] + "e", *double)
        if stem is None:
            return None
        if self.accent == "us" and stem[-1] == "t" and len(stem) > 1 and stem[-2] in FLAPS:
            return stem[:-1] + "ɾɪŋ"
        linked = "ɹ" if self.accent == "gb" and stem[-1] in "əː" and word[:-3].endswith("r") else ""
        return stem + linked + "ɪŋ"


def stressed(phonemes: str, mark: str = PRIMARY) -> str:
    """With a stress on the first vowel, where there is none."""
    if PRIMARY in phonemes or SECONDARY in phonemes:
        return phonemes
    at = next((at for at, sign in enumerate(phonemes) if sign in VOWELS), None)
    return phonemes if at is None else phonemes[:at] + mark + phonemes[at:]
