"""A prompt in another tokenizer's tokens, and which of them stand for which of its own."""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ingot.text.tokenizer.tokenizer import Tokenizer

Numbers = np.ndarray[Any, np.dtype[np.float32]]


@dataclass(frozen=True, slots=True)
class Translation:
    """`tokens` are another tokenizer's; `ends` says of each own token how many of them end where it does or before."""

    tokens: tuple[int, ...]
    ends: tuple[int, ...]

    @classmethod
    def of(cls, prompt: Sequence[int], ours: Tokenizer, theirs: Tokenizer) -> Translation:
        """Special tokens are told by their names."""
        text, ends = _text(prompt, ours)
        tokens, counts = theirs.encode_with_places(text, ends, add_special=True)
        return cls(tuple(tokens), tuple(counts))

    def back(self, numbers: Numbers) -> Numbers:
        """For each own token the mean of the numbers of those that end in it, or that of the one that it is part of."""
        begins = np.minimum([0, *self.ends[:-1]], len(numbers) - 1)
        ends = np.maximum(self.ends, begins + 1)
        sums = np.concatenate([[0.0], np.cumsum(numbers, dtype=np.float64)])
        return ((sums[ends] - sums[begins]) / (ends - begins)).astype(np.float32)

    def places(self, lengths: Iterable[int]) -> frozenset[int]:
        """How many of their tokens are there when so many of ours are."""
        return frozenset(self.ends[length - 1] for length in lengths if 0 < length <= len(self.ends))


Translate = Callable[[tuple[int, ...]], Translation]


def _text(prompt: Sequence[int], tokenizer: Tokenizer) -> tuple[str, list[int]]:
    """The text of a prompt, and how many characters of it are whole when each token is told: one may take several."""
    decoder, pieces, ends, length = getincrementaldecoder("utf-8")("replace"), [], [], 0
    for token in prompt:
        piece = decoder.decode(tokenizer.token_bytes(token))
        pieces.append(piece)
        length += len(piece)
        ends.append(length)
    return "".join(pieces) + decoder.decode(b"", final=True), ends
