"""XLM-RoBERTa, RoBERTa and CamemBERT: BERT's layers, with positions that count from behind the padding's number."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ingot.models.encoders.padded import PaddedTexts
from ingot.models.pooling_models.bert import Bert, Embeddings, Shape

DEFAULTS = {"pad_token_id": 1, "type_vocab_size": 1, "layer_norm_eps": 1e-5}


def stated(config: dict[str, Any]) -> dict[str, Any]:
    """The config with this family's defaults in place of BERT's."""
    return DEFAULTS | {key: value for key, value in config.items() if value is not None}


class NumberedEmbeddings(Embeddings):
    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self._pad, self._segments = shape.pad, shape.segments

    def __call__(self, rows: PaddedTexts) -> mx.array:
        types = rows.types if self._segments > 1 else mx.zeros_like(rows.types)
        return super().__call__(PaddedTexts(rows.tokens, types, rows.lengths, rows.seen))

    def positions(self, rows: PaddedTexts) -> mx.array:
        """A padding token has the padding's own number, also where a client put one between words."""
        real = (rows.tokens != self._pad).astype(mx.int32)
        return mx.cumsum(real, axis=1) * real + self._pad


class XlmRoberta(Bert):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(stated(config))

    def embedding(self, shape: Shape) -> Embeddings:
        return NumberedEmbeddings(shape)


class Head(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.dense = nn.Linear(hidden, hidden)
        self.out_proj = nn.Linear(hidden, 1)

    def __call__(self, x: mx.array) -> mx.array:
        return self.out_proj(mx.tanh(self.dense(x)))


class XlmRobertaClassifier(nn.Module):
    """A cross-encoder: one number for each row, from its first token."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.roberta = XlmRoberta(config)
        self.classifier = Head(Shape.of(stated(config)).hidden)

    def stages(self, rows: PaddedTexts) -> Iterator[mx.array]:
        return self.roberta.stages(rows)

    def score(self, x: mx.array, rows: PaddedTexts) -> mx.array:
        return self.classifier(x[:, 0])


def longest(config: dict[str, Any]) -> int:
    shape = Shape.of(stated(config))
    return shape.positions - shape.pad - 1
