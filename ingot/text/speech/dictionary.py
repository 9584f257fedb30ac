"""How words are pronounced: by a dictionary, by the stem for words in -s, -ed and -ing, else by their letters.

The dictionaries lie in `data`. Each is read once, which takes a few tenths of a second; `preload_dictionaries` does it
ahead of time.
"""

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
SOUNDS_BEFORE_FLAP = frozenset("AIOWYiuæɑəɛɪɹʊʌ")  # after these an American t is a flap before a vowel
_dictionary_lock = threading.Lock()
DOUBLED_CONSONANT = re.compile(r"([bcdgklmnprstvxz])\1ing$|cking$")


@dataclass(frozen=True, slots=True)
class DictionaryEntry:
    usual: str
    verb: str | None = None
    last: str | None = None  # where a clause ends

    @classmethod
    def read(cls, line: str) -> DictionaryEntry:
        usual, *further = line.split("\t")
        marked = dict(each.split(":", 1) for each in further)
        return cls(usual, marked.get("verb"), marked.get("last"))


def load_dictionary(accent: Accent) -> PronunciationDictionary:
    """Read once; whoever asks meanwhile waits for it."""
    with _dictionary_lock:
        return _read_dictionary(accent)


def preload_dictionaries(accents: Iterable[Accent]) -> threading.Thread:
    """Read dictionaries in a thread, ahead of time."""

    def read() -> None:
        for accent in accents:
            load_dictionary(accent)

    thread = threading.Thread(target=read, name="ingot-dictionaries", daemon=True)
    thread.start()
    return thread


@cache
def _read_dictionary(accent: Accent) -> PronunciationDictionary:
    packed = files("ingot.text.speech").joinpath("data", f"{accent}.tsv.xz").read_bytes()
    lines = lzma.decompress(packed).decode().splitlines()
    return PronunciationDictionary(dict(line.split("\t", 1) for line in lines), accent)


class PronunciationDictionary:
    """`entries` are parsed when they are looked up: there are almost 200,000."""

    def __init__(self, entries: dict[str, str], accent: Accent) -> None:
        self._entries, self.accent = entries, accent
        self._unstressed = "ɪ" if accent == "gb" else "ᵻ"

    def entry(self, word: str) -> DictionaryEntry | None:
        """Looked up as written, else in lower case, else capitalized."""
        for spelled in dict.fromkeys((word, word.lower(), word.capitalize())):
            if spelled in self._entries:
                return DictionaryEntry.read(self._entries[spelled])
        return None

    def letters(self, word: str) -> str:
        """Each letter by its name; the last is stressed most."""
        named = "".join(
            DictionaryEntry.read(self._entries[letter]).usual for letter in word.upper() if letter in self._entries
        )
        head, mark, tail = named.replace(PRIMARY, SECONDARY).rpartition(SECONDARY)
        return f"{head}{PRIMARY if mark else ''}{tail}"

    def inflected(self, word: str) -> str | None:
        """The phonemes of a word that is in the dictionary without its ending."""
        for endings in (self._plural, self._past, self._ing):
            if (phonemes := endings(word)) is not None:
                return phonemes
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
        if stem[-1] == "t" and self.accent == "us" and len(stem) > 1 and stem[-2] in SOUNDS_BEFORE_FLAP:
            return stem[:-1] + "ɾᵻd"
        return stem + (self._unstressed if stem[-1] in "td" else "") + "d"

    def _ing(self, word: str) -> str | None:
        if not word.endswith("ing"):
            return None
        double = [word[:-4]] if DOUBLED_CONSONANT.search(word) else []
        stem = self._stem(word[:-3], word[:-3] + "e", *double)
        if stem is None:
            return None
        if self.accent == "us" and stem[-1] == "t" and len(stem) > 1 and stem[-2] in SOUNDS_BEFORE_FLAP:
            return stem[:-1] + "ɾɪŋ"
        linked = "ɹ" if self.accent == "gb" and stem[-1] in "əː" and word[:-3].endswith("r") else ""
        return stem + linked + "ɪŋ"


def with_stress(phonemes: str, mark: str = PRIMARY) -> str:
    """Phonemes with a stress on the first vowel, if there is none yet."""
    if PRIMARY in phonemes or SECONDARY in phonemes:
        return phonemes
    at = next((at for at, sign in enumerate(phonemes) if sign in VOWELS), None)
    return phonemes if at is None else phonemes[:at] + mark + phonemes[at:]


LETTER_RULES = (
    # The first that matches where a word is read; endings and beginnings come before letters.
    ("^kn", "n"), ("^gn", "n"), ("^ps", "s"), ("^wr", "ɹ"), ("^x", "z"), ("^mc", "mək"),
    ("ation$", "ˈAʃən"),
    ("tion$", "ʃən"), ("tions$", "ʃənz"), ("sion$", "ʒən"), ("cian$", "ʃən"), ("cious$", "ʃəs"), ("tious$", "ʃəs"),
    ("ture$", "ʧəɹ"), ("ously$", "əsli"), ("ous$", "əs"), ("ology$", "ˈɑləʤi"), ("able$", "əbᵊl"), ("ible$", "əbᵊl"),
    ("ing$", "ɪŋ"), ("ings$", "ɪŋz"), ("less$", "ləs"), ("ness$", "nəs"), ("ment$", "mənt"), ("tle$", "tᵊl"),
    ("ble$", "bᵊl"), ("ple$", "pᵊl"), ("dle$", "dᵊl"), ("gle$", "ɡᵊl"), ("kle$", "kᵊl"), ("ies$", "iz"), ("ied$", "id"),
    ("ity$", "əti"), ("ism$", "ɪzəm"), ("ey$", "i"), ("que$", "k"), ("gue$", "ɡ"), ("mb$", "m"), ("es$", "z"),
    ("eigh", "A"), ("igh", "I"), ("ough", "ɔ"), ("augh", "ɔ"), ("tch", "ʧ"), ("dge", "ʤ"), ("sch", "sk"), ("chr", "kɹ"),
    ("eau", "O"), ("air", "ɛɹ"), ("are$", "ɛɹ"), ("ear", "ɪɹ"), ("eer", "ɪɹ"), ("oor", "ɔɹ"), ("our", "ɔɹ"),
    ("ire$", "Iəɹ"),
    ("ch", "ʧ"), ("sh", "ʃ"), ("th", "θ"), ("ph", "f"), ("wh", "w"), ("gh", "ɡ"), ("ck", "k"), ("ng", "ŋ"),
    ("qu", "kw"),
    ("ss", "s"), ("ll", "l"), ("tt", "t"), ("pp", "p"), ("bb", "b"), ("dd", "d"), ("ff", "f"), ("gg", "ɡ"), ("mm", "m"),
    ("nn", "n"), ("rr", "ɹ"), ("zz", "z"), ("kk", "k"), ("cc", "k"),
    ("ai", "A"), ("ay", "A"), ("au", "ɔ"), ("aw", "ɔ"), ("ee", "i"), ("ea", "i"), ("ei", "i"), ("ie", "i"), ("eu", "u"),
    ("ew", "u"), ("oa", "O"), ("oe", "O"), ("oi", "Y"), ("oy", "Y"), ("oo", "u"), ("ou", "W"), ("ow", "O"), ("ui", "u"),
    ("ue", "u"), ("er$", "əɹ"), ("ar", "ɑɹ"), ("er", "ɜɹ"), ("ir", "ɜɹ"), ("or", "ɔɹ"), ("ur", "ɜɹ"),
    ("a(?=[bcdfgklmnpstvz]e)", "A"), ("i(?=[bcdfgklmnpstvz]e)", "I"), ("o(?=[bcdfgklmnpstvz]e)", "O"),
    ("u(?=[bcdfgklmnpstvz]e)", "u"), ("a$", "ə"), ("e$", ""), ("i$", "i"), ("o$", "O"), ("u$", "u"), ("y$", "i"),
    ("c(?=[eiy])", "s"), ("g(?=[eiy])", "ʤ"), ("^y", "j"), ("y(?=[aeiou])", "j"), ("s(?<=[aeiou]s)(?=[aeiou])", "z"),
    *zip("abcdefghijlmnopqrstuvwyz", "æbkdɛfɡhɪʤlmnɑpkɹstʌvwɪz", strict=True), ("k", "k"), ("x", "ks"),
)  # fmt: skip
COMPILED_LETTER_RULES = [
    (re.compile(pattern.removeprefix("^")), pattern.startswith("^"), sounds) for pattern, sounds in LETTER_RULES
]
BRITISH_SOUNDS = (
    *(("ɜɹ", "ɜː"), ("ɑɹ", "ɑː"), ("ɔɹ", "ɔː"), ("ɛɹ", "ɛː"), ("əɹ", "ə"), ("O", "Q"), ("i", "iː"), ("u", "uː")),
    ("ɔ(?!ː)", "ɔː"),
)


def phonemes_by_letters(word: str, accent: Accent) -> str:
    """`word` has lower-case letters from a to z only."""
    phonemes, at = "", 0
    while at < len(word):
        for pattern, begins, sounds in COMPILED_LETTER_RULES:
            found = None if begins and at else pattern.match(word, at)
            if found is not None and found.end() > at:
                phonemes, at = phonemes + sounds, found.end()
                break
    if accent == "gb":
        for american, british in BRITISH_SOUNDS:
            phonemes = re.sub(american, british, phonemes)
    return with_stress(phonemes)
