"""What forward passes give: tokens and logprobs, by sequences."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx

from ingot.engine.forward_pass import Guess
from ingot.engine.sampling import Drawn
from ingot.engine.sequence import Sequence
from ingot.engine.speculation.ahead import Ahead


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Of one token: (token, logprob) of itself and of the likeliest ones."""

    chosen: tuple[int, float]
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Result:
    """What a step gave one sequence: a new token, or logprobs of prompt tokens, or both."""

    sequence: Sequence
    token: int | None
    logprobs: Logprobs | None = None
    prompt: tuple[Logprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class Launched:
    """A forward pass on its way. At each of `places` a token is drawn; `scored` is a prompt and its logprobs."""

    places: tuple[Ahead, ...]
    drawn: Drawn | None
    witness: mx.array | None  # where nothing is drawn: something small that exists when the pass is done
    tokens: int
    prefill: bool
    began: float  # when its graph was begun, on the clock of time.perf_counter()
    scored: tuple[Sequence, Drawn] | None = None

    @property
    def rows(self) -> list[Sequence]:
        """Those that draw."""
        return [place.sequence for place in self.places if not place.guessed]

    @property
    def guesses(self) -> dict[Sequence, Guess]:
        """What is verified."""
        return {place.sequence: place.guessed for place in self.places if place.guessed}

    def arrays(self) -> list[mx.array]:
        drawn = self.drawn.arrays() if self.drawn else []
        scored = self.scored[1].arrays() if self.scored else []
        return [*drawn, *scored, *([] if self.witness is None else [self.witness])]


def results_of(launched: Launched) -> dict[Sequence, list[Result]]:
    """What was drawn for each sequence, place by place. Waits for it."""
    tokens = _listed(launched.drawn.tokens) if launched.drawn is not None else []
    found: list[Logprobs | None] = [None] * len(tokens)
    if launched.drawn is not None and launched.drawn.logprobs is not None:
        found = [*_logprobs(launched.drawn, tokens)]
    drawn: dict[Sequence, list[Result]] = {}
    for place, token, logprobs in zip(launched.places, tokens, found, strict=True):
        drawn.setdefault(place.sequence, []).append(Result(place.sequence, token, logprobs))
    if launched.scored is not None:
        row, scores = launched.scored
        [last] = drawn.get(row, [Result(row, None)])
        drawn[row] = [replace(last, prompt=tuple(_logprobs(scores, _listed(scores.tokens))))]
    return drawn


def _listed(array: mx.array) -> list[Any]:
    values: Any = array.tolist()
    return list(values)


def _logprobs(drawn: Drawn, tokens: list[int]) -> list[Logprobs]:
    assert drawn.logprobs is not None
    values = _listed(drawn.logprobs)
    if drawn.top_tokens is None or drawn.top_logprobs is None:
        return [Logprobs((token, value), ()) for token, value in zip(tokens, values, strict=True)]
    likeliest = zip(_listed(drawn.top_tokens), _listed(drawn.top_logprobs), strict=True)
    return [
        Logprobs((token, value), tuple(zip(ids, logs, strict=True)))
        for token, value, (ids, logs) in zip(tokens, values, likeliest, strict=True)
    ]
