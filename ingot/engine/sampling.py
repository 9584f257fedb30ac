"""Sampling: from logits to tokens, for all rows at once, each with its own parameters.

In order: penalties and logit bias, the grammar's mask, temperature, top-k, top-p, min-p, then a random choice. Its
random number depends only on the row's seed and on how many tokens the row has: the same seed gives the same text
whatever else is in the batch. Logprobs are the model's own, before any of this.

The token histories of penalties stay on the device, so that the engine never waits for tokens to be read back. A token
is sampled after each draft token as well (`DraftPosition`), which is how drafts are verified. A grammar that fails ends
its own request alone: the error is noted on the sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
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
    """The index-th random number of a seed, in [0, 1). A hash (splitmix64), so that there is no state."""
    x = (seed * 0x9E3779B97F4A7C15 + (index + 1) * 0xD1B54A32D192ED03) & _UINT64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _UINT64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _UINT64
    # 24 bits: what a float32 between 0 and 1 holds exactly.
    return ((x ^ (x >> 31)) >> 40) / (1 << 24)


class SampledRow(Protocol):
    @property
    def sampling(self) -> Sampling: ...

    @property
    def seed(self) -> int: ...

    @property
    def sampled(self) -> int:
        """Tokens sampled so far, also those not yet read back."""

    @property
    def banned(self) -> Sequence[int]:
        """Tokens that may not come next."""


@dataclass(frozen=True)
class SampledTokens:
    """Arrays with an entry per row, not yet evaluated."""

    tokens: mx.array
    logprobs: mx.array | None = None
    top_tokens: mx.array | None = None
    top_logprobs: mx.array | None = None

    def arrays(self) -> list[mx.array]:
        arrays = (self.tokens, self.logprobs, self.top_tokens, self.top_logprobs)
        return [array for array in arrays if array is not None]


def sample_tokens(
    logits: mx.array,
    rows: Sequence[SampledRow],
    histories: Sequence[TokenHistory | None] = (),
    masks: Sequence[TokenMask | None] = (),
    kernel: SampleTokens | None = None,
) -> SampledTokens:
    """Sample one token for each row of `logits` [rows, vocab], by a GPU kernel where there is one.

    `histories` are for penalties and `masks` for grammars; either is empty where no row has one.
    """
    samplings = [row.sampling for row in rows]
    wanted = [sampling.logprobs for sampling in samplings if sampling.logprobs is not None]
    given, logits = logits, logits.astype(mx.float32)
    adjusted = apply_penalties(logits, samplings, histories)
    adjusted = apply_masks(_apply_bias(adjusted, rows), masks)
    # The largest logit is the same in any format, and nobody else reads the converted ones.
    tokens = _choose_tokens(given if adjusted is logits else adjusted, rows, kernel)
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
    indices: list[tuple[int, int]] = []
    amounts: list[float] = []
    for number, row in enumerate(rows):
        bias, banned = row.sampling.logit_bias, row.banned
        if not (bias or banned):
            continue
        additions = {**dict(bias), **dict.fromkeys(banned, -float("inf"))}
        indices += [(number, token) for token in additions]
        amounts += additions.values()
    if not indices:
        return logits
    at = np.array(indices, dtype=np.int32)
    return logits.at[mx.array(at[:, 0]), mx.array(at[:, 1])].add(mx.array(amounts))


def apply_masks(logits: mx.array, masks: Sequence[TokenMask | None]) -> mx.array:
    """Rule out the tokens that a row's mask does not allow."""
    if all(mask is None for mask in masks):
        return logits
    vocab = logits.shape[-1]
    words = -(-vocab // 32)
    packed = np.full((len(masks), words), 0xFFFFFFFF, dtype=np.uint32)
    for number, mask in enumerate(masks):
        if mask is not None:
            packed[number] = mask[:words]
    # Eight tokens at a time: looking a byte up is cheaper than shifting its bits out one by one.
    amounts = mx.array(_MASKED_LOGITS)[mx.array(packed.view(np.uint8))]
    return logits + amounts.reshape(len(masks), -1)[:, :vocab]


def _choose_tokens(logits: mx.array, rows: Sequence[SampledRow], kernel: SampleTokens | None) -> mx.array:
    if native.available() and mx.default_device() == mx.cpu and kernel is None:
        return native.sample_tokens(logits.astype(mx.float32), [_kernel_parameters(row) for row in rows])
    greedy = mx.argmax(logits, axis=-1)
    if all(row.sampling.greedy for row in rows):
        return greedy
    logits = logits.astype(mx.float32)
    if kernel is not None:
        return kernel(logits, [_kernel_parameters(row) for row in rows])
    temperature = _column([max(row.sampling.temperature or 1.0, LOWEST_TEMPERATURE) for row in rows])
    draws = _column([uniform_draw(row.seed, row.sampled) for row in rows])
    # The largest logit becomes 0 first, so that no temperature makes it overflow.
    probabilities = mx.softmax((logits - logits.max(axis=-1, keepdims=True)) / temperature, axis=-1)
    if any(_has_filters(row.sampling) for row in rows):
        probabilities = mx.where(probabilities >= _least_probability(probabilities, rows), probabilities, 0.0)
    sampled = _first_index_above(probabilities, draws)
    return mx.where(mx.array([row.sampling.greedy for row in rows]), greedy, sampled)


def _kernel_parameters(row: SampledRow) -> tuple[float, int, float, float, float]:
    sampling = row.sampling
    temperature = 0.0 if sampling.greedy else sampling.temperature
    return temperature, sampling.top_k or 0, sampling.top_p, sampling.min_p, uniform_draw(row.seed, row.sampled)


def _has_filters(sampling: Sampling) -> bool:
    return not sampling.greedy and (_is_ranked(sampling) or bool(sampling.min_p))


def _least_probability(probabilities: mx.array, rows: Sequence[SampledRow]) -> mx.array:
    """The smallest probability that each row's filters keep.

    A threshold, not a ranking: equally likely tokens are kept or dropped together, so that the outcome depends neither
    on how a sort orders them nor on how many values the other rows need sorted.
    """
    values = _largest_values(probabilities, max(_rank_count(row.sampling, probabilities.shape[-1]) for row in rows))
    rank = mx.arange(values.shape[-1])
    inside = rank < _column([_rank_count(row.sampling, values.shape[-1]) for row in rows])
    share = mx.where(inside, values, 0.0)
    share = share / share.sum(axis=-1, keepdims=True)
    before = mx.cumsum(share, axis=-1) - share
    kept = inside & (before < _column([row.sampling.top_p for row in rows]))
    kept = kept | (rank == 0)  # the likeliest token always stays, whatever rounding does
    least = mx.where(kept, values, mx.inf).min(axis=-1, keepdims=True)
    least = mx.where(mx.array([_is_ranked(row.sampling) for row in rows])[:, None], least, 0.0)
    least = mx.maximum(least, _column([row.sampling.min_p for row in rows]) * values[:, :1])
    return mx.where(mx.array([_has_filters(row.sampling) for row in rows])[:, None], least, 0.0)


def _is_ranked(sampling: Sampling) -> bool:
    return bool(sampling.top_k or sampling.top_p < 1.0)


def _rank_count(sampling: Sampling, vocab: int) -> int:
    """How many of the likeliest tokens a row's top-k and top-p need; min-p needs only the first."""
    if sampling.top_k and not sampling.greedy:
        return min(sampling.top_k, vocab)
    return vocab if sampling.top_p < 1.0 and not sampling.greedy else 1


def _largest_values(values: mx.array, count: int) -> mx.array:
    """The `count` largest values of each row, in descending order."""
    vocab = values.shape[-1]
    if count < vocab // 2:
        values = mx.topk(values, count, axis=-1)
    return -mx.sort(-values, axis=-1)


def _first_index_above(weights: mx.array, draws: mx.array) -> mx.array:
    """The first index at which the running sum exceeds the draw; never an index of weight zero."""
    running = mx.cumsum(weights, axis=-1)
    above = running > draws * running[:, -1:]
    # Where a draw is so close to one that rounding leaves nothing above it, the likeliest is chosen.
    return mx.where(above[:, -1], mx.argmax(above, axis=-1), mx.argmax(weights, axis=-1))


def _column(values: list[float] | list[int]) -> mx.array:
    return mx.array(values, dtype=mx.float32)[:, None]


def needs_history(sampling: Sampling) -> bool:
    return bool(sampling.presence_penalty or sampling.frequency_penalty or sampling.repetition_penalty != 1.0)


class TokenHistory:
    """The tokens of one sequence, for penalties."""

    def __init__(self, vocab: int, prompt: Sequence[int], generated: Sequence[int] = ()) -> None:
        counts = np.bincount(np.asarray(generated, dtype=np.int64), minlength=vocab)
        in_prompt = np.zeros(vocab, dtype=np.bool_)
        in_prompt[np.asarray(prompt, dtype=np.int64)] = True
        self.counts = mx.array(counts.astype(np.float32))  # [vocab]: how often each token was generated
        self.prompt = mx.array(in_prompt)  # [vocab]: whether the prompt has it

    def learn(self, token: mx.array) -> None:
        """Add a token, which may not be read back yet."""
        self.counts = self.counts.at[token].add(mx.array(1.0))

    def ahead(self, tokens: Sequence[int]) -> TokenHistory:
        """What it will be if these tokens come next."""
        made = copy(self)
        for token in tokens:
            made.learn(mx.array(token))
        return made


def apply_penalties(
    logits: mx.array, samplings: Sequence[Sampling], histories: Sequence[TokenHistory | None]
) -> mx.array:
    """Logits [rows, vocab] with each row's penalties. Rows without a history are not changed by a single bit."""
    if all(history is None for history in histories):
        return logits
    vocab = logits.shape[-1]
    nothing, nowhere = mx.zeros(vocab), mx.zeros(vocab, dtype=mx.bool_)
    counts = mx.stack([nothing if history is None else history.counts for history in histories])
    prompts = mx.stack([nowhere if history is None else history.prompt for history in histories])
    generated = counts > 0
    repetition = _column([sampling.repetition_penalty for sampling in samplings])
    repeated = mx.where(logits > 0, logits / repetition, logits * repetition)
    logits = mx.where(generated | prompts, repeated, logits)
    presence = _column([sampling.presence_penalty for sampling in samplings])
    frequency = _column([sampling.frequency_penalty for sampling in samplings])
    return logits - mx.where(generated, presence + frequency * counts, 0.0)


@dataclass(frozen=True, slots=True)
class DraftPosition:
    """Where a token is sampled: after a sequence's tokens and these draft tokens."""

    sequence: TokenSequence
    draft: Sequence[int] = ()

    @property
    def sampling(self) -> Sampling:
        return self.sequence.sampling

    @property
    def seed(self) -> int:
        return self.sequence.seed

    @property
    def sampled(self) -> int:
        return self.sequence.sampled + len(self.draft)

    @property
    def banned(self) -> Sequence[int]:
        return self.sequence.banned_at(self.sampled)


def draft_positions(sequence: TokenSequence, draft: Sequence[int]) -> list[DraftPosition]:
    """Where tokens are sampled to verify a draft: before it, and after each of its tokens."""
    return [DraftPosition(sequence, draft[:count]) for count in range(len(draft) + 1)]


def count_accepted(draft: Sequence[int], sampled: Sequence[int]) -> int:
    """How many draft tokens were sampled as well. The token sampled after them is valid too."""
    return next((at for at, (one, other) in enumerate(zip(draft, sampled, strict=False)) if one != other), len(draft))


def begin_grammar(sequence: TokenSequence) -> None:
    if sequence.request.grammar is None:
        return
    try:
        sequence.matcher = sequence.request.grammar.begin()
    except IngotError as error:
        sequence.failure = error


def grammar_masks(sequence: TokenSequence, draft: tuple[int, ...] = ()) -> list[TokenMask | None]:
    """What its grammar allows next and after each of the draft tokens, which it has accepted. A grammar that is done
    allows anything: the token is not used."""
    matcher = sequence.matcher
    if matcher is None or sequence.mask_error is not None or matcher.done:
        return [None] * (len(draft) + 1)
    try:
        return matcher.masks(draft) if draft else [matcher.mask()]
    except IngotError as error:
        sequence.mask_error = error
        return [None] * (len(draft) + 1)


def grammatical_prefix(sequence: TokenSequence, draft: tuple[int, ...]) -> tuple[int, ...]:
    """The draft tokens that its grammar accepts without being done."""
    if sequence.matcher is None or not draft:
        return draft
    if sequence.mask_error is not None or sequence.matcher.done:
        return ()
    try:
        return draft[: sequence.matcher.count_allowed(draft)]
    except IngotError as error:
        sequence.mask_error = error
        return ()


def accept_token(sequence: TokenSequence, token: int) -> None:
    if sequence.matcher is None or sequence.failure is not None:
        return
    try:
        if sequence.mask_error is not None:
            raise sequence.mask_error
        sequence.matcher.accept(token)
    except IngotError as error:
        sequence.failure = error


def grammar_needs_tokens(sequence: TokenSequence) -> bool:
    """Whether its next mask depends on tokens that were sampled and not yet read."""
    return sequence.matcher is not None and not sequence.known and not sequence.matcher.free


def grammar_is_done(sequence: TokenSequence) -> bool:
    return sequence.matcher is not None and sequence.matcher.done


class Sampler:
    def __init__(self, vocab: int, kernel: SampleTokens | None = None) -> None:
        """Without a `kernel`, tokens are sampled by plain operations."""
        self._vocab, self._kernel = vocab, kernel
        self._histories: dict[TokenSequence, TokenHistory] = {}  # of sequences with penalties

    def sample(
        self, logits: mx.array, positions: Sequence[DraftPosition], read_early: Callable[[], None]
    ) -> SampledTokens:
        """A token for each row of `logits` [positions, vocab]; a sequence's positions are consecutive. `read_early`
        appends the tokens of the step before to their sequences."""
        histories = [self._history(position) for position in positions]
        sampled = sample_tokens(logits, positions, histories, self._masks(logits, positions, read_early), self._kernel)
        for number, (position, history) in enumerate(zip(positions, histories, strict=True)):
            if history is not None and _is_next_token(position, positions[number + 1 :]):
                history.learn(sampled.tokens[number])
        return sampled

    def add_to_history(self, sequence: TokenSequence, tokens: Iterable[int]) -> None:
        """Tokens of a sequence whose draft was verified."""
        history = self._histories.get(sequence)
        if history is not None:
            for token in tokens:
                history.learn(mx.array(token))

    def forget(self, sequence: TokenSequence) -> None:
        self._histories.pop(sequence, None)

    def clear(self) -> None:
        self._histories.clear()

    def _history(self, position: DraftPosition) -> TokenHistory | None:
        row = position.sequence
        if needs_history(row.sampling) and row not in self._histories:
            self._histories[row] = TokenHistory(self._vocab, row.whole_prompt, row.generated)
        history = self._histories.get(row)
        return history if history is None or not position.draft else history.ahead(position.draft)

    def _masks(
        self, logits: mx.array, positions: Sequence[DraftPosition], read_early: Callable[[], None]
    ) -> list[TokenMask | None]:
        if all(position.sequence.matcher is None for position in positions):
            return []
        mx.async_eval(logits)  # the device works while tokens are read and masks are made
        if any(grammar_needs_tokens(position.sequence) for position in positions):
            read_early()
        by_row = [list(own) for _, own in groupby(positions, key=lambda position: position.sequence)]
        return [mask for own in by_row for mask in grammar_masks(own[0].sequence, tuple(own[-1].draft))]


def _is_next_token(position: DraftPosition, following: Sequence[DraftPosition]) -> bool:
    """Whether the token sampled there is the sequence's next: it has no draft to verify."""
    return not position.draft and (not following or following[0].sequence is not position.sequence)
