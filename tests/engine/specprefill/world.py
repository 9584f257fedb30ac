"""Engines whose long prompts are scored, and what they compute by mlx-lm's own modules."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import mlx.core as mx
import numpy as np

from ingot.engine.engine import Engine
from ingot.engine.memory_budget import MemoryBudget
from ingot.engine.request import Ended, Event, Request, Sampling, SpecPrefillReport, SpecPrefillRequest, Stop
from ingot.engine.sequence import TokenSequence as Running
from ingot.engine.specprefill.prefill import SpecPrefillSetup
from ingot.engine.specprefill.scorers import DraftScorer, PromptScorer, ScoringWork
from ingot.engine.specprefill.selection import PromptScores, ScoredPrompt
from ingot.engine.speculation.draft_model import CATCH_UP_TOKENS, DraftModel
from ingot.kernels.device import Device, current_device
from ingot.models.adapter import adapt_model
from ingot.models.precision import settle_precision
from tests import engines, tiny

NUMBERS = count()


def some(length: int, seed: int = 0) -> tuple[int, ...]:
    chance = random.Random(f"{seed} {length}")
    return tuple(chance.randrange(tiny.VOCAB - 1) for _ in range(length))


def draft_model(
    kind: str = "llama",
    device: Device | None = None,
    *,
    states: int = 1 << 26,
    cache_bytes: int = 1 << 24,
    seed: int = 1,
    widest: int = CATCH_UP_TOKENS,
) -> DraftModel:
    model, here = tiny.build(kind, seed), device or current_device()
    settle_precision(model, here, None)
    adapter = adapt_model(model, tiny.CONFIGS[kind], here)
    total = adapter.weight_bytes + states
    budget = MemoryBudget(total, adapter.weight_bytes, adapter.footprint, context=4096, widest=widest, rows=8)
    return DraftModel(adapter, budget, cache_bytes=cache_bytes)


class Told:
    """A scorer that was told what matters, and counts how often it is asked."""

    name = "told"

    def __init__(
        self,
        judge: Callable[[tuple[int, ...]], PromptScores],
        pieces: int = 3,
        longest: int = 4000,
        mass: Callable[[tuple[int, ...]], PromptScores] | None = None,
    ) -> None:
        self._judge, self._pieces, self._longest, self._mass = judge, pieces, longest, mass
        self.asked: list[tuple[int, ...]] = []
        self.open = 0

    def able(self, sequence: Running) -> bool:
        return len(sequence.prompt) <= self._longest

    def unread(self, sequence: Running) -> int:
        return len(sequence.prompt)

    def score(self, sequence: Running) -> ScoringWork:
        self.asked.append(sequence.prompt)
        self.open += 1
        try:
            for _ in range(self._pieces):
                yield
            return ScoredPrompt(self._judge(sequence.prompt), self._mass and self._mass(sequence.prompt))
        finally:
            self.open -= 1

    def rest(self) -> None: ...

    def check(self) -> None: ...


def evenly(prompt: tuple[int, ...]) -> PromptScores:
    """Every seventh chunk matters."""
    return (np.arange(len(prompt)) // 32 % 7 == 0).astype(np.float32)


def start(
    kind: str = "llama",
    scorer: Callable[[], PromptScorer] | None = None,
    *,
    threshold: int = 300,
    quality: float | None = None,
    expected_cost: float = 0.0,
    **options: Any,
) -> Engine:
    def offer() -> SpecPrefillSetup:
        made = DraftScorer(draft_model(device=options.get("device"))) if scorer is None else scorer()
        return SpecPrefillSetup(made, threshold, keep=0.3, quality=quality, expected_cost=expected_cost)

    return engines.start(kind, specprefill=offer, **{"cache_bytes": 1 << 26, **options})


DEFAULT_SPECPREFILL = SpecPrefillRequest()


def ask(prompt: Sequence[int], specprefill: SpecPrefillRequest | None = DEFAULT_SPECPREFILL, **options: Any) -> Request:
    message = {"max_tokens": 12, "sampling": Sampling(temperature=0.0), "stop": Stop(ignore_eos=True), **options}
    return Request(f"s{next(NUMBERS)}", (tuple(prompt),), specprefill=specprefill, **message)


def ended(events: list[Event]) -> Ended:
    assert isinstance(events[-1], Ended), events[-1]
    return events[-1]


def report(events: list[Event]) -> SpecPrefillReport:
    [found] = ended(events).specprefill
    return found


def written_by_stock(kind: str, prompt: Sequence[int], kept: Sequence[int], most: int) -> list[int]:
    """What mlx-lm's own layers would write behind a prompt of which some tokens are hidden from all others."""
    model, tokens, shown = tiny.build(kind), list(prompt), [True] * len(prompt)
    for position in set(range(len(prompt))) - set(kept):
        shown[position] = False
    for _ in range(most):
        count = len(tokens)
        mask = mx.tril(mx.ones((count, count), mx.bool_)) & mx.array(shown)
        mask = mask | mx.eye(count).astype(mx.bool_)  # what is hidden sees itself, and nobody sees it
        x = model.model.embed_tokens(mx.array([tokens]))
        for layer in model.model.layers:
            x = layer(x, mask, None)
        logits = model.lm_head(model.model.norm(x))[0, -1]
        tokens.append(int(mx.argmax(logits)))
        shown.append(True)
    return tokens[len(prompt) :]
