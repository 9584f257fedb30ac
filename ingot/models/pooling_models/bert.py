"""BERT: learned positions, two kinds of segments, a layer norm after each half of a layer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ingot.errors import ModelError
from ingot.models.encoders.activations import activation
from ingot.models.encoders.attention import attend, heads_of, merge_heads
from ingot.models.encoders.config import EncoderConfig
from ingot.models.encoders.padded import PaddedTexts

UNNEEDED = (r"position_ids$", r"token_type_ids$", r"^pooler\.", r"^cls\.", r"^lm_head\.", r"^classifier\.")
"""Of a model that makes embeddings: buffers, and the heads of training tasks."""


@dataclass(frozen=True, slots=True)
class Shape:
    vocab: int
    hidden: int
    inner: int
    layers: int
    heads: int
    positions: int
    segments: int
    eps: float
    act: str
    pad: int

    @classmethod
    def of(cls, config: dict[str, Any]) -> Shape:
        stated = EncoderConfig(config)
        kind = config.get("position_embedding_type") or "absolute"
        if kind != "absolute":
            raise ModelError(f"The model's config asks for {kind!r} positions; ingot knows absolute ones")
        if config.get("is_decoder"):
            raise ModelError("The model's config says that it is a decoder, which this family is not run as")
        return cls(
            vocab=stated.number("vocab_size"),
            hidden=stated.number("hidden_size"),
            inner=stated.number("intermediate_size"),
            layers=stated.number("num_hidden_layers"),
            heads=stated.number("num_attention_heads"),
            positions=stated.number("max_position_embeddings"),
            segments=stated.number("type_vocab_size", 2),
            eps=stated.real("layer_norm_eps", 1e-12),
            act=stated.text("hidden_act", "gelu"),
            pad=stated.number("pad_token_id", 0),
        )


class Embeddings(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(shape.vocab, shape.hidden)
        self.position_embeddings = nn.Embedding(shape.positions, shape.hidden)
        self.token_type_embeddings = nn.Embedding(shape.segments, shape.hidden)
        self.LayerNorm = nn.LayerNorm(shape.hidden, eps=shape.eps)

    def __call__(self, rows: PaddedTexts) -> mx.array:
        x = self.word_embeddings(rows.tokens) + self.token_type_embeddings(rows.types)
        return self.LayerNorm(x + self.position_embeddings(self.positions(rows)))

    def positions(self, rows: PaddedTexts) -> mx.array:
        return mx.arange(rows.width)[None]


class SelfAttention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self._heads = shape.heads
        self.query = nn.Linear(shape.hidden, shape.hidden)
        self.key = nn.Linear(shape.hidden, shape.hidden)
        self.value = nn.Linear(shape.hidden, shape.hidden)

    def __call__(self, x: mx.array, rows: PaddedTexts) -> mx.array:
        queries, keys, values = (heads_of(part(x), self._heads) for part in (self.query, self.key, self.value))
        return merge_heads(attend(queries, keys, values, seen=rows.seen))


class ResidualNorm(nn.Module):
    """A product added to what came in before, then the norm."""

    def __init__(self, wide: int, shape: Shape) -> None:
        super().__init__()
        self.dense = nn.Linear(wide, shape.hidden)
        self.LayerNorm = nn.LayerNorm(shape.hidden, eps=shape.eps)

    def __call__(self, x: mx.array, before: mx.array) -> mx.array:
        return self.LayerNorm(self.dense(x) + before)


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self["self"] = SelfAttention(shape)
        self.output = ResidualNorm(shape.hidden, shape)

    def __call__(self, x: mx.array, rows: PaddedTexts) -> mx.array:
        return self.output(self["self"](x, rows), x)


class Intermediate(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self._act = activation(shape.act)
        self.dense = nn.Linear(shape.hidden, shape.inner)

    def __call__(self, x: mx.array) -> mx.array:
        return self._act(self.dense(x))


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention = Attention(shape)
        self.intermediate = Intermediate(shape)
        self.output = ResidualNorm(shape.inner, shape)

    def __call__(self, x: mx.array, rows: PaddedTexts) -> mx.array:
        attended = self.attention(x, rows)
        return self.output(self.intermediate(attended), attended)


class Layers(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.layer = [Layer(shape) for _ in range(shape.layers)]


class Pooler(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.dense = nn.Linear(shape.hidden, shape.hidden)

    def __call__(self, x: mx.array) -> mx.array:
        return mx.tanh(self.dense(x[:, 0]))


class Bert(nn.Module):
    """The trunk; `stages` yields the hidden states [rows, width, hidden] after each layer."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        shape = Shape.of(config)
        self.embeddings = self.embedding(shape)
        self.encoder = Layers(shape)

    def embedding(self, shape: Shape) -> Embeddings:
        return Embeddings(shape)

    def stages(self, rows: PaddedTexts) -> Iterator[mx.array]:
        x = self.embeddings(rows)
        for layer in self.encoder.layer:
            x = layer(x, rows)
            yield x


class PooledBert(Bert):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self.pooler = Pooler(Shape.of(config))


class BertClassifier(nn.Module):
    """A cross-encoder: one number for each row, from its first token."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.bert = PooledBert(config)
        self.classifier = nn.Linear(Shape.of(config).hidden, 1)

    def stages(self, rows: PaddedTexts) -> Iterator[mx.array]:
        return self.bert.stages(rows)

    def score(self, x: mx.array, rows: PaddedTexts) -> mx.array:
        return self.classifier(self.bert.pooler(x))


def longest(config: dict[str, Any]) -> int:
    return Shape.of(config).positions
