"""From logits to tokens, for all rows at once, each with its own parameters.

Order: penalties and logit bias, what a guide allows, temperature, top-k, top-p, min-p, then a draw. A row's draw is
a number that depends on its seed and on how many tokens it has, on nothing else: the same seed gives the same text
whatever else is in the batch. Logprobs are the model's own, before any of this.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx
import numpy as np

from ingot.engine.penalties import TokenHistory, penalised
from ingot.engine.request import Sampling
from ingot.kernels import native
from ingot.kernels.sampling import Drawing
from ingot.text.grammar.matcher import Mask

_MASK = (1 << 64) - 1

COLDEST = 1e-30
"""Differences of logits, divided by this, are still numbers in float32; divided by less, they may not be."""

# For each byte of a packed mask, what is added to the logits of its eight tokens.
_FORBIDDEN = np.where(
    np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"), 0.0, -np.inf
).astype(np.float32)


def uniform(seed: int, index: int) -> float:
    """The index-th number of a seed's sequence, in [0, 1): a hash, so that no state is kept (splitmix64)."""
    x = (seed * 0x9E3779B97F4A7C15 + (index + 1) * 0xD1B54A32D192ED03) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    # 24 bits: what a float32 between 0 and 1 holds exactly.
    return ((x ^ (x >> 31)) >> 40) / (1 << 24)


class SampledRow(Protocol):
    """What sampling needs to know of a sequence."""

    @property
    def sampling(self) -> Sampling: ...
    @property
    def seed(self) -> int: ...
    @property
    def sampled(self) -> int:
        """Tokens drawn so far, also those not yet read back."""
        ...

    @property
    def banned(self) -> Sequence[int]:
        """Tokens that may not come next."""
        ...


@dataclass(frozen=True)
class Drawn:
    """Arrays with an entry per row, not yet evaluated."""

    tokens: mx.array
    logprobs: mx.array | None = None
    top_tokens: mx.array | None = None
    top_logprobs: mx.array | None = None

    def arrays(self) -> list[mx.array]:
        found = (self.tokens, self.logprobs, self.top_tokens, self.top_logprobs)
        return [array for array in found if array is not None]


def draw(
    logits: mx.array,
    rows: Sequence[SampledRow],
    histories: Sequence[TokenHistory | None] = (),
    masks: Sequence[Mask | None] = (),
    drawing: Drawing | None = None,
) -> Drawn:
    """Draw one token for each row of `logits` [rows, vocab].

    `histories`, if any row has one, are what its penalties look at; `masks`, likewise, say what may be drawn.
    `drawing` is a kernel that draws.
    """
    logits = logits.astype(mx.float32)
    adjusted = penalised(logits, [row.sampling for row in rows], histories)
    adjusted = masked(_biased(adjusted, rows), masks)
    tokens = _choose(adjusted, rows, drawing)
    wanted = [row.sampling.logprobs for row in rows if row.sampling.logprobs is not None]
    if not wanted:
        return Drawn(tokens)
    return score(logits, tokens, max(wanted))


def score(logits: mx.array, tokens: mx.array, top: int) -> Drawn:
    """Logprobs of `tokens` [rows] and of the `top` likeliest tokens of each row."""
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    chosen = mx.take_along_axis(logprobs, tokens[:, None], axis=-1)[:, 0]
    if top == 0:
        return Drawn(tokens, chosen)
    best = mx.argpartition(-logprobs, kth=top - 1, axis=-1)[:, :top]
    values = mx.take_along_axis(logprobs, best, axis=-1)
    order = mx.argsort(-values, axis=-1)
    return Drawn(tokens, chosen, mx.take_along_axis(best, order, axis=-1), mx.take_along_axis(values, order, axis=-1))


def _biased(logits: mx.array, rows: Sequence[SampledRow]) -> mx.array:
    """Apply logit bias and bans, which touch few tokens of few rows."""
    places: list[tuple[int, int]] = []
    amounts: list[float] = []
    for number, row in enumerate(rows):
        for token, amount in _additions(row).items():
            places.append((number, token))
            amounts.append(amount)
    if not places:
        return logits
    at = np.array(places, dtype=np.int32)
    return logits.at[mx.array(at[:, 0]), mx.array(at[:, 1])].add(mx.array(amounts))


def _additions(row: SampledRow) -> dict[int, float]:
    return {**dict(row.sampling.logit_bias), **dict.fromkeys(row.banned, -float("inf"))}


def masked(logits: mx.array, masks: Sequence[Mask | None]) -> mx.array:
    """Take from each row of logits that has a mask the tokens that it does not allow."""
    if all(mask is None for mask in masks):
        return logits
    vocab = logits.shape[-1]
    words = -(-vocab // 32)
    packed = np.full((len(masks), words), 0xFFFFFFFF, dtype=np.uint32)
    for number, mask in enumerate(masks):
        if mask is not None:
            packed[number] = mask[:words]
    # Eight tokens at a time: to look a byte up is cheaper than to shift its bits out one by one.
    amounts = mx.array(_FORBIDDEN)[mx.array(packed.view(np.uint8))]
    return logits + amounts.reshape(len(masks), -1)[:, :vocab]


def _choose(logits: mx.array, rows: Sequence[SampledRow], drawing: Drawing | None) -> mx.array:
    if native.available() and mx.default_device() == mx.cpu and drawing is None:
        return native.draw(logits, [_drawing(row) for row in rows])
    greedy = mx.argmax(logits, axis=-1)
    if all(row.sampling.greedy for row in rows):
        return greedy
    if drawing is not None:
        return drawing(logits, [_drawing(row) for row in rows])
    temperature = _column([max(row.sampling.temperature or 1.0, COLDEST) for row in rows])
    draws = _column([uniform(row.seed, row.sampled) for row in rows])
    # The largest becomes 0 first: whatever it is divided by, it stays a number, and the others fall behind it.
    probabilities = mx.softmax((logits - logits.max(axis=-1, keepdims=True)) / temperature, axis=-1)
    if any(_filters(row.sampling) for row in rows):
        probabilities = mx.where(probabilities >= _least(probabilities, rows), probabilities, 0.0)
    drawn = _first_above(probabilities, draws)
    return mx.where(mx.array([row.sampling.greedy for row in rows]), greedy, drawn)


def _drawing(row: SampledRow) -> tuple[float, int, float, float, float]:
    sampling = row.sampling
    temperature = 0.0 if sampling.greedy else sampling.temperature
    return temperature, sampling.top_k or 0, sampling.top_p, sampling.min_p, uniform(row.seed, row.sampled)


def _filters(sampling: Sampling) -> bool:
    return not sampling.greedy and (_ranked(sampling) or bool(sampling.min_p))


def _least(probabilities: mx.array, rows: Sequence[SampledRow]) -> mx.array:
    """The smallest probability that each row's filters keep.

    A threshold, not a ranking: tokens that are equally likely are kept or dropped together, so that the outcome does
    not depend on how a sort orders them, nor on how many values the other rows need sorted.
    """
    values = _largest(probabilities, max(_ranks(row.sampling, probabilities.shape[-1]) for row in rows))
    rank = mx.arange(values.shape[-1])
    inside = rank < _column([_ranks(row.sampling, values.shape[-1]) for row in rows])
    share = mx.where(inside, values, 0.0)
    share = share / share.sum(axis=-1, keepdims=True)
    before = mx.cumsum(share, axis=-1) - share
    kept = inside & (before < _column([row.sampling.top_p for row in rows]))
    kept = kept | (rank == 0)  # the likeliest token always stays, also where rounding says otherwise
    least = mx.where(kept, values, mx.inf).min(axis=-1, keepdims=True)
    least = mx.where(mx.array([_ranked(row.sampling) for row in rows])[:, None], least, 0.0)
    least = mx.maximum(least, _column([row.sampling.min_p for row in rows]) * values[:, :1])
    return mx.where(mx.array([_filters(row.sampling) for row in rows])[:, None], least, 0.0)


def _ranked(sampling: Sampling) -> bool:
    return bool(sampling.top_k or sampling.top_p < 1.0)


def _ranks(sampling: Sampling, vocab: int) -> int:
    """How many of the likeliest tokens a row's top-k and top-p look at; min-p needs only the first."""
    if sampling.top_k and not sampling.greedy:
        return min(sampling.top_k, vocab)
    return vocab if sampling.top_p < 1.0 and not sampling.greedy else 1


def _largest(values: mx.array, count: int) -> mx.array:
    """The `count` largest values of each row, falling."""
    vocab = values.shape[-1]
    if count < vocab // 2:
        values = mx.topk(values, count, axis=-1)
    return -mx.sort(-values, axis=-1)


def _first_above(weights: mx.array, draws: mx.array) -> mx.array:
    """The first index at which the running sum exceeds the draw; an index of weight zero is never it."""
    running = mx.cumsum(weights, axis=-1)
    above = running > draws * running[:, -1:]
    # A draw so close to one that rounding leaves nothing above it takes the heaviest.
    return mx.where(above[:, -1], mx.argmax(above, axis=-1), mx.argmax(weights, axis=-1))


def _column(values: list[float] | list[int]) -> mx.array:
    return mx.array(values, dtype=mx.float32)[:, None]
