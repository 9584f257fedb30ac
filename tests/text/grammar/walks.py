"""Random answers that keep to a plan, as a model without sense would write them, and a small vocabulary for them."""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, pre_tokenizers

from ingot.text.grammar.matcher import CompiledGrammar
from ingot.text.tokenizer.tokenizer import Tokenizer

END = "<|end of answer|>"
MOST = 3000
MERGES = [
    *(("<", "/"), (">", "Ċ"), ('"', "}"), ('"', ":"), ("Ġ", '"'), ('"', ","), ("t", "h"), ("th", "e"), ("Ġ", "the")),
    *(("Ċ", "Ċ"), ("{", '"'), ("}", "}"), ("Ġ", "a"), ("1", "2"), ("]", ">"), (">", "x"), ("<", "t"), ("Ċ", "<")),
]
"""So that tokens end within and go beyond what grammars and tags are made of."""


@cache
def byte_tokenizer(*special: str) -> Tokenizer:
    """Every byte, a few pairs of them, and special tokens of these names. The last one, END, ends answers."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = alphabet + ["".join(pair) for pair in MERGES]
    library = Library(models.BPE(vocab={piece: id for id, piece in enumerate(pieces)}, merges=MERGES))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens([*special, END])
    with tempfile.TemporaryDirectory() as folder:
        library.save(str(Path(folder) / "tokenizer.json"))
        (Path(folder) / "tokenizer_config.json").write_text(json.dumps({"eos_token": END}))
        return Tokenizer.load(Path(folder))


def allowed(mask: np.ndarray, vocab: int) -> list[int]:
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[:vocab]
    return np.flatnonzero(bits).tolist()


class Walker:
    """Writes random answers. After `soft` tokens it looks for a way to the end: a stop token, or one of `closers`."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        chance: random.Random,
        *,
        soft: int = 40,
        most: int = 2000,
        closers: Sequence[str] = (),
    ) -> None:
        self._tokenizer, self._chance = tokenizer, chance
        self._soft = soft
        self._closers = [closer.encode() for closer in (*closers, '"', "}", "]", ")", ",", "0")]
        tokens = reversed(range(tokenizer.vocab_size))
        self._by_bytes = {tokenizer.token_bytes(token): token for token in tokens}  # of those alike the first

    def answer(self, grammar: CompiledGrammar) -> list[int]:
        """The tokens of a complete answer, without a stop token."""
        matcher = grammar.begin()
        tokens: list[int] = []
        written = b""
        while not matcher.done:
            assert len(tokens) < MOST, f"no end: {written!r}"
            mask = matcher.mask()
            assert mask is not None, "a grammar leaves nothing free"
            choices = allowed(mask, self._tokenizer.vocab_size)
            assert choices, f"nothing may follow {written!r}"
            token = self._chosen(choices, written, len(tokens))
            if token in self._tokenizer.eos_ids:
                return tokens
            matcher.accept(token)
            tokens.append(token)
            written += self._tokenizer.token_bytes(token)
        return tokens

    def _chosen(self, choices: list[int], written: bytes, count: int) -> int:
        stops = sorted(self._tokenizer.eos_ids.intersection(choices))
        if stops and (count >= self._soft or self._chance.random() < 0.3):
            return stops[0]
        if count < self._soft:
            return self._chance.choice(choices)
        for token in sorted(self._tokenizer.special_ids.intersection(choices)):
            if any(self._tokenizer.token_bytes(token) in closer for closer in self._closers):
                return token
        ways = [(self._begun(closer, written), self._chance.random(), closer) for closer in self._closers]
        open_to = set(choices)
        for begun, _, closer in sorted(ways, reverse=True):
            beginnings = (closer[begun:end] for end in range(begun + 1, len(closer) + 1))
            if fitting := [token for text in beginnings if (token := self._by_bytes.get(text, -1)) in open_to]:
                return min(fitting)
        return choices[0]

    def _begun(self, closer: bytes, written: bytes) -> int:
        """How much of a closer is written."""
        return max(size for size in range(len(closer)) if written.endswith(closer[:size]))
