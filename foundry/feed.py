"""What a training step sees: prose, lessons and recall probes side by side, drawn on the device."""

from __future__ import annotations

import queue
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from foundry.recall import Rows, recall_rows
from foundry.rows import LONG, SHORT, Writers, prose_tokens

TASKS = ("prose", "lessons", "recall")
PROMPT_WEIGHT = 0.03
"""How much a token of a lesson counts that the model will never have to write."""


class Batch(NamedTuple):
    tokens: torch.Tensor
    weights: torch.Tensor  # how much the prediction of each token counts
    tasks: torch.Tensor  # of each row, its place in TASKS


@dataclass(frozen=True)
class Mix:
    """How many rows of each task a batch has, in the order of TASKS."""

    length: int
    rows: tuple[int, int, int]

    def smaller(self, divisor: int) -> Mix:
        prose, lessons, recall = (max(1, count // divisor) for count in self.rows)
        return Mix(self.length, (prose, lessons, recall))


DRILL_TOKENS = 16384
MIXES = {"short": Mix(SHORT, (3, 8, 5)), "long": Mix(LONG, (1, 1, 2))}


class Pool:
    """The rows written so far; when it is full, new rows replace the oldest."""

    def __init__(self, capacity: int, length: int, device: str) -> None:
        self._tokens = torch.zeros((capacity, length), dtype=torch.int16, device=device)
        self._weights = torch.zeros((capacity, length), dtype=torch.bool, device=device)
        self.written = 0

    def add(self, rows: Rows) -> None:
        count, capacity = len(rows.tokens), len(self._tokens)
        places = (torch.arange(count) + self.written) % capacity
        places = places.to(self._tokens.device)
        self._tokens[places] = torch.from_numpy(rows.tokens.astype(np.int16)).to(places.device)
        self._weights[places] = torch.from_numpy(rows.weights > 0).to(places.device)
        self.written += count

    def draw(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        chosen = torch.randint(min(self.written, len(self._tokens)), (count,), device=self._tokens.device)
        return self._tokens[chosen].long(), self._weights[chosen].float().clamp_min(PROMPT_WEIGHT)


class Feed:
    def __init__(self, style: str, device: str, *, processes: int, seed: int, divisor: int = 1) -> None:
        self._writers = Writers(style, processes)
        self._device = device
        self._mixes = {kind: mix.smaller(divisor) if divisor > 1 else mix for kind, mix in MIXES.items()}
        self._drill_tokens = DRILL_TOKENS // divisor
        self._pools = {"short": Pool(24_000, SHORT, device), "long": Pool(4_000, LONG, device)}
        self._tasks = {
            kind: torch.repeat_interleave(torch.arange(3), torch.tensor(mix.rows)).to(device)
            for kind, mix in self._mixes.items()
        }
        self._chance = np.random.default_rng(seed)
        self._prose = torch.from_numpy(prose_tokens(held_out=False)).to(device)
        for kind in self._pools:
            self._take(kind, wait=True)

    def refresh(self) -> None:
        """Take what the writers have finished since."""
        for kind in self._pools:
            self._take(kind)

    def written(self, kind: str) -> int:
        return self._pools[kind].written

    def batch(self, kind: str, keys: int) -> Batch:
        mix = self._mixes[kind]
        prose, lessons, recall = mix.rows
        drawn = [self._prose_rows(prose, mix.length), self._pools[kind].draw(lessons)]
        probes = recall_rows(self._chance, recall, mix.length, keys)
        drawn.append((self._sent(probes.tokens.astype(np.int16)).long(), self._sent(probes.weights)))
        return Batch(
            torch.cat([tokens for tokens, _ in drawn]), torch.cat([weights for _, weights in drawn]), self._tasks[kind]
        )

    def drill(self, length: int, keys: int, words: int | None) -> Batch:
        """Many short rows of nothing but recall."""
        probes = recall_rows(self._chance, self._drill_tokens // length, length, keys, words)
        tokens = self._sent(probes.tokens.astype(np.int16)).long()
        task = torch.full((len(tokens),), TASKS.index("recall"), device=self._device)
        return Batch(tokens, self._sent(probes.weights), task)

    def stop(self) -> None:
        self._writers.stop()

    def _prose_rows(self, count: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        starts = torch.randint(len(self._prose) - length, (count, 1), device=self._device)
        tokens = self._prose[starts + torch.arange(length, device=self._device)]
        return tokens, torch.ones(tokens.shape, device=self._device)

    def _sent(self, array: np.ndarray) -> torch.Tensor:
        """The array on the device, without waiting for what the device still does."""
        tensor = torch.from_numpy(array)
        return tensor if self._device == "cpu" else tensor.pin_memory().to(self._device, non_blocking=True)

    def _take(self, kind: str, wait: bool = False) -> None:
        finished = self._writers.short if kind == "short" else self._writers.long
        try:
            if wait:
                self._pools[kind].add(finished.get(timeout=120))
            for _ in range(64):
                self._pools[kind].add(finished.get_nowait())
        except queue.Empty:
            return
