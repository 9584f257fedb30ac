"""A model's vocabulary as the grammar library needs it: bytes of tokens, which are special, which begin with a text."""

from __future__ import annotations

import re
from bisect import bisect_left
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

import numpy as np

from ingot.text.grammar.matcher import TokenMask
from ingot.text.tokenizer.tokenizer import Tokenizer
from ingot.text.tool_formats.registry import FORMATS

if TYPE_CHECKING:
    from llguidance import LLTokenizer

SPACE_BYTES = b" \t\r\n"

FORMAT_MARKERS = frozenset(
    marker
    for table in FORMATS
    for literal in table.markers
    for marker in re.findall(r"\]<\]\w+\[>\[|<[^<>\s=]+>|\[/?[A-Z_]+\]", literal)
)
"""What families may have tokens for, special or not."""

_ANCHOR = "\x02"  # before which some tokenizers put the space that they add to every text


class GrammarVocabulary:
    """Unchanging, for any thread. `vocab` is the number of the model's rows, which may be more than there are tokens.

    Making it takes a while for large vocabularies, and other threads wait meanwhile.
    """

    def __init__(self, tokenizer: Tokenizer, vocab: int) -> None:
        self._tokenizer = tokenizer
        self.vocab = vocab
        count = min(vocab, tokenizer.vocab_size)
        self.tokens = [tokenizer.token_bytes(id) for id in range(count)] + [b""] * (vocab - count)
        self.stops = frozenset(id for id in tokenizer.eos_ids if id < vocab)
        self._markers = {id for text in FORMAT_MARKERS if (id := self._alone(text)) is not None}
        # A token that ends answers must never count as text, nor one that sets calls or thinking apart from it,
        # whatever the tokenizer's files call it: a grammar would have the model spell it out.
        self.special = frozenset(id for id in tokenizer.special_ids if id < vocab) | self.stops | self._markers
        # Called for few texts, the thinking tags and their ends, but at each token.
        self.beginning, self.leading_to, self.holding = map(
            lru_cache, (self._beginning, self._leading_to, self._holding)
        )
        self.leading_up_to = lru_cache(self._leading_up_to)
        named = sorted(id for id in self._markers | tokenizer.special_ids if id < vocab and self.tokens[id])
        self.special_ids = {self.tokens[id].decode(errors="replace"): id for id in named}

    def _alone(self, text: str) -> int | None:
        """The one token that writes this text, if there is one."""
        ids = self._tokenizer.encode(text, add_special=False)
        return ids[0] if len(ids) == 1 and self._text(ids) == text.encode() else None

    @cached_property
    def library(self) -> LLTokenizer:
        from llguidance import LLTokenizer

        return LLTokenizer(_LlguidanceTokens(self), eos_token=sorted(self.stops) or [self.vocab])  # type: ignore[arg-type]

    def encode(self, text: str) -> list[int]:
        """The tokens that write `text`, special ones included, in the middle of an answer."""
        for before in ("", _ANCHOR):
            ids = self._behind(before, self._tokenizer.encode(before + text, add_special=False))
            if self._text(ids) == text.encode():
                return ids
        return self.library.greedy_tokenize(text)

    def encode_plain(self, text: str) -> list[int]:
        """The same, where the name of a special token is text like any other."""
        ids = self.encode(text)
        return self.library.greedy_tokenize(text) if self.special.intersection(ids) else ids

    def _behind(self, before: str, ids: list[int]) -> list[int]:
        wanted = before.encode()
        passed = b""
        for index, id in enumerate(ids):
            if passed.lstrip() == wanted:
                return ids[index:]
            passed += self._text([id])
        return []

    def _text(self, ids: list[int]) -> bytes:
        return b"".join(self.tokens[id] for id in ids if id < self.vocab)

    def everything(self) -> TokenMask:
        """A mask of all tokens."""
        return np.full(self.vocab // 32 + 1, 0xFFFFFFFF, dtype=np.uint32)

    @cached_property
    def unended(self) -> TokenMask:
        """All but those that end answers."""
        mask = self.everything()
        for id in self.stops:
            forbid_token(mask, id)
        return mask

    def nothing(self) -> TokenMask:
        return np.zeros(self.vocab // 32 + 1, dtype=np.uint32)

    @cached_property
    def spaces(self) -> TokenMask:
        """Tokens of nothing but white space."""
        mask = self.nothing()
        for id in range(self.vocab):
            if self.tokens[id] and not self.tokens[id].strip(SPACE_BYTES):
                allow_token(mask, id)
        return mask

    def expect(self, *texts: bytes) -> None:
        """Compute now what matchers need of these texts: they run on the engine's time."""
        for text in texts:
            self.leading_to(text)
            self.holding(text)
        assert len(self.spaces) == len(self.unended)

    @cached_property
    def _sorted(self) -> list[tuple[bytes, int]]:
        return sorted((token, id) for id, token in enumerate(self.tokens) if token)

    def _beginning(self, text: bytes) -> tuple[int, ...]:
        """Tokens whose bytes begin with `text`."""
        found = []
        for index in range(bisect_left(self._sorted, (text, -1)), len(self._sorted)):
            token, id = self._sorted[index]
            if not token.startswith(text):
                break
            found.append(id)
        return tuple(found)

    def _leading_to(self, text: bytes) -> tuple[int, ...]:
        """Tokens that write a part of `text`, from its beginning, or all of it and white space behind."""
        special = max((name for name in self.special_ids if text.startswith(name.encode())), key=len, default=None)
        if special is not None:
            return (self.special_ids[special],)
        parts = [id for size in range(1, len(text)) for id in self._exactly(text[:size])]
        wholes = [id for id in self.beginning(text) if not self.tokens[id][len(text) :].strip(SPACE_BYTES)]
        return tuple(parts + wholes)

    def _holding(self, text: bytes) -> tuple[int, ...]:
        """Tokens that hold all of `text` behind their first byte."""
        return tuple(id for id, token in enumerate(self.tokens) if token.find(text, 1) >= 0)

    def overshooting(self, text: bytes, size: int) -> list[int]:
        """Tokens that write all of `text` behind its first `size` bytes, and go on."""
        remaining = text[size:]
        return [id for id in self.beginning(remaining) if len(self.tokens[id]) > len(remaining)]

    def _leading_up_to(self, text: bytes) -> frozenset[int]:
        """How many bytes of `text` are written where one more token may end it, or lead to where one may overshoot."""
        near = {size for size in range(1, len(text)) if self.overshooting(text, size)}
        found = {
            size
            for size in range(len(text))
            if self.beginning(text[size:]) or any(self._exactly(text[size:to]) for to in near if to > size)
        }
        ends = tuple(text[:to] for to in (*near, len(text)))
        within = any(token.endswith(ends) or text in token for token in self.tokens)
        return frozenset(found | ({0} if within else set()))

    def _exactly(self, text: bytes) -> list[int]:
        return [id for id in self._beginning(text) if len(self.tokens[id]) == len(text)]


class _LlguidanceTokens:
    """A tokenizer in the shape that the library asks for."""

    is_tokenizer_wrapper = True

    def __init__(self, vocabulary: GrammarVocabulary) -> None:
        # A model that has no token to end answers with gets one after its vocabulary, which is never sampled.
        ending = [] if vocabulary.stops else [b"<|nothing follows|>"]
        self.tokens = [*vocabulary.tokens, *ending]
        self.eos_token_id = min(vocabulary.stops, default=vocabulary.vocab)
        self.special_token_ids = sorted(vocabulary.special | {self.eos_token_id})
        self.bos_token_id: int | None = None
        self._vocabulary = vocabulary

    def __call__(self, text: str) -> list[int]:
        return self._vocabulary.encode_plain(text)


def allow_token(mask: TokenMask, id: int) -> None:
    mask[id >> 5] |= np.uint32(1 << (id & 31))


def forbid_token(mask: TokenMask, id: int) -> None:
    mask[id >> 5] &= np.uint32(0xFFFFFFFF ^ (1 << (id & 31)))
