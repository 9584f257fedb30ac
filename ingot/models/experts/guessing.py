"""What the next layer's tokens will choose: guesses, and whether they are worth their time."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from statistics import median
from typing import Any, Final

import mlx.core as mx
import numpy as np

from ingot.models.families.description import MoeSpec

TRIAL_PASSES, TRIAL_INTERVAL = 16, 512
"""Decoding passes that are timed with guesses, in turns with as many without, and how many follow the faster way until
the next trial."""
FEW_TOKENS: Final = 16
"""Tokens of a pass that is timed, or has products launched early, at most."""
LEAST_GAIN: Final = 1.02
"""How many times as fast passes must be with guesses: these take other work's processors and the drive's time."""


class GuessTrial:
    """Whether guessing what the next layer needs makes passes faster on this machine, which is measured: it costs the
    host time in each layer, and where nearly all experts that are needed are in memory there is little to gain."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.guesses = True
        self._clock = clock
        self._began: float | None = None  # when the open pass did, if it is timed
        self._passes = 0  # timed since the trial began
        self._seconds: tuple[list[float], list[float]] = ([], [])  # without guesses, and with them

    def begin_pass(self, tokens: int) -> None:
        """A pass begins, and the one before it has ended."""
        now, began = self._clock(), self._began
        self._began = now if tokens <= FEW_TOKENS else None
        if began is None:
            return
        self._passes += 1
        if self._passes <= 2 * TRIAL_PASSES:
            self._seconds[self.guesses].append(now - began)
            self.guesses = not self.guesses  # in turns: the longer a server runs, the more is in memory
        if self._passes == 2 * TRIAL_PASSES:
            without, with_guesses = map(median, self._seconds)
            self.guesses = without > LEAST_GAIN * with_guesses
        elif self._passes == 2 * TRIAL_PASSES + TRIAL_INTERVAL:
            self._passes, self._seconds, self.guesses = 0, ([], []), True


@dataclass(frozen=True, eq=False)
class RouterGuess:
    """What a layer's router would choose for the hidden states of the layer before, the likeliest first, and more of
    them than a token has: there may be time to read them. It is a guess: what lies between the layers is left out, and
    so are groups of experts."""

    model: Any
    path: str
    """Of the mixture in the model, whose module may have been swapped."""
    spec: MoeSpec
    top: int
    scale: mx.array | None
    """By how much this layer's norm multiplies states more than that of the layer before."""

    def __call__(self, x: mx.array) -> mx.array:
        owner: Any = self.model
        for name in self.path.split("."):
            owner = owner[int(name)] if isinstance(owner, list) else owner[name]
        spec = self.spec
        found: Any = attrgetter(spec.router)(owner)(x if self.scale is None else x * self.scale.astype(x.dtype))
        if isinstance(found, tuple):
            first: mx.array = found[0]
            return first
        scores = mx.sigmoid(found) if spec.scores == "sigmoid" else found
        bias = None if spec.bias is None else attrgetter(spec.bias)(owner)
        scores = scores if bias is None else scores + bias
        most = min(self.top + self.top // 2, scores.shape[-1])
        return mx.argsort(-scores, axis=-1)[..., :most]


def by_likelihood(guessed: np.ndarray) -> list[int]:
    """Experts from the guesses of tokens [..., n], in each of which the likeliest come first."""
    if guessed.size == guessed.shape[-1]:
        only: list[int] = guessed.reshape(-1).tolist()
        return only
    ranks = guessed.shape[-1] - np.arange(guessed.shape[-1])
    experts, places = np.unique(guessed, return_inverse=True)
    weight = np.bincount(places.reshape(-1), np.broadcast_to(ranks, guessed.shape).reshape(-1))
    return [int(experts[place]) for place in np.argsort(-weight, kind="stable")]
