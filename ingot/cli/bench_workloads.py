"""Kinds of work on which guessing ahead gains much or little: what a chat is asked, the same for the same number.

The texts are of our own. Variants differ in names and figures, so that no answer is known from the one before.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any, Final

Body = dict[str, Any]

PEOPLE: Final = ("Amara", "Bruno", "Chiyo", "Dagny", "Emeka", "Farah", "Goran", "Hina", "Ivo", "Jonna", "Kofi", "Liv")
CITIES: Final = ("Bergen", "Cusco", "Dakar", "Gdansk", "Hanoi", "Izmir", "Kigali", "Lagos", "Porto", "Quito", "Riga")
GOODS: Final = ("bolts", "cables", "hinges", "lamps", "pumps", "ropes", "screws", "springs", "tiles", "valves")
NOUNS: Final = ("invoice", "parcel", "reading", "recipe", "sensor", "ticket", "vehicle", "visit")
QUESTIONS: Final = (
    "Why do leaves change colour in autumn?",
    "How does a sailing boat move against the wind?",
    "What makes bread rise, and what goes wrong when it does not?",
    "Why is the night sky dark although there are so many stars?",
    "How do noise-cancelling headphones work?",
    "What should somebody know before planting an apple tree?",
    "How does a refrigerator make things cold?",
    "Why do bridges have gaps in them?",
)
CODE: Final = """\
from dataclasses import dataclass, field


@dataclass
class {Noun}:
    name: str
    owner: str
    amount: float = 0.0
    tags: list[str] = field(default_factory=list)


class {Noun}Store:
    def __init__(self) -> None:
        self.items: dict[str, {Noun}] = {{}}

    def add(self, item: {Noun}) -> None:
        if item.name in self.items:
            raise ValueError(f"{{item.name}} is stored already")
        self.items[item.name] = item

    def total(self, owner: str) -> float:
        return sum(item.amount for item in self.items.values() if item.owner == owner)

    def tagged(self, tag: str) -> list[{Noun}]:
        return [item for item in self.items.values() if tag in item.tags]

    def largest(self, count: int = {count}) -> list[{Noun}]:
        ordered = sorted(self.items.values(), key=lambda item: item.amount, reverse=True)
        return ordered[:count]
"""
ORDERS: Final = {
    "type": "object",
    "properties": {
        "orders": {
            "type": "array",
            "minItems": 3,
            "maxItems": 3,
            "items": {
                "type": "object",
                "properties": {
                    "customer": {"type": "string", "maxLength": 20},
                    "city": {"type": "string", "maxLength": 20},
                    "article": {"enum": list(GOODS)},
                    "quantity": {"type": "integer"},
                    "paid": {"type": "boolean"},
                },
                "required": ["customer", "city", "article", "quantity", "paid"],
                "additionalProperties": False,
            },
        }
    },
    "required": ["orders"],
    "additionalProperties": False,
}
TRIP: Final = {
    "type": "object",
    "properties": {
        "traveller": {"type": "string", "maxLength": 20},
        "departure_city": {"type": "string", "maxLength": 20},
        "destination_city": {"type": "string", "maxLength": 20},
        "passengers": {"type": "integer"},
        "travel_class": {"enum": ["economy", "premium", "business"]},
    },
    "required": ["traveller", "departure_city", "destination_city", "passengers", "travel_class"],
    "additionalProperties": False,
}


def code_edit(dice: random.Random) -> Body:
    noun = dice.choice(NOUNS)
    code = CODE.format(Noun=noun.capitalize(), count=dice.randint(3, 99))
    return _asked(
        f"Rename the method `total` to `sum_for_{noun}` and change nothing else. Answer with the whole file.\n\n"
        f"```python\n{code}```"
    )


def copy(dice: random.Random) -> Body:
    lines = "\n".join(f"- {sentence}" for sentence in _sentences(dice, 8))
    return _asked(f"Repeat this list word for word, and write nothing else:\n\n{lines}")


def chat(dice: random.Random) -> Body:
    return _asked(f"{dice.choice(PEOPLE)} from {dice.choice(CITIES)} asks: {dice.choice(QUESTIONS)}")


def structured(dice: random.Random) -> Body:
    text = " ".join(_sentences(dice, 3))
    form = {"type": "json_schema", "json_schema": {"name": "orders", "schema": ORDERS, "strict": True}}
    return _asked(f"Write these orders as JSON. {text}") | {"response_format": form}


def tool_calls(dice: random.Random) -> Body:
    who, (start, end), seats = dice.choice(PEOPLE), dice.sample(CITIES, 2), dice.randint(1, 6)
    function = {"name": "book_flight", "description": "Books a flight.", "parameters": TRIP, "strict": True}
    return _asked(f"Book a flight from {start} to {end} for {who} and {seats} others, in economy.") | {
        "tools": [{"type": "function", "function": function}],
        "tool_choice": "required",
        "parallel_tool_calls": False,
    }


WORKLOADS: Final[Mapping[str, Callable[[random.Random], Body]]] = {
    "code edit": code_edit,
    "copy": copy,
    "chat": chat,
    "structured output": structured,
    "tool calls": tool_calls,
}


def body_of(workload: str, variant: str) -> Body:
    """What is asked, without how it is to be answered."""
    return WORKLOADS[workload](random.Random(f"{workload}/{variant}"))


def _asked(text: str) -> Body:
    return {"messages": [{"role": "user", "content": text}]}


def _sentences(dice: random.Random, count: int) -> list[str]:
    return [
        f"{dice.choice(PEOPLE)} from {dice.choice(CITIES)} ordered {dice.randint(2, 900)} {dice.choice(GOODS)} "
        f"and {dice.choice(('has paid', 'has not paid yet'))}."
        for _ in range(count)
    ]
