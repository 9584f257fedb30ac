"""One window of sound, written down: the likeliest text first, and warmer where that makes no sense.

Pure Python over the `Hears` protocol. Everything here is a generator, which yields after each bounded part of the work.
"""

from __future__ import annotations

import zlib
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from ingot.engine.hearing.writing import Scores, WritingRules, choose, log_shares
from ingot.media.mel import Floats
from ingot.text.tokenizer.whisper import WhisperVocabulary

WARMER = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
MOST_REPETITIVE = 2.4
"""Text that packs into fewer bytes than one in so many goes round in circles."""
LEAST_SURE = -1.0
"""The mean logarithm of its tokens' probabilities, below which a text is taken for a guess."""
SILENT = 0.6
"""Above this chance of silence, a text that is a guess is taken for none."""
PROMPT_PART = 32
"""Tokens of a prompt that are read at once."""


class Writing(Protocol):
    """A transcript of one window, as far as it is written."""

    length: int  # tokens so far; setting it to fewer forgets the others

    def push(self, tokens: Sequence[int], asked: Sequence[int]) -> Scores:
        """Write tokens down. What may follow those of the places `asked`, among these, [asked, vocabulary]."""
        ...

    def attention(self, tokens: Sequence[int]) -> Generator[None, None, Scores]:
        """How much each of these tokens looks at each fiftieth of a second, in every head that follows the sound in
        time, before shares are made of it: [heads, tokens, positions]. Forgets what was written."""
        ...


class Hears(Protocol):
    """A model that hears, as the loop sees it."""

    context: int

    def listen(self, frames: Floats) -> Generator[None, None, Any]:
        """Hear a window; the end's value is what `write` takes."""
        ...

    def write(self, heard: Any) -> Writing: ...

    def rest(self) -> None:
        """Give back scratch memory."""
        ...


@dataclass(frozen=True, slots=True)
class Written:
    """What a window says, times among it."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]  # of the tokens
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float
    temperature: float

    @property
    def doubtful(self) -> bool:
        """Whether it is worth another try."""
        return not self.silent and (self.compression_ratio > MOST_REPETITIVE or self.avg_logprob < LEAST_SURE)

    @property
    def silent(self) -> bool:
        """Whether nothing was said."""
        return self.no_speech_prob > SILENT and self.avg_logprob < LEAST_SURE


class WindowWriter:
    """Writes windows down with one model and its vocabulary."""

    def __init__(self, model: Hears, vocabulary: WhisperVocabulary) -> None:
        self._model, self._vocabulary, self._rules = model, vocabulary, WritingRules(vocabulary)
        self._most = model.context // 2
        """Of what came before, and of what a window says, this many tokens each."""

    def language(self, writing: Writing) -> str:
        """What it sounds like."""
        languages = self._vocabulary.languages
        scores = writing.push([self._vocabulary.start], [0])[0]
        writing.length = 0
        return max(languages, key=lambda code: float(scores[languages[code]]))

    def write(
        self, writing: Writing, before: Sequence[int], opening: Sequence[int], temperature: float
    ) -> Generator[None, None, Written]:
        """What the window says, given the tokens `before` it."""
        told = [self._vocabulary.before, *before[-(self._most - 1) :]] if before else []
        for begin in range(0, len(told), PROMPT_PART):
            writing.push(told[begin : begin + PROMPT_PART], [])
            yield
        scores = writing.push(opening, [0, len(opening) - 1])
        silence = float(np.exp(log_shares(scores[0])[self._vocabulary.silent]))
        begun = writing.length
        # Drawn alike whenever the same sound comes.
        draw = np.random.default_rng(0)
        for warmth in WARMER if temperature == 0 else (temperature,):
            writing.length = begun
            found = yield from self._once(writing, scores[1], warmth, draw, silence)
            if not found.doubtful:
                break
        return found

    def _once(
        self, writing: Writing, scores: Scores, temperature: float, draw: np.random.Generator, silence: float
    ) -> Generator[None, None, Written]:
        tokens: list[int] = []
        logs: list[float] = []
        while len(tokens) < self._most:
            allowed = self._rules.apply(scores, tokens)
            token = choose(allowed, temperature, draw)
            logs.append(float(log_shares(allowed)[token]))
            if token == self._vocabulary.end:
                break
            tokens.append(token)
            if writing.length >= self._model.context:
                break
            scores = writing.push([token], [0])[0]
            yield
        text = self._vocabulary.decode(tokens).strip()
        return Written(
            tuple(tokens),
            tuple(logs[: len(tokens)]),
            sum(logs) / (len(tokens) + 1),
            compression_ratio(text),
            silence,
            temperature,
        )


def compression_ratio(text: str) -> float:
    written = text.encode()
    return len(written) / len(zlib.compress(written))
