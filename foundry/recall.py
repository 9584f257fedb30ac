"""Key-value recall: the long-context probe.

A probe is a text of pairs like " copper zebra." where every key and value is one token. A key that comes again comes
with the same value, so each repetition is a training signal, near and far.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache

import numpy as np

from foundry import vocabulary
from foundry.lesson import HELD_OUT, Lesson, user

OPENING = "Pairs:"
PAIR = 3  # tokens


@dataclass(frozen=True)
class Rows:
    """Token rows, and how much the prediction of each token counts."""

    tokens: np.ndarray
    weights: np.ndarray


def recall_rows(chance: np.random.Generator, count: int, length: int, keys: int, words: int | None = None) -> Rows:
    """Rows in which `keys` keys come again and again; what counts are the values of repeated keys.

    In half of the rows all keys come once and then in any order, in the others they come in any order from the
    start. With `words`, only that many different words are used.
    """
    pairs = pairs_in(length)
    drawn = chance.integers(0, keys, (count, pairs))
    first = min(keys, pairs)
    drawn[: count // 2, :first] = np.arange(first)
    return _rows(chance, drawn, keys, length, words)


def probe_rows(seed: int, count: int, length: int, questions: int) -> Rows:
    """Held-out rows: distinct facts to fill `length`, of which `questions` are asked for at the end."""
    chance = np.random.default_rng(HELD_OUT + seed)
    keys = pairs_in(length) - questions
    asked = np.stack([chance.choice(keys, questions, replace=questions > keys) for _ in range(count)])
    drawn = np.concatenate([np.broadcast_to(np.arange(keys), (count, keys)), asked], axis=1)
    return _rows(chance, drawn, keys, length)


def pairs_in(length: int) -> int:
    return (length - len(_opening())) // PAIR


def _rows(chance: np.random.Generator, drawn: np.ndarray, keys: int, length: int, different: int | None = None) -> Rows:
    words = _words()[:different]
    count, pairs = drawn.shape
    names = words[np.argsort(chance.random((count, len(words))), axis=1)[:, :keys]]
    values = words[chance.integers(0, len(words), (count, keys))]
    stop = _stop()
    said = np.stack(
        [
            np.take_along_axis(names, drawn, axis=1),
            np.take_along_axis(values, drawn, axis=1),
            np.full_like(drawn, stop),
        ],
        axis=-1,
    )
    counts = np.zeros(said.shape, dtype=np.float32)
    counts[:, :, 1] = _repeated(drawn)
    rest = length - pairs * PAIR
    opening = np.full((count, rest), stop)
    opening[:, : len(_opening())] = _opening()
    return Rows(
        np.concatenate([opening, said.reshape(count, -1)], axis=1),
        np.concatenate([np.zeros((count, rest), dtype=np.float32), counts.reshape(count, -1)], axis=1),
    )


def _repeated(drawn: np.ndarray) -> np.ndarray:
    order = np.argsort(drawn, axis=1, kind="stable")
    ordered = np.take_along_axis(drawn, order, axis=1)
    again = np.zeros(drawn.shape, dtype=bool)
    again[:, 1:] = ordered[:, 1:] == ordered[:, :-1]
    repeated = np.empty_like(again)
    np.put_along_axis(repeated, order, again, axis=1)
    return repeated


@cache
def _words() -> np.ndarray:
    return np.random.default_rng(0).permutation(list(vocabulary.recall_words().values()))


@cache
def _opening() -> list[int]:
    return vocabulary.encoded(OPENING)


@cache
def _stop() -> int:
    (stop,) = vocabulary.encoded(".")
    return stop


def recall_lesson(chance: random.Random, size: int, haystack: list[str] | None = None) -> Lesson:
    """A chat question about pairs in a text of about `size` tokens; with `haystack`, a few pairs inside prose."""
    count = max(2, size // PAIR) if haystack is None else chance.randint(3, 12)
    known = list(vocabulary.recall_words())
    keys = chance.sample(known, count)
    values = {key: chance.choice(known) for key in keys}
    said = [f" {key} {value}." for key, value in values.items()]
    text = OPENING + "".join(said) if haystack is None else _hidden(said, size, haystack, chance)
    asked = chance.sample(keys, min(len(keys), chance.choice((1, 1, 2, 3))))
    answer = "Found:" + "".join(f" {key} {values[key]}." for key in asked)
    thinking = "I look it up." if chance.random() < 0.5 else None
    return Lesson("recall", [user(f"{text}\nWhat follows {' and '.join(asked)}?")], answer, thinking)


def _hidden(said: list[str], size: int, haystack: list[str], chance: random.Random) -> str:
    """Prose of about `size` tokens with some of the pairs after some of its sentences."""
    prose = chance.choice(haystack)
    start = chance.randrange(max(1, len(prose) - size * 3))
    sentences = prose[start : start + size * 3].replace("\n", " ").split(". ")
    for pair in said:
        place = chance.randrange(len(sentences))
        sentences[place] += "." + pair.removesuffix(".")
    return "Text: " + ". ".join(sentences) + "."
