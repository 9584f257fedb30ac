"""Ends an answer that repeats itself without end.

A loop is an exact repetition: the last tokens of an answer are the same few again and again. Much that is repeated is
meant, such as rows of a table, so a loop has to be long: `LOOP_TOKENS` for sentences that nobody asked to repeat, or
`VERSE_TOKENS` for those of a longer period, and `STRUCTURE_TOKENS` for anything else (tables, code, digits, lines of
one character, what the prompt quotes). In each case the period is in there `LEAST_COUNT` times.

An answer is examined each time another `CHECK_EVERY` tokens of it were read, whatever ran beside it or how its tokens
were computed: the same answer ends at the same token. The work per token is bounded.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from ingot.engine.request import LoopReport
from ingot.engine.sequence import TokenSequence
from ingot.text.tokenizer.tokenizer import Tokenizer

CHECK_EVERY: Final = 64
LOOP_TOKENS: Final = 1024
VERSE_TOKENS: Final = 2048
STRUCTURE_TOKENS: Final = 8192
LEAST_COUNT: Final = 8
LEAST_WORDS: Final = 5
"""Sentences have at least so many different words."""
ANCHOR_TOKENS: Final = 32
SEARCHED_TOKENS: Final = 16_384
"""At the prompt's end for what is repeated, and at the answer's end for the fence that code is in."""

# A letter of a script without spaces is a word.
_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]|[^\W\d_\u3040-\u30ff\u3400-\u9fff]+")
_STRUCTURE = re.compile(r"[|{}=;`<>\\\t]|[^\W_]\(|,[^\W_][^,\n]*,[^\W_]| {3}|-{3}")
_FENCE = re.compile(r"^ *(?:```|~~~)", re.MULTILINE)
_LEAST_LETTERS = 0.75  # of a sentence's characters, spaces among them


class LoopGuard:
    """Of one sequence. Knows nothing but its tokens."""

    def __init__(self, sequence: TokenSequence, tokenizer: Tokenizer) -> None:
        self._sequence, self._tokenizer = sequence, tokenizer
        self._prompt_words: str | None = None

    @classmethod
    def of(cls, sequence: TokenSequence, tokenizer: Tokenizer) -> LoopGuard | None:
        """None where an answer may repeat itself: the request says so, or wants a number of tokens, whichever."""
        stop = sequence.request.stop
        return cls(sequence, tokenizer) if stop.loop_guard and not stop.ignore_eos else None

    def look(self) -> LoopReport | None:
        """The loop in which the answer is, once its newest token was read."""
        sequence = self._sequence
        produced, matcher = sequence.produced, sequence.matcher
        if produced % CHECK_EVERY or produced < max(LOOP_TOKENS, sequence.request.stop.min_tokens):
            return None
        if matcher is not None and not matcher.free:  # a grammar says what comes next
            return None
        if not _recurs(sequence.tokens[-(STRUCTURE_TOKENS // LEAST_COUNT + ANCHOR_TOKENS) :]):
            return None
        for span in (LOOP_TOKENS, VERSE_TOKENS, STRUCTURE_TOKENS):
            period = shortest_period(sequence.tokens[-span:], span // LEAST_COUNT) if produced >= span else None
            if period is not None and (span == STRUCTURE_TOKENS or self._is_runaway_prose(period)):
                return LoopReport(sequence.index, period, _repetitions(sequence.generated, period))
        return None

    def _is_runaway_prose(self, period: int) -> bool:
        """Whether sentences are repeated that nobody asked to repeat."""
        tokens = self._sequence.tokens
        text = self._decode(tokens[-3 * period :])
        size = len(text) - len(self._decode(tokens[-2 * period :]))
        if not reads_as_prose(text[-2 * size :]):
            return False
        answer = self._decode(tokens[-min(self._sequence.produced, SEARCHED_TOKENS) :])
        if len(_FENCE.findall(answer)) % 2:
            return False
        if self._prompt_words is None:
            self._prompt_words = _normalised(self._decode(self._sequence.prompt[-SEARCHED_TOKENS:]))
        begins = (match.start() for match in _WORD.finditer(text, 0, size + 1))
        return not any(_normalised(text[begin : begin + size]) in self._prompt_words for begin in begins)

    def _decode(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special=False)


def shortest_period(tokens: Sequence[int], most: int) -> int | None:
    """The least period of all these tokens, if it is at most `most`."""
    text = _as_text(tokens)
    anchor = text[-ANCHOR_TOKENS:]
    at = text.rfind(anchor, 0, -1)
    while at >= 0 and (period := len(text) - ANCHOR_TOKENS - at) <= most:
        if text[period:] == text[:-period]:
            return period
        at = text.rfind(anchor, 0, at + ANCHOR_TOKENS - 1)
    return None


def reads_as_prose(text: str) -> bool:
    """Whether a text is made of sentences: not a table, code, numbers or a few words again and again."""
    words = _WORD.findall(text)
    if len({word.lower() for word in words}) < LEAST_WORDS or _STRUCTURE.search(text):
        return False
    return sum(character.isalpha() or character.isspace() for character in text) >= _LEAST_LETTERS * len(text)


def _recurs(tokens: Sequence[int]) -> bool:
    text = _as_text(tokens)
    return text.rfind(text[-ANCHOR_TOKENS:], 0, -1) >= 0


def _repetitions(tokens: Sequence[int], period: int) -> int:
    """How often the last `period` tokens are there in a row."""
    repeated = next(
        (count for count in range(len(tokens) - period) if tokens[-1 - count] != tokens[-1 - count - period]),
        len(tokens) - period,
    )
    return 1 + repeated // period


def _as_text(tokens: Sequence[int]) -> str:
    """A character for each token: strings are searched and compared fast."""
    return "".join(map(chr, tokens))


def _normalised(text: str) -> str:
    return " ".join(word.lower() for word in _WORD.findall(text))
