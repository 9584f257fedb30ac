"""One window of audio as text: decoding with temperature fallback, rules for timestamps, and when each word is
spoken.

The likeliest text comes first, and higher temperatures where that makes no sense. A transcript is text between
timestamps: it begins with one, and each segment ends with one and the next begins with one. Word times are the path
through a window along which its tokens attend to the audio they stand for (dynamic time warping).

Pure Python over the `SpeechToTextModel` protocol. What takes long is a generator, which yields after each bounded
part of the work.
"""

from __future__ import annotations

import zlib
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeAlias

import numpy as np

from ingot.engine.speech_request import Segment, TranscribedWord
from ingot.media.audio import FRAMES_A_SECOND, FloatArray
from ingot.text.tokenizer.whisper import SECONDS_PER_TIMESTAMP, WhisperVocabulary

TEMPERATURES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
COMPRESSION_RATIO_LIMIT = 2.4
"""Text that packs into fewer bytes than one in so many goes round in circles."""
AVG_LOGPROB_LIMIT = -1.0
"""The mean logarithm of its tokens' probabilities, below which a text is doubtful."""
NO_SPEECH_LIMIT = 0.6
"""Above this chance of silence, a doubtful text counts as none."""
PROMPT_PART_TOKENS = 32
"""Tokens of a prompt that are read at once."""


class WindowDecoderState(Protocol):
    """A transcript of one window, as far as it is written."""

    length: int  # tokens so far; setting it to fewer forgets the others

    def push(self, tokens: Sequence[int], asked: Sequence[int]) -> VocabularyScores:
        """Append tokens. The logits behind those at the indices `asked` among them, [asked, vocabulary]."""
        ...

    def attention(self, tokens: Sequence[int]) -> Generator[None, None, VocabularyScores]:
        """Attention logits of these tokens to each fiftieth of a second, in every head that follows the audio in time:
        [heads, tokens, positions]. Forgets what was written."""
        ...


class SpeechToTextModel(Protocol):
    """A speech-to-text model, as the loop sees it."""

    context: int

    def encode(self, frames: FloatArray) -> Generator[None, None, Any]:
        """Encode a window; the end's value is what `write` takes."""
        ...

    def write(self, heard: Any) -> WindowDecoderState: ...

    def rest(self) -> None:
        """Give back scratch memory."""
        ...


@dataclass(frozen=True, slots=True)
class DecodedWindow:
    """The transcript of a window, timestamps among it."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]  # of the tokens
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float
    temperature: float

    @property
    def doubtful(self) -> bool:
        """Whether it is worth another try."""
        return not self.silent and (
            self.compression_ratio > COMPRESSION_RATIO_LIMIT or self.avg_logprob < AVG_LOGPROB_LIMIT
        )

    @property
    def silent(self) -> bool:
        """Whether nothing is spoken."""
        return self.no_speech_prob > NO_SPEECH_LIMIT and self.avg_logprob < AVG_LOGPROB_LIMIT


class WindowDecoder:
    """Transcribes windows with one model and its vocabulary."""

    def __init__(self, model: SpeechToTextModel, vocabulary: WhisperVocabulary) -> None:
        self._model, self._vocabulary, self._rules = model, vocabulary, TimestampRules(vocabulary)
        self._most = model.context // 2
        """Tokens of the prompt at most, and of the transcript of a window."""

    def language(self, writing: WindowDecoderState) -> str:
        """The language that is spoken."""
        languages = self._vocabulary.languages
        scores = writing.push([self._vocabulary.start], [0])[0]
        writing.length = 0
        return max(languages, key=lambda code: float(scores[languages[code]]))

    def write(
        self, writing: WindowDecoderState, before: Sequence[int], opening: Sequence[int], temperature: float
    ) -> Generator[None, None, DecodedWindow]:
        """The transcript of the window, given the tokens `before` it."""
        prompt = [self._vocabulary.before, *before[-(self._most - 1) :]] if before else []
        for begin in range(0, len(prompt), PROMPT_PART_TOKENS):
            writing.push(prompt[begin : begin + PROMPT_PART_TOKENS], [])
            yield
        scores = writing.push(opening, [0, len(opening) - 1])
        silence = float(np.exp(log_softmax(scores[0])[self._vocabulary.silent]))
        prompt_length = writing.length
        # Sampled alike whenever the same audio comes.
        rng = np.random.default_rng(0)
        for attempt_temperature in TEMPERATURES if temperature == 0 else (temperature,):
            writing.length = prompt_length
            decoded = yield from self._once(writing, scores[1], attempt_temperature, rng, silence)
            if not decoded.doubtful:
                break
        return decoded

    def _once(
        self,
        writing: WindowDecoderState,
        scores: VocabularyScores,
        temperature: float,
        rng: np.random.Generator,
        silence: float,
    ) -> Generator[None, None, DecodedWindow]:
        tokens: list[int] = []
        logprobs: list[float] = []
        while len(tokens) < self._most:
            allowed = self._rules.apply(scores, tokens)
            token = choose_token(allowed, temperature, rng)
            logprobs.append(float(log_softmax(allowed)[token]))
            if token == self._vocabulary.end:
                break
            tokens.append(token)
            if writing.length >= self._model.context:
                break
            scores = writing.push([token], [0])[0]
            yield
        text = self._vocabulary.decode(tokens).strip()
        return DecodedWindow(
            tuple(tokens),
            tuple(logprobs[: len(tokens)]),
            sum(logprobs) / (len(tokens) + 1),
            text_compression_ratio(text),
            silence,
            temperature,
        )


def text_compression_ratio(text: str) -> float:
    written = text.encode()
    return len(written) / len(zlib.compress(written))


VocabularyScores: TypeAlias = "np.ndarray[tuple[int, ...], np.dtype[np.float32]]"

LATEST_FIRST_TIME = 50
"""In steps of time: the first segment of a window begins within its first second."""
RULED_OUT = np.float32(-np.inf)


class TimestampRules:
    """What may follow what was written, for one vocabulary."""

    def __init__(self, vocabulary: WhisperVocabulary) -> None:
        self._end, self._first_time = vocabulary.end, vocabulary.first_time
        self._unwanted = np.array(vocabulary.suppressed_tokens())
        self._blank = np.array([*vocabulary.encode(" "), vocabulary.end])

    def apply(self, scores: VocabularyScores, written: Sequence[int]) -> VocabularyScores:
        """The scores, with what may not come next ruled out."""
        scores = scores.copy()
        scores[self._unwanted] = RULED_OUT
        if not written:
            scores[self._blank] = RULED_OUT
        self._rule_times(scores, written)
        logprobs = log_softmax(scores)
        times, text = logprobs[self._first_time :], logprobs[: self._first_time]
        # Where a time of whichever kind is likelier than any one token of text, it is time for one.
        if log_sum_exp(times) > text.max():
            scores[: self._first_time] = RULED_OUT
        return scores

    def _rule_times(self, scores: VocabularyScores, written: Sequence[int]) -> None:
        first = self._first_time
        if not written:
            scores[:first] = RULED_OUT
            scores[first + LATEST_FIRST_TIME + 1 :] = RULED_OUT
            return
        after_time = written[-1] >= first
        after_pair = after_time and (len(written) < 2 or written[-2] >= first)
        if after_pair:
            scores[first:] = RULED_OUT
        elif after_time:
            scores[: self._end] = RULED_OUT
        times = [token for token in written if token >= first]
        if times:
            # A segment has some length, so that only one that ends may say the last time again.
            scores[first : times[-1] + (0 if after_time and not after_pair else 1)] = RULED_OUT


def log_softmax(scores: VocabularyScores) -> VocabularyScores:
    """Logarithms of the shares that the exponentials of `scores` have of one."""
    shares: VocabularyScores = scores - log_sum_exp(scores)
    return shares


def log_sum_exp(scores: VocabularyScores) -> np.float32:
    """The logarithm of the sum of their exponentials."""
    most = scores.max()
    if most == RULED_OUT:
        return RULED_OUT
    return np.float32(most + np.log(np.exp(scores - most).sum()))


def choose_token(scores: VocabularyScores, temperature: float, rng: np.random.Generator) -> int:
    """The likeliest token, or one sampled at `temperature`."""
    if temperature == 0:
        return int(scores.argmax())
    noise = rng.gumbel(size=scores.shape)
    return int((scores / temperature + noise).argmax())


AlignmentScores: TypeAlias = "np.ndarray[tuple[int, ...], np.dtype[np.float64]]"
AlignmentPositions: TypeAlias = "np.ndarray[tuple[int, ...], np.dtype[np.int64]]"

MEDIAN_WIDTH = 7
"""Neighbours in time of which the median counts."""
PREPENDED = "\"'“¿([{-"
APPENDED = "\"'.。,，!！?？:：”)]}、"


def add_word_times(
    segments: Sequence[Segment],
    writing: WindowDecoderState,
    opening: Sequence[int],
    vocabulary: WhisperVocabulary,
    language: str,
    frames: int,
) -> Generator[None, None, tuple[Segment, ...]]:
    """The segments of one window of so many frames, with their words."""
    text = [token for segment in segments for token in segment.tokens if token < vocabulary.end]
    attention = yield from writing.attention([*opening, vocabulary.untimed, *text, vocabulary.end])
    alignment = yield from _head_alignment(attention[:, :, : max(1, frames // 2)])
    begins: AlignmentScores = token_times(alignment[len(opening) : -1]) * np.float64(SECONDS_PER_TIMESTAMP)
    with_words, at = [], 0
    for segment in segments:
        spoken = [token for token in segment.tokens if token < vocabulary.end]
        times: AlignmentScores = begins[at : at + len(spoken) + 1] + segment.seek / FRAMES_A_SECOND
        words = join_punctuation(vocabulary.words(spoken, language))
        with_words.append(replace(segment, words=tuple(word_with_times(word, segment, times) for word in words)))
        at += len(spoken)
    return tuple(with_words)


@dataclass(frozen=True, slots=True)
class AlignedWord:
    """A word with its signs; the tokens from `begin` to `end` of its segment are what is spoken of it."""

    text: str
    begin: int
    end: int


def word_with_times(word: AlignedWord, segment: Segment, times: AlignmentScores) -> TranscribedWord:
    """`times` are those at which the segment's tokens begin, and the last one ends."""
    start, end = (min(max(float(times[at]), segment.start), segment.end) for at in (word.begin, word.end))
    logprobs = [token.logprob for token in segment.text_tokens[word.begin : word.end]]
    return TranscribedWord(word.text, round(start, 2), round(end, 2), float(np.exp(logprobs).mean()))


def _head_alignment(scores: VocabularyScores) -> Generator[None, None, AlignmentScores]:
    """The mean over all heads, [tokens, positions]: how much more a token attends to a position than others do."""
    total: AlignmentScores | None = None
    for head in scores:
        shares = np.exp(head - head.max(axis=-1, keepdims=True))
        shares /= shares.sum(axis=-1, keepdims=True)
        apart = (shares - shares.mean(axis=0)) / np.maximum(shares.std(axis=0), 1e-9)
        smooth = median_filter(apart)
        total = smooth if total is None else total + smooth
        yield
    assert total is not None, "no head follows the audio"
    return total / len(scores)


def median_filter(rows: AlignmentScores) -> AlignmentScores:
    """Medians of neighbours, mirrored at both ends."""
    reach = MEDIAN_WIDTH // 2
    if rows.shape[-1] <= reach:
        return rows
    padded = np.pad(rows, ((0, 0), (reach, reach)), mode="reflect")
    neighbours = np.lib.stride_tricks.sliding_window_view(padded, MEDIAN_WIDTH, axis=-1)
    middle: AlignmentScores = np.partition(neighbours, reach, axis=-1)[..., reach]
    return middle


def token_times(alignment: AlignmentScores) -> AlignmentPositions:
    """The position at which each token begins, on the best path from the first to the last that never goes back."""
    cost = -alignment
    steps, (tokens, positions) = _warping_steps(cost), cost.shape
    begins = np.zeros(tokens, np.int64)
    token, position = tokens - 1, positions - 1
    while token >= 0 and position >= 0:
        begins[token] = position
        step = steps[token, position]
        token, position = token - (step != 2), position - (step != 1)
    return begins


def _warping_steps(cost: AlignmentScores) -> AlignmentPositions:
    """How the best path reaches each cell: 0 from both before, 1 from the token before, 2 from the position before.

    Cells of one diagonal depend on the two before it alone, and are computed at once.
    """
    tokens, positions = cost.shape
    total = np.full((tokens + 1, positions + 1), np.inf)
    total[0, 0] = 0.0
    steps = np.zeros((tokens, positions), np.int64)
    for diagonal in range(tokens + positions - 1):
        i = np.arange(max(0, diagonal - positions + 1), min(tokens, diagonal + 1))
        j = diagonal - i
        choices = np.stack([total[i, j], total[i, j + 1], total[i + 1, j]])
        best = choices.argmin(axis=0)
        steps[i, j] = best
        total[i + 1, j + 1] = cost[i, j] + np.take_along_axis(choices, best[None], axis=0)[0]
    return steps


def join_punctuation(words: Sequence[tuple[str, list[int]]]) -> list[AlignedWord]:
    """Words, with the signs that belong to them; signs are not spoken."""
    joined: list[AlignedWord] = []
    before = ""  # signs that belong to what follows
    at = 0
    for text, tokens in words:
        begin, at = at, at + len(tokens)
        if text.startswith(" ") and text.strip() in PREPENDED and at < sum(len(each) for _, each in words):
            before += text
        elif joined and not before and text in APPENDED:
            joined[-1] = replace(joined[-1], text=joined[-1].text + text)
        else:
            joined.append(AlignedWord(before + text, begin, at))
            before = ""
    return joined
