"""Lessons packed into rows of tokens, and the processes that make them while a model trains."""

from __future__ import annotations

import multiprocessing
import os
import random
from collections.abc import Iterator
from multiprocessing.queues import Queue as QueueType

import numpy as np

from foundry import corpus, dialect, vocabulary
from foundry.chat_lessons import chat_lesson
from foundry.lesson import Lesson, seeded
from foundry.recall import Rows, recall_lesson
from foundry.tool_lessons import tool_lesson

SHORT, LONG = 1024, 4352
"""Row lengths. The long one lets an answer follow a prompt of 4096 tokens."""
BATCH = 32
WAITING = 12


def lesson(seed: int, *, held_out: bool = False) -> Lesson:
    """The lesson of this seed: half of them about tools, a few about facts in a short text."""
    chance = seeded(seed, held_out=held_out)
    draw = chance.random()
    if draw < 0.5:
        return tool_lesson(chance)
    return chat_lesson(chance) if draw < 0.9 else recall_lesson(chance, chance.randint(8, 200))


def long_lesson(seed: int, prose: list[str], *, held_out: bool = False) -> Lesson:
    """A question about a fact somewhere in up to 4K tokens, among other facts or in prose."""
    chance = seeded(seed, held_out=held_out)
    size = chance.randint(200, 3800)
    return recall_lesson(chance, size, prose if chance.random() < 0.5 else None)


def written(taught: Lesson, style: str) -> tuple[list[int], list[int]]:
    """The tokens of the prompt and of the completion."""
    return vocabulary.encoded(dialect.prompt(taught, style)), vocabulary.encoded(dialect.completion(taught, style))


def packed(lessons: Iterator[Lesson], style: str, length: int, *, count: int = BATCH) -> Rows:
    """`count` rows, each filled with whole lessons; what counts is what the model has to write itself."""
    (end,) = vocabulary.encoded(vocabulary.DOCUMENT_END)
    tokens = np.full((count, length), end, dtype=np.int64)
    weights = np.zeros((count, length), dtype=np.float32)
    waiting: list[tuple[list[int], list[int]]] = []
    for row in range(count):
        place = 0
        while fitting := _next_fitting(waiting, lessons, style, length, length - place):
            asked, answer = fitting
            size = len(asked) + len(answer)
            tokens[row, place : place + size] = asked + answer
            weights[row, place + len(asked) : place + size] = 1
            place += size + 1
    return Rows(tokens, weights)


def _next_fitting(
    waiting: list[tuple[list[int], list[int]]], lessons: Iterator[Lesson], style: str, length: int, room: int
) -> tuple[list[int], list[int]] | None:
    """The longest-waiting lesson that fits into `room`, of a few that wait."""
    while len(waiting) < WAITING:
        one = written(next(lessons), style)
        if len(one[0]) + len(one[1]) <= length:
            waiting.append(one)
    for number, (asked, answer) in enumerate(waiting):
        if len(asked) + len(answer) <= room:
            return waiting.pop(number)
    return None


def prose_tokens(*, held_out: bool) -> np.ndarray:
    """All documents, one after another, each with its end mark."""
    (end,) = vocabulary.encoded(vocabulary.DOCUMENT_END)
    parts = [np.array([*ids, end]) for ids in vocabulary.batches(corpus.documents(held_out=held_out))]
    order = np.random.default_rng(0).permutation(len(parts))
    return np.concatenate([parts[number] for number in order])


class Writers:
    """Background processes that keep writing short and long rows of lessons, each with its own seeds."""

    def __init__(self, style: str, processes: int) -> None:
        context = multiprocessing.get_context("fork")
        self.short: QueueType[Rows] = context.Queue(64)
        self.long: QueueType[Rows] = context.Queue(64)
        self._processes = [
            context.Process(target=_write, args=(style, number, self.short, self.long), daemon=True)
            for number in range(processes)
        ]
        for process in self._processes:
            process.start()

    def stop(self) -> None:
        for process in self._processes:
            process.terminate()


def _write(style: str, number: int, short: QueueType[Rows], long: QueueType[Rows]) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    prose = corpus.documents(held_out=False)
    seeds = random.Random(number)
    ordinary = (lesson(seeds.randrange(1 << 39)) for _ in iter(int, 1))
    lengthy = (long_lesson(seeds.randrange(1 << 39), prose) for _ in iter(int, 1))
    both = (next(lengthy) if place % 4 == 0 else next(ordinary) for place in iter(lambda: seeds.randrange(1 << 20), -1))
    while True:
        for _ in range(6):
            short.put(packed(ordinary, style, SHORT))
        long.put(packed(both, style, LONG))
