"""Numbers as words."""

from __future__ import annotations

import re

SMALL = [
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
    "thirteen",
    "fourteen",
    "fifteen",
    "sixteen",
    "seventeen",
    "eighteen",
    "nineteen",
]
TENS = ["_", "_", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
GROUPS = ("", " thousand", " million", " billion", " trillion", " quadrillion")
ORDINALS = {
    **{"one": "first", "two": "second", "three": "third", "five": "fifth", "eight": "eighth", "nine": "ninth"},
    "twelve": "twelfth",
}
MONEY = {"$": ("dollar", "cent"), "£": ("pound", "penny"), "€": ("euro", "cent"), "¥": ("yen", "sen")}
PLURALS = {"penny": "pence", "yen": "yen", "sen": "sen"}
SCALES = ("thousand", "million", "billion", "trillion")

DIGITS = r"\d{1,3}(?:,\d{3})+|\d+"
MONEY_AMOUNT = re.compile(rf"([$£€¥])\s?({DIGITS})(\.\d+)?(?:\s(thousand|million|billion|trillion))?(?![\d.]*\d)")
TIME = re.compile(r"\b([01]?\d|2[0-3]):([0-5]\d)\b(?!:)")
ORDINAL = re.compile(r"\b(\d{1,3}(?:,\d{3})+|\d+)(st|nd|rd|th)\b")
YEARS = re.compile(r"\b(1[1-9]\d0|20[2-9]0)s\b")
NUMBER = re.compile(rf"(?<![\w.])([-−])?({DIGITS})((?:\.\d+)+)?")
LEFT = re.compile(r"\d+")
YEAR = range(1100, 2100)


def spelled_out(text: str) -> str:
    """`text` with words in place of all that is written in digits."""
    text = MONEY_AMOUNT.sub(lambda found: f" {_money(*found.groups())} ", text)
    text = TIME.sub(lambda found: f" {_time(int(found[1]), int(found[2]))} ", text)
    text = ORDINAL.sub(lambda found: f" {ordinal(_whole(found[1]))} ", text)
    text = YEARS.sub(lambda found: f" {_plural(year(int(found[1])))} ", text)
    text = NUMBER.sub(lambda found: f" {_number(*found.groups())} ", text)
    return LEFT.sub(lambda found: f" {_digits(found[0])} ", text)


def cardinal(number: int) -> str:
    if number < 20:
        return SMALL[number]
    if number < 100:
        return TENS[number // 10] + (f"-{SMALL[number % 10]}" if number % 10 else "")
    if number < 1000:
        rest = f" {cardinal(number % 100)}" if number % 100 else ""
        return f"{SMALL[number // 100]} hundred{rest}"
    if number >= 1000 ** len(GROUPS):
        return _digits(str(number))
    parts, group = [], 0
    while number:
        if number % 1000:
            parts.append(cardinal(number % 1000) + GROUPS[group])
        number, group = number // 1000, group + 1
    return " ".join(reversed(parts))


def ordinal(number: int) -> str:
    *before, last = re.split(r"([ -])", cardinal(number))
    if last in ORDINALS:
        last = ORDINALS[last]
    else:
        last = last.removesuffix("y") + ("ieth" if last.endswith("y") else "th")
    return "".join((*before, last))


def year(number: int) -> str:
    """As years are read: in pairs, but for the first of a century and those of 2000."""
    high, low = divmod(number, 100)
    if number % 1000 < 10:
        return cardinal(number)
    if low == 0:
        return f"{cardinal(high)} hundred"
    return f"{cardinal(high)} {'oh ' if low < 10 else ''}{cardinal(low)}"


def _whole(digits: str) -> int:
    """Numbers that nobody says are cut, so that their length costs nothing."""
    return int(digits.replace(",", "")[:40])


def _digits(text: str) -> str:
    return " ".join(SMALL[int(digit)] for digit in text)


def _plural(word: str) -> str:
    if word in PLURALS:
        return PLURALS[word]
    return word[:-1] + "ies" if word.endswith("y") else word + "s"


def _number(sign: str | None, whole: str, fraction: str | None) -> str:
    said = "minus " if sign else ""
    parts = (fraction or "")[1:].split(".") if fraction else []
    if len(parts) > 1:  # a version, or an address
        return said + " dot ".join(
            cardinal(_whole(part)) if len(part) < 4 else _digits(part) for part in (whole, *parts)
        )
    if "," not in whole and (len(whole) > 12 or (whole.startswith("0") and len(whole) > 1)):
        said += _digits(whole)
    elif "," not in whole and len(whole) == 4 and not parts and not sign and int(whole) in YEAR:
        said += year(int(whole))
    else:
        said += cardinal(_whole(whole))
    return f"{said} point {_digits(parts[0])}" if parts else said


def _money(sign: str, whole: str, fraction: str | None, scale: str | None) -> str:
    unit, cent = MONEY[sign]
    amount, cents = _whole(whole), (fraction or "")[1:]
    if scale or len(cents) not in (0, 2):
        said = cardinal(amount) + (f" point {_digits(cents)}" if cents else "") + (f" {scale}" if scale else "")
        return f"{said} {_plural(unit)}"
    parts = [(amount, unit)] if amount or not int(cents or 0) else []
    parts += [(int(cents), cent)] if int(cents or 0) else []
    return " and ".join(f"{cardinal(count)} {name if count == 1 else _plural(name)}" for count, name in parts)


def _time(hour: int, minute: int) -> str:
    if minute == 0:
        return f"{cardinal(hour)} o'clock" if 0 < hour <= 12 else f"{cardinal(hour)} hundred"
    return f"{cardinal(hour)} {'oh ' if minute < 10 else ''}{cardinal(minute)}"
