"""From English text to phonemes, in pieces that are synthesized at once: sentences, or clauses of long ones.

Other languages would need dictionaries of their own: their voices and alphabets are refused. Numbers become words
first. Whatever is neither a letter, a digit nor a sign that is read out is skipped.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

from ingot.errors import BadRequest, Unsupported
from ingot.text.speech.dictionary import (
    PRIMARY,
    SECONDARY,
    VOWELS,
    Accent,
    PronunciationDictionary,
    load_dictionary,
    phonemes_by_letters,
    with_stress,
)

ACCENT_BY_VOICE: dict[str, Accent] = {"a": "us", "b": "gb"}  # by the first letter of a voice
UNSUPPORTED_LANGUAGES = {
    **{"e": "Spanish", "f": "French", "h": "Hindi", "i": "Italian", "j": "Japanese", "p": "Portuguese"},
    "z": "Chinese",
}
SPOKEN_SIGNS = {
    **{"%": "percent", "&": "and", "+": "plus", "=": "equals", "@": "at", "°": "degrees", "×": "times"},
    "÷": "divided by",
}
SIGN_SUBSTITUTES = str.maketrans(
    {"‘": "'", "’": "'", "ʼ": "'", "«": "“", "»": "”", "–": "—", "―": "—", "‐": "-", "‑": "-"}
    | {sign: f" {word} " for sign, word in SPOKEN_SIGNS.items()}
)
ABBREVIATED = re.compile(r"\b(Mr|Mrs|Ms|Dr|Prof|St|Jr|Sr|vs|etc)\.(?=\s+\S|$)")
ABBREVIATIONS = {"Ms": "mizz", "Prof": "professor", "St": "saint", "Jr": "junior", "Sr": "senior", "vs": "versus"}
DOTTED = re.compile(r"\b(?:[A-Za-z]\.){2,}")
INNER_DOT = re.compile(r"(?<=[A-Za-z])\.(?=[A-Za-z])")
CAMEL_CASE = re.compile(r"(?<=[a-z])(?=[A-Z])")
SPEECH_TOKEN = re.compile(r"[A-Za-z]+(?:'[A-Za-z]+)*'?|\.\.\.|[;:,.!?—…\"“”()]|--|\n+")
WORDS_BEFORE_VERBS = frozenset(
    {
        *("to", "will", "would", "can", "could", "shall", "should", "may", "might", "must"),
        *("i", "you", "we", "they", "not", "don't", "didn't", "can't"),
    }
)


@dataclass(frozen=True, slots=True)
class Phonemizer:
    """`signs` are the phonemes of the model's vocabulary, `most` is how many it takes at once."""

    signs: Collection[str]
    most: int

    def pieces(self, text: str, voice: str, speed: float = 1.0) -> tuple[str, ...]:
        """The phonemes of `text`, piece by piece. Raises BadRequest or Unsupported."""
        words = load_dictionary(accent_of(voice))
        phonemes = list(_speak_tokens(SPEECH_TOKEN.findall(_normalise_text(text)), words))
        found = gather_pieces(
            ("".join(sign for sign in each if sign in self.signs) for each in phonemes), self.most, speed
        )
        if not any(any(sign not in SPEECH_MARKS for sign in piece) for piece in found):
            raise BadRequest("input has no word or number that can be spoken.", param="input")
        return found


def accent_of(voice: str) -> Accent:
    """Raises Unsupported for a voice of another language."""
    if voice[:1] in ACCENT_BY_VOICE:
        return ACCENT_BY_VOICE[voice[:1]]
    language = UNSUPPORTED_LANGUAGES.get(voice[:1], "another language")
    raise Unsupported(f"The voice {voice} is for {language}; only English is supported.", param="voice")


def _normalise_text(text: str) -> str:
    """Only letters from a to z, with words for numbers, signs and abbreviations."""
    text = unicodedata.normalize("NFKC", text).translate(SIGN_SUBSTITUTES)
    text = "".join(sign for sign in unicodedata.normalize("NFD", text) if not unicodedata.combining(sign))
    text = text.replace("ß", "ss").replace("æ", "ae").replace("œ", "oe").replace("ø", "o").replace("ł", "l")
    foreign = next((sign for sign in text if sign.isalpha() and not sign.isascii()), None)
    if foreign is not None:
        raise Unsupported(
            f"input holds {foreign!r} ({unicodedata.name(foreign, 'a letter').lower()}), which is not a letter of "
            "English; only English is supported.",
            param="input",
        )
    text = ABBREVIATED.sub(lambda found: ABBREVIATIONS.get(found[1], found[1]), text)
    text = DOTTED.sub(lambda found: found[0].replace(".", "").upper(), text)
    return CAMEL_CASE.sub(" ", INNER_DOT.sub(" dot ", spell_out_numbers(text)))


def _speak_tokens(tokens: list[str], words: PronunciationDictionary) -> Iterator[str]:
    """Phonemes of words, and marks between them. Some words depend on what follows."""
    phonemes: list[str] = []
    following: bool | None = None  # whether a vowel does; None: the clause ends
    for at in reversed(range(len(tokens))):
        token = tokens[at]
        if not token[0].isalpha():
            mark = {"...": "…", "--": "—"}.get(token, "." if token.isspace() else token)
            phonemes.append(mark)
            following = None if mark not in '“”"()' else following
            continue
        before, after = (tokens[near].lower() if 0 <= near < len(tokens) else "" for near in (at - 1, at + 1))
        phonemes.append(_word_phonemes(token, words, following, before, after).replace("ɾ", "T").replace("ʔ", "t"))
        following = next((sign in VOWELS for sign in phonemes[-1] if sign not in PRIMARY + SECONDARY), None)
    return reversed(phonemes)


def _word_phonemes(word: str, words: PronunciationDictionary, following: bool | None, before: str, after: str) -> str:
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
        usual = entry.verb if entry.verb and before in WORDS_BEFORE_VERBS else entry.usual
        phonemes = entry.last if entry.last and following is None else usual
    else:
        phonemes = words.inflected(small.strip("'")) or _unknown_word_phonemes(word, words)
    if len(word) > 1 and word.isupper():
        return with_stress(phonemes)
    return with_stress(phonemes, SECONDARY) if word[0].isupper() else phonemes


def _unknown_word_phonemes(word: str, words: PronunciationDictionary) -> str:
    plain = word.replace("'", "")
    owned = word.lower().endswith("'s")
    if owned:
        plain = plain[:-1]
    vowels = sum(letter in "aeiouy" for letter in plain.lower())
    if (plain.isupper() and len(plain) <= 5) or not vowels:
        phonemes = words.letters(plain)
    else:
        phonemes = _compound_phonemes(plain.lower(), words) or phonemes_by_letters(plain.lower(), words.accent)
    return words.plural(phonemes) if owned else phonemes


def _compound_phonemes(word: str, words: PronunciationDictionary) -> str | None:
    """The phonemes of two words that are written as one."""
    for cut in range(len(word) - 3, 2, -1):
        first, second = words.entry(word[:cut]), words.entry(word[cut:])
        if first is not None and second is not None:
            return first.usual + second.usual.replace(PRIMARY, SECONDARY)
    return None


SENTENCE_ENDS = frozenset(".!?…")
PAUSE_MARKS = frozenset(",;:—")
SPEECH_MARKS = SENTENCE_ENDS | PAUSE_MARKS | frozenset('"“”() ')

PIECE_PHONEMES = 120
"""Most phonemes of a piece: some ten seconds. More sound no better, and take memory."""
LEAST_PHONEMES = 30  # shorter pieces are joined with what follows: a single word sounds clipped


def gather_pieces(phonemes: Iterable[str], most: int, speed: float) -> tuple[str, ...]:
    """Join the phonemes of words, and marks, into pieces. Slow speech has shorter ones, as audio takes the memory."""
    most = max(1, min(most, int(PIECE_PHONEMES * min(1.0, speed))))
    pieces: list[str] = []
    piece = ""
    pause = 0  # where the piece could be cut last
    for each in phonemes:
        for part in (each[at : at + most] for at in range(0, len(each), most)):
            while len(join_to_piece(piece, part)) > most:
                cut = pause or len(piece)
                pieces.append(piece[:cut])
                piece, pause = piece[cut:].lstrip(), 0
            piece = join_to_piece(piece, part)
            if part in PAUSE_MARKS:
                pause = len(piece)
                if not pieces and len(piece) >= LEAST_PHONEMES:  # so that audio begins before the sentence ends
                    pieces.append(piece)
                    piece, pause = "", 0
            elif part in SENTENCE_ENDS and len(piece) >= LEAST_PHONEMES:
                pieces.append(piece)
                piece, pause = "", 0
    return tuple(each for each in (*pieces, piece) if each.strip())


def join_to_piece(piece: str, part: str) -> str:
    """Words stand apart; marks stand where the word before them ends."""
    apart = piece and part not in SPEECH_MARKS and piece[-1] not in "“("
    return f"{piece} {part}" if apart else piece + part


SMALL_NUMBERS = [
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"),
    *("thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"),
]
TENS = ["_", "_", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
NUMBER_GROUPS = ("", " thousand", " million", " billion", " trillion", " quadrillion")
ORDINALS = {
    **{"one": "first", "two": "second", "three": "third", "five": "fifth", "eight": "eighth", "nine": "ninth"},
    "twelve": "twelfth",
}
MONEY = {"$": ("dollar", "cent"), "£": ("pound", "penny"), "€": ("euro", "cent"), "¥": ("yen", "sen")}
PLURALS = {"penny": "pence", "yen": "yen", "sen": "sen"}


DIGITS = r"\d{1,3}(?:,\d{3})+|\d+"
MONEY_AMOUNT = re.compile(rf"([$£€¥])\s?({DIGITS})(\.\d+)?(?:\s(thousand|million|billion|trillion))?(?![\d.]*\d)")
TIME_OF_DAY = re.compile(r"\b([01]?\d|2[0-3]):([0-5]\d)\b(?!:)")
ORDINAL = re.compile(r"\b(\d{1,3}(?:,\d{3})+|\d+)(st|nd|rd|th)\b")
YEARS = re.compile(r"\b(1[1-9]\d0|20[2-9]0)s\b")
NUMBER = re.compile(rf"(?<![\w.])([-−])?({DIGITS})((?:\.\d+)+)?")
REMAINING_DIGITS = re.compile(r"\d+")
READ_AS_YEARS = range(1100, 2100)


def spell_out_numbers(text: str) -> str:
    """`text` with words in place of digits."""
    text = MONEY_AMOUNT.sub(lambda found: f" {_money_words(*found.groups())} ", text)
    text = TIME_OF_DAY.sub(lambda found: f" {_time_words(int(found[1]), int(found[2]))} ", text)
    text = ORDINAL.sub(lambda found: f" {ordinal_words(_whole_number(found[1]))} ", text)
    text = YEARS.sub(lambda found: f" {_plural_unit(year_words(int(found[1])))} ", text)
    text = NUMBER.sub(lambda found: f" {_number_words(*found.groups())} ", text)
    return REMAINING_DIGITS.sub(lambda found: f" {_digit_words(found[0])} ", text)


def cardinal_words(number: int) -> str:
    if number < 20:
        return SMALL_NUMBERS[number]
    if number < 100:
        return TENS[number // 10] + (f"-{SMALL_NUMBERS[number % 10]}" if number % 10 else "")
    if number < 1000:
        rest = f" {cardinal_words(number % 100)}" if number % 100 else ""
        return f"{SMALL_NUMBERS[number // 100]} hundred{rest}"
    if number >= 1000 ** len(NUMBER_GROUPS):
        return _digit_words(str(number))
    parts, group = [], 0
    while number:
        if number % 1000:
            parts.append(cardinal_words(number % 1000) + NUMBER_GROUPS[group])
        number, group = number // 1000, group + 1
    return " ".join(reversed(parts))


def ordinal_words(number: int) -> str:
    *before, last = re.split(r"([ -])", cardinal_words(number))
    if last in ORDINALS:
        last = ORDINALS[last]
    else:
        last = last.removesuffix("y") + ("ieth" if last.endswith("y") else "th")
    return "".join((*before, last))


def year_words(number: int) -> str:
    """Years are read in pairs, except the first of a century and those from 2000 to 2009."""
    high, low = divmod(number, 100)
    if number % 1000 < 10:
        return cardinal_words(number)
    if low == 0:
        return f"{cardinal_words(high)} hundred"
    return f"{cardinal_words(high)} {'oh ' if low < 10 else ''}{cardinal_words(low)}"


def _whole_number(digits: str) -> int:
    """Very long numbers are cut, so that their length costs nothing."""
    return int(digits.replace(",", "")[:40])


def _digit_words(text: str) -> str:
    return " ".join(SMALL_NUMBERS[int(digit)] for digit in text)


def _plural_unit(word: str) -> str:
    if word in PLURALS:
        return PLURALS[word]
    return word[:-1] + "ies" if word.endswith("y") else word + "s"


def _number_words(sign: str | None, whole: str, fraction: str | None) -> str:
    words = "minus " if sign else ""
    parts = (fraction or "")[1:].split(".") if fraction else []
    if len(parts) > 1:  # a version, or an address
        return words + " dot ".join(
            cardinal_words(_whole_number(part)) if len(part) < 4 else _digit_words(part) for part in (whole, *parts)
        )
    if "," not in whole and (len(whole) > 12 or (whole.startswith("0") and len(whole) > 1)):
        words += _digit_words(whole)
    elif "," not in whole and len(whole) == 4 and not parts and not sign and int(whole) in READ_AS_YEARS:
        words += year_words(int(whole))
    else:
        words += cardinal_words(_whole_number(whole))
    return f"{words} point {_digit_words(parts[0])}" if parts else words


def _money_words(sign: str, whole: str, fraction: str | None, scale: str | None) -> str:
    unit, cent = MONEY[sign]
    amount, cents = _whole_number(whole), (fraction or "")[1:]
    if scale or len(cents) not in (0, 2):
        words = (
            cardinal_words(amount) + (f" point {_digit_words(cents)}" if cents else "") + (f" {scale}" if scale else "")
        )
        return f"{words} {_plural_unit(unit)}"
    parts = [(amount, unit)] if amount or not int(cents or 0) else []
    parts += [(int(cents), cent)] if int(cents or 0) else []
    return " and ".join(
        f"{cardinal_words(count)} {name if count == 1 else _plural_unit(name)}" for count, name in parts
    )


def _time_words(hour: int, minute: int) -> str:
    if minute == 0:
        return f"{cardinal_words(hour)} o'clock" if 0 < hour <= 12 else f"{cardinal_words(hour)} hundred"
    return f"{cardinal_words(hour)} {'oh ' if minute < 10 else ''}{cardinal_words(minute)}"
