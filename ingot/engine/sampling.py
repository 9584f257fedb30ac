"""Sampling: from logits to tokens, for all rows at once, each with its own parameters.

Order: penalties and logit bias, what a grammar allows, temperature, top-k, top-p, min-p, then a draw. A row's draw
is a number that depends on its seed and on how many tokens it has, on nothing else: the same seed gives the same
text whatever else is in the batch. Logprobs are the model's own, before any of this.

Penalties look at histories that stay on the device, so that no row with penalties makes the engine wait for tokens
to be read back. A token is drawn behind each draft token as well (`DraftPosition`), which is how drafts are
verified. A grammar's failure is its own sequence's alone: it is noted on the sequence, whose request then ends
with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from collections.abc import Sequence as Many
from copy import copy
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol

import mlx.core as mx
import numpy as np

from ingot.engine.request import Sampling
from ingot.engine.sequence import TokenSequence
from ingot.errors import IngotError
from ingot.kernels.cpu import native
from ingot.kernels.sampling import SampleTokens
from ingot.text.grammar.matcher import TokenMask

_UINT64 = (1 << 64) - 1

LOWEST_TEMPERATURE = 1e-30
"""Differences of logits, divided by this, are still numbers in float32; divided by less, they may not be."""

# For each byte of a packed mask, what is added to the logits of its eight tokens.
_MASKED_LOGITS = np.where(
    np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"), 0.0, -np.inf
).astype(np.float32)


def uniform_draw(seed: int, index: int) -> float:
    """The index-th number of a seed's sequence, in [0, 1): a hash, so that no state is kept (splitmix64)."""
    x = (seed * 0x9E3779B97F4A7C15 + (index + 1) * 0xD1B54A32D192ED03) & _UINT64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _UINT64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _UINT64
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
class SampledTokens:
    """Arrays with an entry per row, not yet evaluated."""

    tokens: mx.array
    logprobs: mx.array | None = None
    top_tokens: mx.array | None = None
    top_logprobs: mx.array | None = None

    def arrays(self) -> list[mx.array]:
        found = (self.tokens, self.logprobs, self.top_tokens, self.top_logprobs)
        return [array for array in found if array is not None]


def sample_tokens(
    logits: mx.array,
    rows: Sequence[SampledRow],
    histories: Sequence[TokenHistory | None] = (),
    masks: Sequence[TokenMask | None] = (),
    drawing: SampleTokens | None = None,
) -> SampledTokens:
    """Draw one token for each row of `logits` [rows, vocab].

    `histories`, if any row has one, are what its penalties look at; `masks`, likewise, say what may be drawn.
    `drawing` is a kernel that draws.
    """
    logits = logits.astype(mx.float32)
    adjusted = apply_penalties(logits, [row.sampling for row in rows], histories)
    adjusted = apply_masks(_apply_bias(adjusted, rows), masks)
    tokens = _choose_tokens(adjusted, rows, drawing)
    wanted = [row.sampling.logprobs for row in rows if row.sampling.logprobs is not None]
    if not wanted:
        return SampledTokens(tokens)
    return score_tokens(logits, tokens, max(wanted))


def score_tokens(logits: mx.array, tokens: mx.array, top: int) -> SampledTokens:
    """Logprobs of `tokens` [rows] and of the `top` likeliest tokens of each row."""
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    chosen = mx.take_along_axis(logprobs, tokens[:, None], axis=-1)[:, 0]
    if top == 0:
        return SampledTokens(tokens, chosen)
    best = mx.argpartition(-logprobs, kth=top - 1, axis=-1)[:, :top]
    values = mx.take_along_axis(logprobs, best, axis=-1)
    order = mx.argsort(-values, axis=-1)
    return SampledTokens(
        tokens, chosen, mx.take_along_axis(best, order, axis=-1), mx.take_along_axis(values, order, axis=-1)
    )


def _apply_bias(logits: mx.array, rows: Sequence[SampledRow]) -> mx.array:
    """Apply logit bias and bans, which touch few tokens of few rows."""
    places: list[tuple[int, int]] = []
    amounts: list[float] = []
    for number, row in enumerate(rows):
        for token, amount in _logit_additions(row).items():
            places.append((number, token))
            amounts.append(amount)
    if not places:
        return logits
    at = np.array(places, dtype=np.int32)
    return logits.at[mx.array(at[:, 0]), mx.array(at[:, 1])].add(mx.array(amounts))


def _logit_additions(row: SampledRow) -> dict[int, float]:
    return {**dict(row.sampling.logit_bias), **dict.fromkeys(row.banned, -float("inf"))}


def apply_masks(logits: mx.array, masks: Sequence[TokenMask | None]) -> mx.array:
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
    amounts = mx.array(_MASKED_LOGITS)[mx.array(packed.view(np.uint8))]
    return logits + amounts.reshape(len(masks), -1)[:, :vocab]


def _choose_tokens(logits: mx.array, rows: Sequence[SampledRow], drawing: SampleTokens | None) -> mx.array:
    if native.available() and mx.default_device() == mx.cpu and drawing is None:
        return native.sample_tokens(logits, [_kernel_parameters(row) for row in rows])
    greedy = mx.argmax(logits, axis=-1)
    if all(row.sampling.greedy for row in rows):
        return greedy
    if drawing is not None:
        return drawing(logits, [_kernel_parameters(row) for row in rows])
    temperature = _column([max(row.sampling.temperature or 1.0, LOWEST_TEMPERATURE) for row in rows])
    draws = _column([uniform_draw(row.seed, row.sampled) for row in rows])
    # The largest becomes 0 first: whatever it is divided by, it stays a number, and the others fall behind it.
    probabilities = mx.softmax((logits - logits.max(axis=-1, keepdims=True)) / temperature, axis=-1)
    if any(_has_filters(row.sampling) for row in rows):
        probabilities = mx.where(probabilities >= _least_probability(probabilities, rows), probabilities, 0.0)
    drawn = _first_index_above(probabilities, draws)
    return mx.where(mx.array([row.sampling.greedy for row in rows]), greedy, drawn)


def _kernel_parameters(row: SampledRow) -> tuple[float, int, float, float, float]:
    sampling = row.sampling
    temperature = 0.0 if sampling.greedy else sampling.temperature
    return temperature, sampling.top_k or 0, sampling.top_p, sampling.min_p, uniform_draw(row.seed, row.sampled)


def _has_filters(sampling: Sampling) -> bool:
    return not sampling.greedy and (_is_ranked(sampling) or bool(sampling.min_p))


def _least_probability(probabilities: mx.array, rows: Sequence[SampledRow]) -> mx.array:
    """The smallest probability that each row's filters keep.

    A threshold, not a ranking: tokens that are equally likely are kept or dropped together, so that the outcome does
    not depend on how a sort orders them, nor on how many values the other rows need sorted.
    """
    values = _largest_values(probabilities, max(_rank_count(row.sampling, probabilities.shape[-1]) for row in rows))
    rank = mx.arange(values.shape[-1])
    inside = rank < _column([_rank_count(row.sampling, values.shape[-1]) for row in rows])
    share = mx.where(inside, values, 0.0)
    share = share / share.sum(axis=-1, keepdims=True)
    before = mx.cumsum(share, axis=-1) - share
    kept = inside & (before < _column([row.sampling.top_p for row in rows]))
    kept = kept | (rank == 0)  # the likeliest token always stays, also where rounding says otherwise
    least = mx.where(kept, values, mx.inf).min(axis=-1, keepdims=True)
    least = mx.where(mx.array([_is_ranked(row.sampling) for row in rows])[:, None], least, 0.0)
    least = mx.maximum(least, _column([row.sampling.min_p for row in rows]) * values[:, :1])
    return mx.where(mx.array([_has_filters(row.sampling) for row in rows])[:, None], least, 0.0)


def _is_ranked(sampling: Sampling) -> bool:
    return bool(sampling.top_k or sampling.top_p < 1.0)


def _rank_count(sampling: Sampling, vocab: int) -> int:
    """How many of the likeliest tokens a row's top-k and top-p look at; min-p needs only the first."""
    if sampling.top_k and not sampling.greedy:
        return min(sampling.top_k, vocab)
    return vocab if sampling.top_p < 1.0 and not sampling.greedy else 1


def _largest_values(values: mx.array, count: int) -> mx.array:
    """The `count` largest values of each row, falling."""
    vocab = values.shape[-1]
    if count < vocab // 2:
        values = mx.topk(values, count, axis=-1)
    return -mx.sort(-values, axis=-1)


def _first_index_above(weights: mx.array, draws: mx.array) -> mx.array:
    """The first index at which the running sum exceeds the draw; an index of weight zero is never it."""
    running = mx.cumsum(weights, axis=-1)
    above = running > draws * running[:, -1:]
    # A draw so close to one that rounding leaves nothing above it takes the heaviest.
    return mx.where(above[:, -1], mx.argmax(above, axis=-1), mx.argmax(weights, axis=-1))


def _column(values: list[float] | list[int]) -> mx.array:
    return mx.array(values, dtype=mx.float32)[:, None]


def needs_history(sampling: Sampling) -> bool:
    return bool(sampling.presence_penalty or sampling.frequency_penalty or sampling.repetition_penalty != 1.0)


class TokenHistory:
    """One sequence's, from its first draw to its last."""

    def __init__(self, vocab: int, prompt: Sequence[int], drawn: Sequence[int] = ()) -> None:
        counts = np.bincount(np.asarray(drawn, dtype=np.int64), minlength=vocab)
        held = np.zeros(vocab, dtype=np.bool_)
        held[np.asarray(prompt, dtype=np.int64)] = True
        self.counts = mx.array(counts.astype(np.float32))  # [vocab]: how often each token was drawn
        self.prompt = mx.array(held)  # [vocab]: whether the prompt holds it

    def learn(self, token: mx.array) -> None:
        """A token that was drawn, known to the device alone."""
        self.counts = self.counts.at[token].add(mx.array(1.0))

    def ahead(self, tokens: Sequence[int]) -> TokenHistory:
        """What it will be if these are drawn next."""
        made = copy(self)
        for token in tokens:
            made.learn(mx.array(token))
        return made


def apply_penalties(
    logits: mx.array, samplings: Sequence[Sampling], histories: Sequence[TokenHistory | None]
) -> mx.array:
    """Logits [rows, vocab] with each row's penalties. Rows without a history stay as they are, to the last bit."""
    if all(history is None for history in histories):
        return logits
    vocab = logits.shape[-1]
    nothing, nowhere = mx.zeros(vocab), mx.zeros(vocab, dtype=mx.bool_)
    counts = mx.stack([nothing if history is None else history.counts for history in histories])
    prompts = mx.stack([nowhere if history is None else history.prompt for history in histories])
    drawn = counts > 0
    repetition = _penalty_column([sampling.repetition_penalty for sampling in samplings])
    repeated = mx.where(logits > 0, logits / repetition, logits * repetition)
    logits = mx.where(drawn | prompts, repeated, logits)
    presence = _penalty_column([sampling.presence_penalty for sampling in samplings])
    frequency = _penalty_column([sampling.frequency_penalty for sampling in samplings])
    return logits - mx.where(drawn, presence + frequency * counts, 0.0)


def _penalty_column(values: list[float]) -> mx.array:
    return mx.array(values, dtype=mx.float32)[:, None]


@dataclass(frozen=True, slots=True)
class DraftPosition:
    sequence: TokenSequence
    guessed: tuple[int, ...] = ()

    @property
    def sampling(self) -> Sampling:
        return self.sequence.sampling

    @property
    def seed(self) -> int:
        return self.sequence.seed

    @property
    def sampled(self) -> int:
        return self.sequence.sampled + len(self.guessed)

    @property
    def banned(self) -> Many[int]:
        return self.sequence.banned_at(self.sampled)


def draft_positions(sequence: TokenSequence, guess: tuple[int, ...]) -> list[DraftPosition]:
    """Where a token is drawn to verify a guess: now, and behind each guessed token."""
    return [DraftPosition(sequence, guess[:count]) for count in range(len(guess) + 1)]


def count_accepted(guess: Many[int], drawn: Many[int]) -> int:
    """How many of the guessed tokens were drawn. The draw behind them counts as well: it is the sequence's own."""
    return next((at for at, (mine, own) in enumerate(zip(guess, drawn, strict=False)) if mine != own), len(guess))


def begin_grammar(sequence: TokenSequence) -> None:
    if sequence.request.guide is None:
        return
    try:
        sequence.guide = sequence.request.guide.begin()
    except IngotError as error:
        sequence.failure = error


def grammar_masks(sequence: TokenSequence, guess: tuple[int, ...] = ()) -> list[TokenMask | None]:
    """What its guide allows next, and behind each token of a guess that the guide agreed to. A guide that has come to
    its end allows anything: the draw will not count."""
    guide = sequence.guide
    if guide is None or sequence.mask_error is not None or guide.done:
        return [None] * (len(guess) + 1)
    try:
        return guide.masks(guess) if guess else [guide.mask()]
    except IngotError as error:
        sequence.mask_error = error
        return [None] * (len(guess) + 1)


def grammatical_prefix(sequence: TokenSequence, guess: tuple[int, ...]) -> tuple[int, ...]:
    """As much of a guess as its guide could accept, without coming to its end."""
    if sequence.guide is None or not guess:
        return guess
    if sequence.mask_error is not None or sequence.guide.done:
        return ()
    try:
        return guess[: sequence.guide.agreed(guess)]
    except IngotError as error:
        sequence.mask_error = error
        return ()


def accept_token(sequence: TokenSequence, token: int) -> None:
    if sequence.guide is None or sequence.failure is not None:
        return
    try:
        if sequence.mask_error is not None:
            raise sequence.mask_error
        sequence.guide.accept(token)
    except IngotError as error:
        sequence.failure = error


def grammar_needs_tokens(sequence: TokenSequence) -> bool:
    """Whether its next draw depends on tokens that were drawn and not yet read."""
    return sequence.guide is not None and not sequence.known and not sequence.guide.free


def grammar_is_done(sequence: TokenSequence) -> bool:
    return sequence.guide is not None and sequence.guide.done


class Sampler:
    def __init__(self, vocab: int, drawing: SampleTokens | None = None) -> None:
        """With a `drawing` tokens are drawn by that kernel, else by plain operations."""
        self._vocab, self._drawing = vocab, drawing
        self._histories: dict[TokenSequence, TokenHistory] = {}  # of those with penalties, from their first draw on

    def draw(self, logits: mx.array, places: Many[DraftPosition], catch_up: Callable[[], None]) -> SampledTokens:
        """A token for each row of `logits` [places, vocab]; a sequence's places stand one behind another.

        `catch_up` sees to it that sequences know the tokens that were drawn before.
        """
        histories = [self._history(place) for place in places]
        drawn = sample_tokens(logits, places, histories, self._masks(logits, places, catch_up), self._drawing)
        for number, (place, history) in enumerate(zip(places, histories, strict=True)):
            if history is not None and _is_next_token(place, places[number + 1 :]):
                history.learn(drawn.tokens[number])
        return drawn

    def learn(self, sequence: TokenSequence, tokens: Iterable[int]) -> None:
        """Tokens that a sequence was given after a guess was verified."""
        history = self._histories.get(sequence)
        if history is not None:
            for token in tokens:
                history.learn(mx.array(token))

    def forget(self, sequence: TokenSequence) -> None:
        self._histories.pop(sequence, None)

    def clear(self) -> None:
        self._histories.clear()

    def _history(self, place: DraftPosition) -> TokenHistory | None:
        row = place.sequence
        if needs_history(row.sampling) and row not in self._histories:
            self._histories[row] = TokenHistory(self._vocab, row.whole_prompt, row.generated)
        history = self._histories.get(row)
        return history if history is None or not place.guessed else history.ahead(place.guessed)

    def _masks(
        self, logits: mx.array, places: Many[DraftPosition], catch_up: Callable[[], None]
    ) -> list[TokenMask | None]:
        if all(place.sequence.guide is None for place in places):
            return []
        mx.async_eval(logits)  # the device works while tokens are read and masks are made
        if any(grammar_needs_tokens(place.sequence) for place in places):
            catch_up()
        by_row = [list(own) for _, own in groupby(places, key=lambda place: place.sequence)]
        return [mask for own in by_row for mask in grammar_masks(own[0].sequence, own[-1].guessed)]


def _is_next_token(place: DraftPosition, following: Many[DraftPosition]) -> bool:
    """Whether what is drawn there is the sequence's next token, whatever else is drawn: nothing was guessed."""
    return not place.guessed and (not following or following[0].sequence is not place.sequence)
