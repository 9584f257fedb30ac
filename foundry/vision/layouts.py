"""The sizes that training uses. All rows of a batch have one layout, so that batches of a layout are alike in shape."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from foundry import vocabulary
from foundry.vision.prompts import CELL, TEMPORAL, Manner, Read, read
from foundry.vision.scenes import Question, Sight, clip, pair, picture, seeded

TEXT_ROOM = 72
TIME_ROOM = 10
"""Tokens that text may take: in all, and more for each part of a clip. Longer prompts are put in another manner."""


@dataclass(frozen=True)
class Layout:
    """`count` pictures, or as many frames of one clip. `weight` says how often the layout comes."""

    width: int
    height: int
    count: int = 1
    clip: bool = False
    weight: float = 1.0

    @property
    def groups(self) -> int:
        """What the vision tower sees apart: pictures, or pairs of frames."""
        return self.count // TEMPORAL if self.clip else self.count

    @property
    def cells(self) -> int:
        """Tokens that stand for what is seen, in all."""
        return self.groups * (self.width // CELL) * (self.height // CELL)

    @property
    def length(self) -> int:
        return self.cells + TEXT_ROOM + (self.groups * TIME_ROOM if self.clip else 0)

    def sight(self, chance: np.random.Generator) -> Sight:
        if self.clip:
            return clip(chance, self.width, self.height, self.count)
        make = picture if self.count == 1 else pair
        return make(chance, self.width, self.height)


LAYOUTS = {
    "square": Layout(96, 96, weight=2.5),
    "wide": Layout(128, 96, weight=2.5),
    "tall": Layout(96, 128, weight=2.5),
    "large": Layout(128, 128, weight=3.5),
    "pair": Layout(96, 96, 2, weight=0.8),
    "clip4": Layout(64, 64, 4, clip=True, weight=1.0),
    "clip6": Layout(96, 64, 6, clip=True, weight=1.0),
    "clip8": Layout(96, 96, 8, clip=True, weight=0.8),
}


@dataclass(frozen=True)
class Rows:
    """Examples of one layout with several questions each; the second axis of all but `frames` is the question."""

    frames: np.ndarray  # (rows, groups, frames of a group, height, width, 3), bytes
    tokens: np.ndarray  # (rows, questions, length)
    weights: np.ndarray
    seen: np.ndarray  # (rows, questions, cells): the places of the tokens that stand for what is seen
    positions: np.ndarray  # (rows, questions, 3, length)


QUESTIONS = 4


def rows(layout: Layout, seeds: list[int], *, held_out: bool = False) -> Rows:
    made = [examples(layout, seed, held_out=held_out) for seed in seeds]
    shape = (len(seeds), QUESTIONS, layout.length)
    (end,) = vocabulary.encoded(vocabulary.DOCUMENT_END)
    tokens, weights = np.full(shape, end, dtype=np.int16), np.zeros(shape, dtype=bool)
    seen = np.zeros((*shape[:2], layout.cells), dtype=np.int16)
    positions = np.zeros((*shape[:2], 3, layout.length), dtype=np.int16)
    for row, (_, asked) in enumerate(made):
        for number, (_, one) in enumerate(asked):
            size = len(one.prompt) + len(one.answer)
            tokens[row, number, :size] = one.prompt + one.answer
            weights[row, number, len(one.prompt) : size] = True
            seen[row, number] = one.seen
            positions[row, number, :, :size] = one.positions
    frames = np.stack([sight.frames for sight, _ in made])
    return Rows(frames.reshape(len(seeds), layout.groups, -1, *frames.shape[2:]), tokens, weights, seen, positions)


def examples(layout: Layout, seed: int, *, held_out: bool = False) -> tuple[Sight, list[tuple[Question, Read]]]:
    """What is seen, and QUESTIONS questions about it, with their answers."""
    chance = seeded(seed, held_out=held_out)
    sight = layout.sight(chance)
    asked = [sight.questions[number] for number in chance.permutation(len(sight.questions))[:QUESTIONS].tolist()]
    return sight, [(one, _put(layout, sight, one, [o for o in asked if o != one], chance)) for one in asked]


def _put(layout: Layout, sight: Sight, question: Question, others: list[Question], chance: np.random.Generator) -> Read:
    """The question in a manner that leaves it short enough."""
    while True:
        one = read(sight, question, Manner.drawn(chance, others))
        if len(one.prompt) + len(one.answer) <= layout.length:
            return one
