"""Questions about pictures and clips as the model reads them: tokens with places for what it sees, and positions."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from foundry import dialect, vocabulary
from foundry.lesson import Lesson, assistant
from foundry.vision.scenes import Question, Sight

STYLE = "json"
PATCH, MERGE, TEMPORAL = 16, 2, 2
CELL = PATCH * MERGE
START, END, IMAGE, VIDEO = "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"
SYSTEM = "You look at pictures and clips."
THOUGHTS = {False: "I look at the image.", True: "I watch the clip."}


@dataclass(frozen=True)
class Read:
    """`seen` are the places of the tokens that stand for parts of pictures; `positions` has three axes."""

    prompt: list[int]
    answer: list[int]
    seen: np.ndarray
    positions: np.ndarray


@dataclass(frozen=True)
class Manner:
    """How a question is put: what comes before it, and how a clip is written.

    `rate` is that of its frames. Where it is `wrapped`, the marks around it stay around all its parts, as
    transformers has it since version 5; else only each part has them, as it was before and elsewhere.
    """

    earlier: Question | None = None
    system: bool = False
    thinks: bool = False
    picture_last: bool = False
    rate: float = 2.0
    wrapped: bool = False

    @staticmethod
    def drawn(chance: np.random.Generator, others: list[Question]) -> Manner:
        """`others` are questions that may have been answered before."""
        earlier = others[int(chance.integers(len(others)))] if chance.random() < 0.15 else None
        system, thinks, last, wrapped = (chance.random(4) < (0.15, 0.5, 0.15, 0.5)).tolist()
        return Manner(earlier, system, thinks, last, float(chance.choice([1, 2, 2, 4])), wrapped)


def read(sight: Sight, question: Question, manner: Manner) -> Read:
    """The question about the sight, and its answer."""
    return _read(sight.frames.shape[:3], sight.clip, question, manner)


@lru_cache(maxsize=200_000)
def _read(shape: tuple[int, int, int], clip: bool, question: Question, manner: Manner) -> Read:
    taught = lesson(shape[0], clip, question, manner)
    parts = (shape[1] // CELL, shape[2] // CELL)
    prompt = vocabulary.encoded(expanded(dialect.prompt(taught, STYLE), shape[0], clip, parts, manner))
    answer = vocabulary.encoded(dialect.completion(taught, STYLE))
    tokens = np.array(prompt + answer)
    pads = np.isin(tokens, [*vocabulary.encoded(IMAGE), *vocabulary.encoded(VIDEO)])
    return Read(prompt, answer, np.flatnonzero(pads), positions(pads, *parts))


def lesson(count: int, clip: bool, question: Question, manner: Manner) -> Lesson:
    """The question about `count` pictures, or about a clip."""
    shown = [{"type": "video"}] if clip else [{"type": "image"}] * count
    first = manner.earlier or question
    text = {"type": "text", "text": first.asked}
    opening = {"role": "user", "content": [text, *shown] if manner.picture_last else [*shown, text]}
    messages = [opening]
    if manner.earlier:
        messages += [assistant(manner.earlier.answer), {"role": "user", "content": question.asked}]
    if manner.system:
        messages = [{"role": "system", "content": SYSTEM}, *messages]
    return Lesson(question.kind, messages, question.answer, THOUGHTS[clip] if manner.thinks else None)


def expanded(prompt: str, count: int, clip: bool, parts: tuple[int, int], manner: Manner) -> str:
    """The prompt with a token for each part of a picture, and with the times of a clip's parts."""
    rows, columns = parts
    if not clip:
        return prompt.replace(IMAGE, IMAGE * rows * columns)
    times = [(first + 0.5 * (TEMPORAL - 1)) / manner.rate for first in range(0, count, TEMPORAL)]
    said = "".join(f"<{time:.1f} seconds>{START}{VIDEO * rows * columns}{END}" for time in times)
    return prompt.replace(VIDEO if manner.wrapped else START + VIDEO + END, said)


def positions(pads: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """Time, row and column of each token, (3, tokens). Text goes on after the longer side of what was seen last."""
    found = np.zeros((3, len(pads)), dtype=np.int64)
    place = at = 0
    down, across = np.divmod(np.arange(rows * columns), columns)
    while at < len(pads):
        if pads[at]:
            found[:, at : at + rows * columns] = place + np.stack([np.zeros_like(down), down, across])
            at, place = at + rows * columns, place + max(rows, columns)
        else:
            found[:, at] = place
            at, place = at + 1, place + 1
    return found
