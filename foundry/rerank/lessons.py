"""Queries with passages of which exactly one answers."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from foundry import corpus, facts, phrases
from foundry.lesson import seeded

PASSAGES = 8
LENGTHS = (20, 40, 40, 70, 130)
"""Words of a passage of prose."""
JOBS = "baker doctor farmer painter sailor teacher singer miner driver tailor judge cook".split()
PETS = "dog cat horse goat parrot rabbit snake turtle".split()
DRINKS = "tea coffee milk water juice wine".split()


@dataclass(frozen=True)
class Search:
    """The first passage answers the query, the others do not."""

    kind: str
    query: str
    passages: list[str]


@dataclass(frozen=True)
class Attribute:
    questions: tuple[str, ...]
    statements: tuple[str, ...]
    values: list[str]


ATTRIBUTES = (
    Attribute(("Where does {0} live?", "In which city is the home of {0}?"), ("{0} lives in {1}.", "The home of {0} is in {1}."), phrases.PLACES),
    Attribute(("Where was {0} born?", "Birthplace of {0}"), ("{0} was born in {1}.", "The birthplace of {0} is {1}."), phrases.PLACES),
    Attribute(("What is the job of {0}?", "What does {0} do for a living?"), ("{0} works as a {1}.", "By trade {0} is a {1}."), JOBS),
    Attribute(("Which animal does {0} keep?", "What pet has {0}?"), ("{0} keeps a {1}.", "The pet of {0} is a {1}."), PETS),
    Attribute(("What does {0} drink?", "Favourite drink of {0}"), ("{0} likes to drink {1}.", "The drink that {0} prefers is {1}."), DRINKS),
    Attribute(("When does {0} travel?", "In which month is the journey of {0}?"), ("{0} travels in {1}.", "The journey of {0} is in {1}."), facts.MONTHS),
)  # fmt: skip


def statements() -> Iterator[str]:
    """Every word that lessons about people are made of."""
    for attribute in ATTRIBUTES:
        for pattern in (*attribute.questions, *attribute.statements):
            yield " ".join(pattern.format(person, "") for person in phrases.PEOPLE)
        yield " ".join(attribute.values)


def search(seed: int, *, held_out: bool = False) -> Search:
    """The search of this seed: in definitions, in prose, or in what is said about people."""
    chance = seeded(seed, held_out=held_out)
    make = chance.choices((_person, _definition, _keywords), (3, 3, 4))[0]
    return make(chance, held_out)


def _person(chance: random.Random, held_out: bool) -> Search:
    person = chance.choice(phrases.PEOPLE)
    wanted = chance.choice(ATTRIBUTES)
    others = [one for one in ATTRIBUTES if one is not wanted]
    passages = [_about(chance, person, [wanted], others)]
    while len(passages) < PASSAGES:
        if chance.random() < 0.5:
            passages.append(_about(chance, person, [], others))
        else:
            passages.append(_about(chance, _other(chance, person), [wanted], others))
    return Search("person", chance.choice(wanted.questions).format(person), passages)


def _other(chance: random.Random, person: str) -> str:
    return chance.choice([one for one in phrases.PEOPLE if one != person])


def _about(chance: random.Random, person: str, stated: list[Attribute], others: list[Attribute]) -> str:
    """What is said about a person, and beside it something about somebody else."""
    said = [*stated, *chance.sample(others, chance.randint(0 if stated else 1, 2))]
    lines = [chance.choice(one.statements).format(person, chance.choice(one.values)) for one in said]
    if chance.random() < 0.3:
        another = chance.choice(others)
        lines.append(chance.choice(another.statements).format(_other(chance, person), chance.choice(another.values)))
    chance.shuffle(lines)
    return " ".join(lines)


def _definition(chance: random.Random, held_out: bool) -> Search:
    entries = _entries(held_out)
    start = chance.randrange(len(entries) - 40)
    near = chance.sample(entries[start : start + 40], 4)
    word, meaning = near[0]
    drawn = (*near[1:], *chance.sample(entries, 3 * PASSAGES))
    wrong = [one for one in drawn if word not in (one[0], *_words(one[1]))]
    query = chance.choice(
        ("what does {} mean", "definition of {}", "{}", "meaning of the word {}", "define {}")
    ).format(word)
    passages = [f"{one}: {text}" for one, text in ((word, meaning), *wrong)]
    return Search("definition", query, passages[:PASSAGES])


def _keywords(chance: random.Random, held_out: bool) -> Search:
    """A few words that occur together in one passage; the others have some of them, or none."""
    windows = _windows(held_out)
    while True:
        right = chance.choice(windows)
        content = sorted({word for word in _words(right) if len(word) > 4})
        if len(content) >= 6:
            break
    query = chance.sample(content, chance.randint(2, 4))
    wrong: list[str] = []
    for word in chance.sample(query, len(query) - 1):
        sharing = _having(held_out).get(word, [])
        wrong += [windows[number] for number in chance.sample(sharing, min(2, len(sharing)))]
    wrong += chance.sample(windows, 2 * PASSAGES)
    lacking = [one for one in dict.fromkeys(wrong) if not set(query) <= set(_words(one))]
    return Search("keywords", " ".join(query), [right, *lacking][:PASSAGES])


def _words(text: str) -> list[str]:
    return re.findall("[a-z]+", text.lower())


@cache
def _entries(held_out: bool) -> list[tuple[str, str]]:
    """Words and their definitions."""
    found = []
    for line in "\n".join(corpus.documents(held_out=held_out)).splitlines():
        if entry := re.fullmatch(r"([a-z]{4,14}): (.+)", line):
            found.append((entry[1], " ".join(entry[2].split()[:30])))
    return found


@cache
def _windows(held_out: bool) -> list[str]:
    """Passages of prose, short and long ones."""
    found = []
    for document in corpus.documents(held_out=held_out):
        if re.match("[a-z]+: ", document):
            continue
        words, place = document.split(), 0
        while place + max(LENGTHS) < len(words):
            size = LENGTHS[len(found) % len(LENGTHS)]
            found.append(" ".join(words[place : place + size]))
            place += size
    return found


@cache
def _having(held_out: bool) -> dict[str, list[int]]:
    """Where each longer word occurs, in the passages of prose."""
    found: dict[str, list[int]] = {}
    for number, window in enumerate(_windows(held_out)):
        for word in set(_words(window)):
            if len(word) > 4:
                found.setdefault(word, []).append(number)
    return found
