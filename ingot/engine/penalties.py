"""What penalties look at: how often each token was drawn, and which ones the prompt holds.

It is kept on the device and learns each draw there, so that no row with penalties makes the engine wait for tokens to
be read back, and a step costs the same however long the context is.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

import mlx.core as mx
import numpy as np

from ingot.engine.request import Sampling


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


def penalised(logits: mx.array, samplings: Sequence[Sampling], histories: Sequence[TokenHistory | None]) -> mx.array:
    """Logits [rows, vocab] with each row's penalties. Rows without a history stay as they are, to the last bit."""
    if all(history is None for history in histories):
        return logits
    vocab = logits.shape[-1]
    nothing, nowhere = mx.zeros(vocab), mx.zeros(vocab, dtype=mx.bool_)
    counts = mx.stack([nothing if history is None else history.counts for history in histories])
    prompts = mx.stack([nowhere if history is None else history.prompt for history in histories])
    drawn = counts > 0
    repetition = _column([sampling.repetition_penalty for sampling in samplings])
    repeated = mx.where(logits > 0, logits / repetition, logits * repetition)
    logits = mx.where(drawn | prompts, repeated, logits)
    presence = _column([sampling.presence_penalty for sampling in samplings])
    frequency = _column([sampling.frequency_penalty for sampling in samplings])
    return logits - mx.where(drawn, presence + frequency * counts, 0.0)


def _column(values: list[float]) -> mx.array:
    return mx.array(values, dtype=mx.float32)[:, None]
