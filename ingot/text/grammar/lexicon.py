"""A model's tokens as the grammar engine needs them: their bytes, which are special, and which begin with a text."""

from __future__ import annotations

from bisect import bisect_left
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

import numpy as np

from ingot.text.guide import Mask
from ingot.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLTokenizer

SPACE = b" \t\r\n"
_ANCHOR = "\x02"  # before which some tokenizers put the space that they add to every text


class Lexicon:
    """Unchanging, for any thread. `vocab` is the number of the model's rows, which may be more than there are tokens.

    Making it takes a while for large vocabularies, and other threads wait meanwhile.
    """

    def __init__(self, tokenizer: Tokenizer, vocab: int) -> None:
        self._tokenizer = tokenizer
        self.vocab = vocab
        known = min(vocab, tokenizer.vocab_size)
        self.tokens = [tokenizer.token_bytes(id) for id in range(known)] + [b""] * (vocab - known)
        self.stops = frozenset(id for id in tokenizer.eos_ids if id < vocab)
        # A token that ends answers must never count as text, whatever the tokenizer's files call it.
        self.special = frozenset(id for id in tokenizer.special_ids if id < vocab) | self.stops
        self.special_ids = {self.tokens[id].decode(): id for id in sorted(self.special) if self.tokens[id]}

    @cached_property
    def library(self) -> LLTokenizer:
        from llguidance import LLTokenizer

        return LLTokenizer(_Tokens(self), eos_token=sorted(self.stops) or [self.vocab])  # type: ignore[arg-type]

    def encode(self, text: str) -> list[int]:
        """The tokens that write `text`, special ones included, at a place within an answer."""
        for before in ("", _ANCHOR):
            ids = self._behind(before, self._tokenizer.encode(before + text, add_special=False))
            if b"".join(self.tokens[id] for id in ids) == text.encode():
                return ids
        return self.library.greedy_tokenize(text)

    def encode_plain(self, text: str) -> list[int]:
        """The same, where the name of a special token is text like any other."""
        ids = self.encode(text)
        return self.library.greedy_tokenize(text) if self.special.intersection(ids) else ids

    def _behind(self, before: str, ids: list[int]) -> list[int]:
        wanted = before.encode()
        passed = b""
        for place, id in enumerate(ids):
            if passed.lstrip() == wanted:
                return ids[place:]
            passed += self.tokens[id]
        return []

    def everything(self) -> Mask:
        """A mask of all tokens."""
        return np.full(self.vocab // 32 + 1, 0xFFFFFFFF, dtype=np.uint32)

    @cached_property
    def unended(self) -> Mask:
        """All but those that end answers."""
        mask = self.everything()
        for id in self.stops:
            forbid(mask, id)
        return mask

    def nothing(self) -> Mask:
        return np.zeros(self.vocab // 32 + 1, dtype=np.uint32)

    @cached_property
    def spaces(self) -> Mask:
        """Tokens of nothing but white space."""
        mask = self.nothing()
        for id in range(self.vocab):
            if self.tokens[id] and not self.tokens[id].strip(SPACE):
                allow(mask, id)
        return mask

    def expect(self, *texts: bytes) -> None:
        """Look now for what guides will ask about these texts: they are asked on the engine's time."""
        for text in texts:
            self.leading_to(text)
            self.holding(text)
        assert len(self.spaces) == len(self.unended)

    @cached_property
    def _sorted(self) -> list[tuple[bytes, int]]:
        return sorted((token, id) for id, token in enumerate(self.tokens) if token)

    @lru_cache(maxsize=1024)  # noqa: B019  (a lexicon lives as long as its model)
    def beginning(self, text: bytes) -> tuple[int, ...]:
        """Tokens whose bytes begin with `text`."""
        found = []
        for place in range(bisect_left(self._sorted, (text, -1)), len(self._sorted)):
            token, id = self._sorted[place]
            if not token.startswith(text):
                break
            found.append(id)
        return tuple(found)

    @lru_cache(maxsize=1024)  # noqa: B019
    def leading_to(self, text: bytes) -> tuple[int, ...]:
        """Tokens that write a part of `text`, from its beginning, or all of it and white space behind."""
        special = max((name for name in self.special_ids if text.startswith(name.encode())), key=len, default=None)
        if special is not None:
            return (self.special_ids[special],)
        parts = [id for size in range(1, len(text)) for id in self._exactly(text[:size])]
        wholes = [id for id in self.beginning(text) if not self.tokens[id][len(text) :].strip(SPACE)]
        return tuple(parts + wholes)

    @lru_cache(maxsize=256)  # noqa: B019
    def holding(self, text: bytes) -> tuple[int, ...]:
        """Tokens that hold all of `text` behind their first byte."""
        return tuple(id for id, token in enumerate(self.tokens) if token.find(text, 1) >= 0)

    def _exactly(self, text: bytes) -> list[int]:
        place = bisect_left(self._sorted, (text, -1))
        found = []
        while place < len(self._sorted) and self._sorted[place][0] == text:
            found.append(self._sorted[place][1])
            place += 1
        return found


class _Tokens:
    """A tokenizer in the shape that the library asks for."""

    is_tokenizer_wrapper = True

    def __init__(self, lexicon: Lexicon) -> None:
        # A model that has no token to end answers with gets one behind its vocabulary, which is never drawn.
        ending = [] if lexicon.stops else [b"<|nothing follows|>"]
        self.tokens = [*lexicon.tokens, *ending]
        self.eos_token_id = min(lexicon.stops, default=lexicon.vocab)
        self.special_token_ids = sorted(lexicon.special | {self.eos_token_id})
        self.bos_token_id: int | None = None
        self._lexicon = lexicon

    def __call__(self, text: str) -> list[int]:
        return self._lexicon.encode_plain(text)


def allow(mask: Mask, id: int) -> None:
    mask[id >> 5] |= np.uint32(1 << (id & 31))


def forbid(mask: Mask, id: int) -> None:
    mask[id >> 5] &= np.uint32(0xFFFFFFFF ^ (1 << (id & 31)))


def allows(mask: Mask, id: int) -> bool:
    return bool(mask[id >> 5] >> np.uint32(id & 31) & np.uint32(1))
