"""What a training step sees: rows of one layout at a time, drawn on the device from what processes keep writing."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import queue
import random
from collections.abc import Iterator
from multiprocessing.queues import Queue as QueueType
from typing import NamedTuple

import numpy as np
import torch

from foundry.chat_lessons import chat_lesson
from foundry.lesson import Lesson, seeded
from foundry.rows import packed
from foundry.vision.layouts import LAYOUTS, QUESTIONS, Rows, rows

CAPACITY = 24_000
CHUNK = 32
TEXT, TEXT_LENGTH, TEXT_WEIGHT = "text", 256, 1.0
"""Chat without pictures comes in between, so that the model keeps answering without one."""
CELLS = 3000
"""About how many tokens of a batch stand for what is seen."""
MOST_ROWS = 192


class Batch(NamedTuple):
    """`frames` and `seen` are empty where there is nothing to see."""

    tokens: torch.Tensor
    weights: torch.Tensor
    positions: torch.Tensor  # (3, rows, length)
    frames: torch.Tensor
    seen: torch.Tensor


class Pool:
    """The rows of a layout written so far; when it is full, new ones replace the oldest."""

    def __init__(self, device: str, capacity: int = CAPACITY) -> None:
        self._device, self._capacity = device, capacity
        self._held: list[torch.Tensor] = []
        self.written = 0

    def add(self, some: Rows) -> None:
        parts = [some.frames, some.tokens, some.weights, some.seen, some.positions]
        if not self._held:
            self._held = [
                torch.zeros(
                    (self._capacity, *part.shape[1:]), dtype=torch.from_numpy(part[:0]).dtype, device=self._device
                )
                for part in parts
            ]
        places = ((torch.arange(len(some.frames)) + self.written) % self._capacity).to(self._device)
        for held, part in zip(self._held, parts, strict=True):
            held[places] = torch.from_numpy(part).to(self._device)
        self.written += len(some.frames)

    def draw(self, count: int) -> Batch:
        row = torch.randint(min(self.written, self._capacity), (count,), device=self._device)
        return self.taken(row, torch.randint(QUESTIONS, (count,), device=self._device))

    def taken(self, row: torch.Tensor, asked: torch.Tensor) -> Batch:
        """The rows with these numbers, each with the question of that number."""
        frames, tokens, weights, seen, positions = self._held
        return Batch(
            tokens[row, asked].long(),
            weights[row, asked].float(),
            positions[row, asked].long().transpose(0, 1).contiguous(),
            frames[row],
            seen[row, asked].long(),
        )


class Feed:
    def __init__(self, device: str, *, processes: int, seed: int, divisor: int = 1) -> None:
        self._device, self._divisor = device, divisor
        self._chance = random.Random(seed)
        context = multiprocessing.get_context("fork")
        self._finished: QueueType[tuple[str, Rows]] = context.Queue(256)
        self._texts: QueueType[np.ndarray] = context.Queue(64)
        self._processes = [
            context.Process(target=_write, args=(seed, number, self._finished, self._texts), daemon=True)
            for number in range(processes)
        ]
        for process in self._processes:
            process.start()
        self._pools = {name: Pool(device) for name in LAYOUTS}
        self._text = torch.zeros((4096, 2, TEXT_LENGTH), dtype=torch.int16, device=device)
        self.text_rows = 0
        while not self.text_rows or not all(pool.written for pool in self._pools.values()):
            self.refresh(wait=120)

    @property
    def written(self) -> dict[str, int]:
        return {name: pool.written for name, pool in self._pools.items()} | {TEXT: self.text_rows}

    def refresh(self, wait: float = 0) -> None:
        """Take what was written since; with `wait`, at least something within so many seconds."""
        try:
            for taken in range(64):
                name, some = self._finished.get(timeout=wait) if wait and not taken else self._finished.get_nowait()
                self._pools[name].add(some)
        except queue.Empty:
            pass
        try:
            for _ in range(4):
                self._add_text(self._texts.get_nowait())
        except queue.Empty:
            return

    def _add_text(self, some: np.ndarray) -> None:
        places = (torch.arange(len(some)) + self.text_rows) % len(self._text)
        self._text[places.to(self._device)] = torch.from_numpy(some).to(self._device)
        self.text_rows += len(some)

    def batch(self) -> Batch:
        names = [*LAYOUTS, TEXT]
        (name,) = self._chance.choices(names, [*(layout.weight for layout in LAYOUTS.values()), TEXT_WEIGHT])
        if name == TEXT:
            return self._texts_drawn(max(1, 64 // self._divisor))
        count = min(MOST_ROWS, CELLS // LAYOUTS[name].cells)
        return self._pools[name].draw(max(1, count // self._divisor))

    def _texts_drawn(self, count: int) -> Batch:
        row = torch.randint(min(self.text_rows, len(self._text)), (count,), device=self._device)
        tokens, weights = self._text[row].unbind(1)
        positions = torch.arange(TEXT_LENGTH, device=self._device).expand(3, count, -1).contiguous()
        nothing = torch.zeros(0, device=self._device)
        return Batch(tokens.long(), weights.float(), positions, nothing, nothing.long())

    def stop(self) -> None:
        for process in self._processes:
            process.terminate()


def _write(seed: int, number: int, finished: QueueType[tuple[str, Rows]], texts: QueueType[np.ndarray]) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    chance = random.Random(seed * 1000 + number)
    names, weights = list(LAYOUTS), [layout.weight for layout in LAYOUTS.values()]
    lessons = _chats(chance)
    texts.put(_text_rows(lessons))
    for name in itertools.chain(names, iter(lambda: chance.choices(names, weights)[0], None)):
        finished.put((name, rows(LAYOUTS[name], [chance.randrange(1 << 39) for _ in range(CHUNK)])))
        if chance.random() < 0.05 and not texts.full():
            texts.put(_text_rows(lessons))


def _chats(chance: random.Random) -> Iterator[Lesson]:
    while True:
        yield chat_lesson(seeded(chance.randrange(1 << 39)))


def _text_rows(lessons: Iterator[Lesson]) -> np.ndarray:
    """(rows, 2, length): tokens, and whether each counts."""
    made = packed(lessons, "json", TEXT_LENGTH, count=CHUNK)
    return np.stack([made.tokens, made.weights], axis=1).astype(np.int16)
