"""Chat without tools: facts, arithmetic, copying, remembering what was said, small jobs on lists of words."""

from __future__ import annotations

import random
from collections.abc import Callable

from foundry import facts, phrases
from foundry.lesson import Lesson, assistant, user

SYSTEMS = ("You are a helpful assistant.", "Answer shortly.", "Be brief and exact.", "You help people with small jobs.")


def chat_lesson(chance: random.Random) -> Lesson:
    """One lesson of any kind."""
    make = chance.choices([make for make, _ in KINDS], [weight for _, weight in KINDS])[0]
    lesson = make(chance)
    messages = lesson.messages
    if chance.random() < 0.25 and len(messages) == 1:
        earlier = _fact(chance)
        messages = [*earlier.messages, assistant(earlier.content), *messages]
    if chance.random() < 0.3:
        messages = [{"role": "system", "content": chance.choice(SYSTEMS)}, *messages]
    return Lesson(lesson.kind, messages, lesson.content, lesson.thinking)


def _thinks(chance: random.Random) -> bool:
    return chance.random() < 0.5


def _fact(chance: random.Random) -> Lesson:
    question, answer, topic = chance.choice(_ASKERS)(chance)
    thinking = f"The user asks for {topic}." if _thinks(chance) else None
    return Lesson("fact", [user(question)], answer, thinking)


def _capital(chance: random.Random) -> tuple[str, str, str]:
    country, city = chance.choice(list(facts.CAPITALS.items()))
    asked = chance.choice(
        (f"What is the capital of {country}?", f"Name the capital of {country}.", f"Capital of {country}?")
    )
    return asked, f"The capital of {country} is {city}.", f"the capital of {country}"


def _opposite(chance: random.Random) -> tuple[str, str, str]:
    word, other = chance.choice(list(facts.OPPOSITES.items()))
    asked = chance.choice((f"What is the opposite of {word}?", f"Give me the opposite of {word}."))
    return asked, f"The opposite of {word} is {other}.", f"the opposite of {word}"


def _young(chance: random.Random) -> tuple[str, str, str]:
    animal, young = chance.choice(list(facts.YOUNG.items()))
    asked = chance.choice((f"What is a young {animal} called?", f"What do you call a baby {animal}?"))
    return asked, f"A young {animal} is called a {young}.", f"the name of a young {animal}"


def _colour(chance: random.Random) -> tuple[str, str, str]:
    thing, colour = chance.choice(list(facts.COLOURS.items()))
    verb = "are" if thing.endswith("s") and thing != "grass" else "is"
    return f"What colour {verb} {thing}?", f"{thing.capitalize()} {verb} {colour}.", f"the colour of {thing}"


def _next(chance: random.Random) -> tuple[str, str, str]:
    ring, kind = chance.choice(((facts.DAYS, "day"), (facts.MONTHS, "month")))
    place = chance.randrange(len(ring))
    after = ring[(place + 1) % len(ring)]
    return (
        f"Which {kind} comes after {ring[place]}?",
        f"{after} comes after {ring[place]}.",
        f"the {kind} after {ring[place]}",
    )


def _numeral(chance: random.Random) -> tuple[str, str, str]:
    number = chance.randrange(len(facts.NUMERALS))
    return (
        f"How do you spell the number {number}?",
        f"{number} is spelled {facts.NUMERALS[number]}.",
        f"the spelling of {number}",
    )


_ASKERS: list[Callable[[random.Random], tuple[str, str, str]]] = [_capital, _opposite, _young, _colour, _next, _numeral]


def _arithmetic(chance: random.Random) -> Lesson:
    thinks = chance.random() < 0.7
    sign = chance.choice("++-*")
    if sign == "*":
        left, right = chance.randint(2, 99 if thinks else 10), chance.randint(2, 9)
    else:
        top = chance.choice((99, 999)) if thinks else 20
        left, right = chance.randint(0, top), chance.randint(0, top)
    if sign == "-":
        left, right = max(left, right), min(left, right)
    result = {"+": left + right, "-": left - right, "*": left * right}[sign]
    sum_text = f"{left} {sign} {right}"
    asked = chance.choice(
        (f"What is {sum_text}?", f"Calculate {sum_text}.", f"{sum_text} = ?", f"How much is {sum_text}?")
    )
    thinking = f"{sum_text}: {steps(left, right, sign)} So {result}." if thinks else None
    return Lesson("arithmetic", [user(asked)], f"{sum_text} = {result}", thinking)


def steps(left: int, right: int, sign: str) -> str:
    """The written method, from the last digit to the first."""
    if sign == "*":
        return _times(left, right)
    tens, carry, said = max(len(str(left)), len(str(right))), 0, []
    for place in range(tens):
        one, other = left // 10**place % 10, right // 10**place % 10
        value = one + other + carry if sign == "+" else one - other - carry
        said.append(f"{one} {sign} {other}{f' {sign} {carry}' if carry else ''} = {value}")
        carry = int(value > 9) if sign == "+" else int(value < 0)
        said[-1] += f", write {value % 10}" + (", carry 1." if carry else ".")
    return " ".join(said)


def _times(left: int, right: int) -> str:
    carry, said = 0, []
    for digit in reversed(str(left)):
        value = int(digit) * right + carry
        said.append(
            f"{digit} * {right}{f' + {carry}' if carry else ''} = {value}, write {value % 10}, carry {value // 10}."
        )
        carry = value // 10
    return " ".join(said)


def _repeat(chance: random.Random) -> Lesson:
    text = phrases.text_value(chance)
    asked = chance.choice(("Repeat exactly:", "Say this back to me:", "Copy this text:", "Echo:"))
    thinking = "I copy the text." if _thinks(chance) else None
    return Lesson("copy", [user(f"{asked} {phrases.quoted(text, chance)}")], text, thinking)


def _remember(chance: random.Random) -> Lesson:
    name, place, word = chance.choice(phrases.PEOPLE), chance.choice(phrases.PLACES), chance.choice(phrases.WORDS[:50])
    opening = [
        user(f"My name is {name}, I live in {place} and my secret word is {word}."),
        assistant(f"Nice to meet you, {name}."),
    ]
    if chance.random() < 0.5:
        between = _fact(chance)
        opening += [*between.messages, assistant(between.content)]
    asked, answer = chance.choice((
        ("What is my name?", f"Your name is {name}."),
        ("Where do I live?", f"You live in {place}."),
        ("What is my secret word?", f"Your secret word is {word}."),
    ))  # fmt: skip
    thinking = "The user told me before." if _thinks(chance) else None
    return Lesson("memory", [*opening, user(asked)], answer, thinking)


def _words(chance: random.Random) -> Lesson:
    words = chance.sample(phrases.WORDS[:50], chance.randint(2, 6))
    jobs = (
        ("Write these words in reverse order: {}", ", ".join(reversed(words))),
        ("Which is the first of these words: {}", words[0]),
        ("Which is the last of these words: {}", words[-1]),
        ("How many words are these: {}", f"There are {facts.NUMERALS[len(words)]} words."),
        ("Write these words in capitals: {}", ", ".join(words).upper()),
    )
    asked, answer = chance.choice(jobs)
    thinking = f"The words are {', '.join(words)}." if _thinks(chance) else None
    return Lesson("words", [user(asked.format(", ".join(words)))], answer, thinking)


def _greeting(chance: random.Random) -> Lesson:
    name = chance.choice(phrases.PEOPLE)
    asked, answer = chance.choice((
        (f"Hello, I am {name}.", f"Hello {name}, how can I help you?"),
        ("Hi!", "Hello, how can I help you?"),
        (f"Good morning, {name} here.", f"Good morning, {name}!"),
        ("Thank you!", "You are welcome."),
        ("Goodbye.", "Goodbye, see you soon."),
        ("Who are you?", "I am a small model made to test a server."),
    ))  # fmt: skip
    return Lesson("greeting", [user(asked)], answer, "The user is polite." if _thinks(chance) else None)


KINDS: list[tuple[Callable[[random.Random], Lesson], float]] = [
    (_fact, 2), (_arithmetic, 4), (_repeat, 3), (_remember, 1.5), (_words, 1.5), (_greeting, 0.5),
]  # fmt: skip
