"""Searches as token rows, and the processes that write them while the cross-encoder trains."""

from __future__ import annotations

import multiprocessing
import os
import random
from dataclasses import dataclass
from multiprocessing.queues import Queue as QueueType

import numpy as np

from foundry.rerank.lessons import PASSAGES, Search, search
from foundry.rerank.shape import CONTEXT
from foundry.rerank.wordpiece import tokenizer

LENGTH = CONTEXT
CHUNK = 64


@dataclass(frozen=True)
class Rows:
    """(searches, passages, LENGTH) each. `segments` is 0 in the query and 1 in the passage, `there` marks tokens."""

    tokens: np.ndarray
    segments: np.ndarray
    there: np.ndarray


def rows(searches: list[Search]) -> Rows:
    pairs = [(one.query, passage) for one in searches for passage in one.passages]
    shape = (len(pairs), LENGTH)
    tokens, segments, there = np.zeros(shape, np.int16), np.zeros(shape, np.int8), np.zeros(shape, bool)
    for row, found in enumerate(tokenizer().encode_batch(pairs)):
        size = min(LENGTH, len(found.ids))
        tokens[row, :size], segments[row, :size], there[row, :size] = found.ids[:size], found.type_ids[:size], True
    return Rows(*(part.reshape(len(searches), PASSAGES, LENGTH) for part in (tokens, segments, there)))


class Writers:
    def __init__(self, processes: int, seed: int) -> None:
        context = multiprocessing.get_context("fork")
        self.finished: QueueType[Rows] = context.Queue(128)
        self._processes = [
            context.Process(target=_write, args=(seed * 1000 + number, self.finished), daemon=True)
            for number in range(processes)
        ]
        for process in self._processes:
            process.start()

    def stop(self) -> None:
        for process in self._processes:
            process.terminate()


def _write(seed: int, finished: QueueType[Rows]) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    seeds = random.Random(seed)
    while True:
        finished.put(rows([search(seeds.randrange(1 << 39)) for _ in range(CHUNK)]))
