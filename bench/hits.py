"""What a model predicts after a prefix whose KV was encoded and decoded by a codec.

A prefix is computed once, and what follows it with each codec, so that codecs are compared on the same KV, token by
token.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import ingot.engine  # noqa: F401  (binds the fast BLAS before mlx)
from ingot.cache.codecs.codec import EncodedParts
from ingot.cache.codecs.names import CodecName
from ingot.cache.codecs.pair import PairCodec, RecordCodec
from ingot.cache.forward_batch import ForwardPart, Row
from ingot.cache.record_encoding import LossyEncoding
from ingot.cache.records import Record, restore_row, take_record
from ingot.models.kv_codec import record_form_of

# isort: split
import mlx.core as mx
import numpy as np

LAST_BIT = "last bit"
"""No codec: what the smallest error that there can be makes of a model, which others are to be compared with."""


class LastBit(PairCodec):
    """Keys and values as they are, but for their last bit, which is the other one."""

    lossy = True

    def __init__(self) -> None:
        super().__init__(CodecName())

    def decode(self, arrays: EncodedParts, dtype: mx.Dtype) -> tuple[mx.array, mx.array]:
        keys, values = super().decode(arrays, dtype)
        whole = mx.uint32 if dtype.size == 4 else mx.uint16
        return (keys.view(whole) ^ 1).view(dtype), (values.view(whole) ^ 1).view(dtype)


def codec_of(name: str) -> PairCodec:
    return LastBit() if name == LAST_BIT else RecordCodec(CodecName.parse(name))


class Prefix:
    """The states of a text's first tokens."""

    def __init__(self, adapter: Any, tokens: Sequence[int]) -> None:
        self._adapter, self._rows, self.length = adapter, adapter.new_batch_state(), len(tokens)
        self._form = record_form_of(adapter, self._rows)
        row = self._rows.new()
        for begin in range(0, len(tokens), adapter.widest):
            part = tokens[begin : begin + adapter.widest]
            self._run(row, part, [len(part) - 1])
        self._record = take_record(self._rows, row, 0)
        self._rows.leave(row)

    def logits_behind(self, tokens: Sequence[int], codec: PairCodec) -> mx.array:
        """Logits at tokens that follow, in float32."""
        row = self._rows.new()
        restore_row(self._rows, row, [self._read_back(codec)], self.length)
        logits = self._run(row, tokens, list(range(len(tokens)))).astype(mx.float32)
        self._rows.leave(row)
        return logits

    def _read_back(self, codec: PairCodec) -> Record:
        if not codec.lossy:
            return self._record
        encoding = LossyEncoding(self._rows, codec, self._form)
        (record,) = encoding.with_pages([encoding.shrunk(self._record)], self.length)
        return record

    def _run(self, row: Row, tokens: Sequence[int], wanted: list[int]) -> mx.array:
        logits: mx.array = self._adapter.run(self._rows, mx.array(tokens), [ForwardPart((row,), len(tokens))], wanted)
        mx.eval(logits, self._rows.pending())
        return logits


@dataclass(frozen=True, slots=True)
class TextFigures:
    """Against raw states, of the same tokens; errors are standard ones, of the mean of what tokens differ by."""

    tokens: int
    perplexity: float
    change: float  # of the perplexity
    error: float
    agreement: float  # of the likeliest tokens
    flipped_lead: float  # how many times as likely the likeliest was as the next, in the middle case of the others
    usual_lead: float  # the same of all tokens


@dataclass(frozen=True, slots=True)
class Answers:
    losses: np.ndarray
    likeliest: np.ndarray
    leads: np.ndarray  # of the likeliest over the next, in logarithms


def text_figures(
    adapter: Any, texts: Sequence[Sequence[int]], prefix: int, codecs: Sequence[str]
) -> dict[str, TextFigures]:
    """By codec, of the tokens of each text behind its prefix."""
    answers: dict[str, list[Answers]] = {name: [] for name in ("raw", *codecs)}
    for text in texts:
        known = Prefix(adapter, text[:prefix])
        for name, found in answers.items():
            found.append(_answers(known.logits_behind(text[prefix:], codec_of(name))[:-1], text[prefix + 1 :]))
    joined = {name: _joined(found) for name, found in answers.items()}
    return {name: _compared(joined["raw"], joined[name]) for name in codecs}


def _answers(logits: mx.array, tokens: Sequence[int]) -> Answers:
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    said = mx.take_along_axis(logprobs, mx.array(tokens)[:, None], axis=-1)[:, 0]
    second, first = (mx.sort(mx.topk(logits, 2, axis=-1), axis=-1)[:, place] for place in (0, 1))
    return Answers(np.array(-said), np.array(mx.argmax(logits, axis=-1)), np.array(first - second))


def _joined(found: Sequence[Answers]) -> Answers:
    parts = ([getattr(each, part) for each in found] for part in ("losses", "likeliest", "leads"))
    return Answers(*map(np.concatenate, parts))


def _compared(raw: Answers, other: Answers) -> TextFigures:
    more, same = other.losses - raw.losses, other.likeliest == raw.likeliest
    return TextFigures(
        tokens=more.size,
        perplexity=math.exp(other.losses.mean()),
        change=math.expm1(more.mean()),
        error=float(more.std()) / math.sqrt(more.size),
        agreement=float(same.mean()),
        flipped_lead=1.0 if same.all() else math.exp(float(np.median(raw.leads[~same]))),
        usual_lead=math.exp(float(np.median(raw.leads))),
    )


def recall(
    adapter: Any, probes: Iterable[tuple[list[int], list[int]]], prefix: int, codecs: Sequence[str]
) -> dict[str, float]:
    """The share of facts told within a prefix that are known behind it. A probe is tokens, and the places of those that
    are to be known."""
    right: dict[str, list[float]] = {name: [] for name in codecs}
    for tokens, places in probes:
        known = Prefix(adapter, tokens[:prefix])
        for name in codecs:
            told = mx.argmax(known.logits_behind(tokens[prefix:], codec_of(name)), axis=-1).tolist()
            right[name].append(statistics.mean(told[place - 1 - prefix] == tokens[place] for place in places))
    return {name: statistics.mean(shares) for name, shares in right.items()}
