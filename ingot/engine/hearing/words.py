"""When each word is spoken: the way through a window along which its tokens look at the sound they stand for."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np

from ingot.engine.hearing.writing import Scores
from ingot.engine.speech_request import HeardWord, Segment
from ingot.engine.whisper_decoding import Writing
from ingot.media.mel import FRAMES_A_SECOND
from ingot.text.tokenizer.whisper import SECONDS_A_STEP, WhisperVocabulary

Numbers: TypeAlias = "np.ndarray[tuple[int, ...], np.dtype[np.float64]]"
Places: TypeAlias = "np.ndarray[tuple[int, ...], np.dtype[np.int64]]"

SMOOTHED = 7
"""Neighbours in time of which the median counts."""
PREPENDED = "\"'“¿([{-"
APPENDED = "\"'.。,，!！?？:：”)]}、"


def with_words(
    segments: Sequence[Segment],
    writing: Writing,
    opening: Sequence[int],
    vocabulary: WhisperVocabulary,
    language: str,
    frames: int,
) -> Generator[None, None, tuple[Segment, ...]]:
    """The segments of one window of so many frames, with their words."""
    text = [token for segment in segments for token in segment.tokens if token < vocabulary.end]
    attention = yield from writing.attention([*opening, vocabulary.untimed, *text, vocabulary.end])
    looks = yield from _looks(attention[:, :, : max(1, frames // 2)])
    begins: Numbers = token_times(looks[len(opening) : -1]) * np.float64(SECONDS_A_STEP)
    found, at = [], 0
    for segment in segments:
        told = [token for token in segment.tokens if token < vocabulary.end]
        times: Numbers = begins[at : at + len(told) + 1] + segment.seek / FRAMES_A_SECOND
        words = joined(vocabulary.words(told, language))
        found.append(replace(segment, words=tuple(spoken(word, segment, times) for word in words)))
        at += len(told)
    return tuple(found)


@dataclass(frozen=True, slots=True)
class WrittenWord:
    """A word with its signs; the tokens from `begin` to `end` of its segment are what is spoken of it."""

    text: str
    begin: int
    end: int


def spoken(word: WrittenWord, segment: Segment, times: Numbers) -> HeardWord:
    """`times` are those at which the segment's tokens begin, and the last one ends."""
    start, end = (min(max(float(times[at]), segment.start), segment.end) for at in (word.begin, word.end))
    logs = [heard.logprob for heard in segment.heard[word.begin : word.end]]
    return HeardWord(word.text, round(start, 2), round(end, 2), float(np.exp(logs).mean()))


def _looks(scores: Scores) -> Generator[None, None, Numbers]:
    """What all heads say together, [tokens, positions]: how much more a token looks at a place than others do."""
    total: Numbers | None = None
    for head in scores:
        shares = np.exp(head - head.max(axis=-1, keepdims=True))
        shares /= shares.sum(axis=-1, keepdims=True)
        apart = (shares - shares.mean(axis=0)) / np.maximum(shares.std(axis=0), 1e-9)
        smooth = smoothed(apart)
        total = smooth if total is None else total + smooth
        yield
    assert total is not None, "no head follows the sound"
    return total / len(scores)


def smoothed(rows: Numbers) -> Numbers:
    """Medians of neighbours, mirrored at both ends."""
    reach = SMOOTHED // 2
    if rows.shape[-1] <= reach:
        return rows
    padded = np.pad(rows, ((0, 0), (reach, reach)), mode="reflect")
    neighbours = np.lib.stride_tricks.sliding_window_view(padded, SMOOTHED, axis=-1)
    middle: Numbers = np.partition(neighbours, reach, axis=-1)[..., reach]
    return middle


def token_times(looks: Numbers) -> Places:
    """The place at which each token begins, on the best way from the first to the last that never goes back."""
    cost = -looks
    came, (tokens, places) = _ways(cost), cost.shape
    begins = np.zeros(tokens, np.int64)
    token, place = tokens - 1, places - 1
    while token >= 0 and place >= 0:
        begins[token] = place
        step = came[token, place]
        token, place = token - (step != 2), place - (step != 1)
    return begins


def _ways(cost: Numbers) -> Places:
    """How the best way comes to each cell: 0 from both before, 1 from the token before, 2 from the place before.

    Cells of one diagonal depend on the two before it alone, and are found at once.
    """
    tokens, places = cost.shape
    total = np.full((tokens + 1, places + 1), np.inf)
    total[0, 0] = 0.0
    came = np.zeros((tokens, places), np.int64)
    for diagonal in range(tokens + places - 1):
        i = np.arange(max(0, diagonal - places + 1), min(tokens, diagonal + 1))
        j = diagonal - i
        choices = np.stack([total[i, j], total[i, j + 1], total[i + 1, j]])
        best = choices.argmin(axis=0)
        came[i, j] = best
        total[i + 1, j + 1] = cost[i, j] + np.take_along_axis(choices, best[None], axis=0)[0]
    return came


def joined(words: Sequence[tuple[str, list[int]]]) -> list[WrittenWord]:
    """Words, with the signs that belong to them; signs are not spoken."""
    found: list[WrittenWord] = []
    before = ""  # signs that belong to what follows
    at = 0
    for text, tokens in words:
        begin, at = at, at + len(tokens)
        if text.startswith(" ") and text.strip() in PREPENDED and at < sum(len(each) for _, each in words):
            before += text
        elif found and not before and text in APPENDED:
            found[-1] = replace(found[-1], text=found[-1].text + text)
        else:
            found.append(WrittenWord(before + text, begin, at))
            before = ""
    return found
