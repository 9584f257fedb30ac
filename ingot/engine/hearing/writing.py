"""Which token of a transcript comes next. Pure arithmetic over scores: no mlx.

A transcript is text between times: it begins with one, and each segment ends with one and the next begins with one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from ingot.text.tokenizer.whisper import WhisperVocabulary

Scores: TypeAlias = "np.ndarray[tuple[int, ...], np.dtype[np.float32]]"

LATEST_BEGINNING = 50
"""In steps of time: the first segment of a window begins within its first second."""
NEVER = np.float32(-np.inf)


class WritingRules:
    """What may follow what was written, for one vocabulary."""

    def __init__(self, vocabulary: WhisperVocabulary) -> None:
        self._end, self._first_time = vocabulary.end, vocabulary.first_time
        self._unwanted = np.array(vocabulary.unwanted())
        self._blank = np.array([*vocabulary.encode(" "), vocabulary.end])

    def apply(self, scores: Scores, written: Sequence[int]) -> Scores:
        """The scores, with what may not come next ruled out."""
        scores = scores.copy()
        scores[self._unwanted] = NEVER
        if not written:
            scores[self._blank] = NEVER
        self._rule_times(scores, written)
        logs = log_shares(scores)
        times, text = logs[self._first_time :], logs[: self._first_time]
        # Where a time of whichever kind is likelier than any one token of text, it is time for one.
        if log_sum(times) > text.max():
            scores[: self._first_time] = NEVER
        return scores

    def _rule_times(self, scores: Scores, written: Sequence[int]) -> None:
        first = self._first_time
        if not written:
            scores[:first] = NEVER
            scores[first + LATEST_BEGINNING + 1 :] = NEVER
            return
        after_time = written[-1] >= first
        after_pair = after_time and (len(written) < 2 or written[-2] >= first)
        if after_pair:
            scores[first:] = NEVER
        elif after_time:
            scores[: self._end] = NEVER
        times = [token for token in written if token >= first]
        if times:
            # A segment has some length, so that only one that ends may say the last time again.
            scores[first : times[-1] + (0 if after_time and not after_pair else 1)] = NEVER


def log_shares(scores: Scores) -> Scores:
    """Logarithms of the shares that the exponentials of `scores` have of one."""
    shares: Scores = scores - log_sum(scores)
    return shares


def log_sum(scores: Scores) -> np.float32:
    """The logarithm of the sum of their exponentials."""
    most = scores.max()
    if most == NEVER:
        return NEVER
    return np.float32(most + np.log(np.exp(scores - most).sum()))


def choose(scores: Scores, temperature: float, draw: np.random.Generator) -> int:
    """The likeliest token, or one drawn at `temperature`."""
    if temperature == 0:
        return int(scores.argmax())
    noise = draw.gumbel(size=scores.shape)
    return int((scores / temperature + noise).argmax())
