"""BERT and its relatives, under the names of their checkpoints.

BERT: learned positions, two kinds of segments, a layer norm after each half of a layer. XLM-RoBERTa, RoBERTa and
CamemBERT: positions that count from behind the padding's number. MPNet: scores that grow or shrink with how far apart
two tokens stand.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ingot.errors import ModelError
from ingot.models.checkpoint import CheckpointConfig
from ingot.models.pooling_models.encoder import (
    PaddedTexts,
    activation_function,
    attend_bidirectional,
    merge_heads,
    split_heads,
)

BERT_UNNEEDED = (r"position_ids$", r"token_type_ids$", r"^pooler\.", r"^cls\.", r"^lm_head\.", r"^classifier\.")
"""Of a model that makes embeddings: buffers, and the heads of training tasks."""


@dataclass(frozen=True, slots=True)
class BertShape:
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
    def of(cls, config: dict[str, Any]) -> BertShape:
        stated = CheckpointConfig(config)
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


class BertEmbeddings(nn.Module):
    def __init__(self, shape: BertShape) -> None:
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


class BertSelfAttention(nn.Module):
    def __init__(self, shape: BertShape) -> None:
        super().__init__()
        self._heads = shape.heads
        self.query = nn.Linear(shape.hidden, shape.hidden)
        self.key = nn.Linear(shape.hidden, shape.hidden)
        self.value = nn.Linear(shape.hidden, shape.hidden)

    def __call__(self, x: mx.array, rows: PaddedTexts) -> mx.array:
        queries, keys, values = (split_heads(part(x), self._heads) for part in (self.query, self.key, self.value))
        return merge_heads(attend_bidirectional(queries, keys, values, seen=rows.seen))


class BertResidualNorm(nn.Module):
    """A product added to what came in before, then the norm."""

    def __init__(self, wide: int, shape: BertShape) -> None:
        super().__init__()
        self.dense = nn.Linear(wide, shape.hidden)
        self.LayerNorm = nn.LayerNorm(shape.hidden, eps=shape.eps)

    def __call__(self, x: mx.array, before: mx.array) -> mx.array:
        return self.LayerNorm(self.dense(x) + before)


class BertAttention(nn.Module):
    def __init__(self, shape: BertShape) -> None:
        super().__init__()
        self["self"] = BertSelfAttention(shape)
        self.output = BertResidualNorm(shape.hidden, shape)

    def __call__(self, x: mx.array, rows: PaddedTexts) -> mx.array:
        return self.output(self["self"](x, rows), x)


class BertIntermediate(nn.Module):
    def __init__(self, shape: BertShape) -> None:
        super().__init__()
        self._act = activation_function(shape.act)
        self.dense = nn.Linear(shape.hidden, shape.inner)

    def __call__(self, x: mx.array) -> mx.array:
        return self._act(self.dense(x))


class BertLayer(nn.Module):
    def __init__(self, shape: BertShape) -> None:
        super().__init__()
        self.attention = BertAttention(shape)
        self.intermediate = BertIntermediate(shape)
        self.output = BertResidualNorm(shape.inner, shape)

    def __call__(self, x: mx.array, rows: PaddedTexts) -> mx.array:
        attended = self.attention(x, rows)
        return self.output(self.intermediate(attended), attended)


class BertLayers(nn.Module):
    def __init__(self, shape: BertShape) -> None:
        super().__init__()
        self.layer = [BertLayer(shape) for _ in range(shape.layers)]


class BertPooler(nn.Module):
    def __init__(self, shape: BertShape) -> None:
        super().__init__()
        self.dense = nn.Linear(shape.hidden, shape.hidden)

    def __call__(self, x: mx.array) -> mx.array:
        return mx.tanh(self.dense(x[:, 0]))


class Bert(nn.Module):
    """The trunk; `stages` yields the hidden states [rows, width, hidden] after each layer."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        shape = BertShape.of(config)
        self.embeddings = self.embedding(shape)
        self.encoder = BertLayers(shape)

    def embedding(self, shape: BertShape) -> BertEmbeddings:
        return BertEmbeddings(shape)

    def stages(self, rows: PaddedTexts) -> Iterator[mx.array]:
        x = self.embeddings(rows)
        for layer in self.encoder.layer:
            x = layer(x, rows)
            yield x


class PooledBert(Bert):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self.pooler = BertPooler(BertShape.of(config))


class BertClassifier(nn.Module):
    """A cross-encoder: one number for each row, from its first token."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.bert = PooledBert(config)
        self.classifier = nn.Linear(BertShape.of(config).hidden, 1)

    def stages(self, rows: PaddedTexts) -> Iterator[mx.array]:
        return self.bert.stages(rows)

    def score(self, x: mx.array, rows: PaddedTexts) -> mx.array:
        return self.classifier(self.bert.pooler(x))


def longest_bert_input(config: dict[str, Any]) -> int:
    return BertShape.of(config).positions


ROBERTA_DEFAULTS = {"pad_token_id": 1, "type_vocab_size": 1, "layer_norm_eps": 1e-5}


def with_roberta_defaults(config: dict[str, Any]) -> dict[str, Any]:
    """The config with this family's defaults in place of BERT's."""
    return ROBERTA_DEFAULTS | {key: value for key, value in config.items() if value is not None}


class RobertaEmbeddings(BertEmbeddings):
    def __init__(self, shape: BertShape) -> None:
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
        super().__init__(with_roberta_defaults(config))

    def embedding(self, shape: BertShape) -> BertEmbeddings:
        return RobertaEmbeddings(shape)


class RobertaHead(nn.Module):
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
        self.classifier = RobertaHead(BertShape.of(with_roberta_defaults(config)).hidden)

    def stages(self, rows: PaddedTexts) -> Iterator[mx.array]:
        return self.roberta.stages(rows)

    def score(self, x: mx.array, rows: PaddedTexts) -> mx.array:
        return self.classifier(x[:, 0])


def longest_roberta_input(config: dict[str, Any]) -> int:
    shape = BertShape.of(with_roberta_defaults(config))
    return shape.positions - shape.pad - 1


MPNET_PAD = 1  # positions count from behind it, whatever the config pads with
DISTANCE_BUCKETS, FARTHEST_DISTANCE = 32, 128
"""Distances that share a number: half of the buckets for each side, of these half for single tokens, the rest ever
wider up to `FARTHEST_DISTANCE`."""


def mpnet_shape(config: dict[str, Any]) -> BertShape:
    buckets = CheckpointConfig(config).number("relative_attention_num_buckets", DISTANCE_BUCKETS)
    if buckets != DISTANCE_BUCKETS:
        raise ModelError(f"The model's config asks for {buckets} buckets of distances; MPNet has {DISTANCE_BUCKETS}")
    return BertShape.of({"layer_norm_eps": 1e-12, "pad_token_id": MPNET_PAD} | config)


class MPNetEmbeddings(nn.Module):
    def __init__(self, shape: BertShape) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(shape.vocab, shape.hidden)
        self.position_embeddings = nn.Embedding(shape.positions, shape.hidden)
        self.LayerNorm = nn.LayerNorm(shape.hidden, eps=shape.eps)

    def __call__(self, rows: PaddedTexts) -> mx.array:
        real = (rows.tokens != MPNET_PAD).astype(mx.int32)
        positions = mx.cumsum(real, axis=1) * real + MPNET_PAD
        return self.LayerNorm(self.word_embeddings(rows.tokens) + self.position_embeddings(positions))


class MPNetSelfAttention(nn.Module):
    def __init__(self, shape: BertShape) -> None:
        super().__init__()
        self._heads = shape.heads
        self.q, self.k, self.v, self.o = (nn.Linear(shape.hidden, shape.hidden) for _ in range(4))

    def __call__(self, x: mx.array, rows: PaddedTexts, bias: mx.array) -> mx.array:
        queries, keys, values = (split_heads(part(x), self._heads) for part in (self.q, self.k, self.v))
        return self.o(merge_heads(attend_bidirectional(queries, keys, values, seen=rows.seen, bias=bias)))


class MPNetAttention(nn.Module):
    def __init__(self, shape: BertShape) -> None:
        super().__init__()
        self.attn = MPNetSelfAttention(shape)
        self.LayerNorm = nn.LayerNorm(shape.hidden, eps=shape.eps)

    def __call__(self, x: mx.array, rows: PaddedTexts, bias: mx.array) -> mx.array:
        return self.LayerNorm(self.attn(x, rows, bias) + x)


class MPNetLayer(nn.Module):
    def __init__(self, shape: BertShape) -> None:
        super().__init__()
        self.attention = MPNetAttention(shape)
        self.intermediate = BertIntermediate(shape)
        self.output = BertResidualNorm(shape.inner, shape)

    def __call__(self, x: mx.array, rows: PaddedTexts, bias: mx.array) -> mx.array:
        attended = self.attention(x, rows, bias)
        return self.output(self.intermediate(attended), attended)


class MPNetLayers(nn.Module):
    def __init__(self, shape: BertShape) -> None:
        super().__init__()
        self.layer = [MPNetLayer(shape) for _ in range(shape.layers)]
        self.relative_attention_bias = nn.Embedding(DISTANCE_BUCKETS, shape.heads)

    def bias(self, width: int) -> mx.array:
        """[heads, 2 * width - 1]: what is added to a score, by the key's distance from the query, from the farthest
        before it."""
        return self.relative_attention_bias(mx.array(distance_buckets(width))).T


def distance_buckets(width: int) -> np.ndarray:
    """The bucket of each distance from 1 - width to width - 1. Rounded in float32, as the published weights were."""
    distances = np.arange(1 - width, width)
    half = DISTANCE_BUCKETS // 2
    single = half // 2
    far = np.abs(distances)
    spread = np.log(np.maximum(far, 1).astype(np.float32) / np.float32(single)) / np.float32(
        math.log(FARTHEST_DISTANCE / single)
    )
    wide = np.minimum(single + (spread * np.float32(half - single)).astype(np.int64), half - 1)
    return np.where(far < single, far, wide) + half * (distances > 0)


class MPNet(nn.Module):
    """The trunk; `stages` yields the hidden states [rows, width, hidden] after each layer."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        shape = mpnet_shape(config)
        self.embeddings = MPNetEmbeddings(shape)
        self.encoder = MPNetLayers(shape)

    def stages(self, rows: PaddedTexts) -> Iterator[mx.array]:
        x, bias = self.embeddings(rows), self.encoder.bias(rows.width)
        for layer in self.encoder.layer:
            x = layer(x, rows, bias)
            yield x


class MPNetClassifier(nn.Module):
    """A cross-encoder: one number for each row, from its first token."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.mpnet = MPNet(config)
        self.classifier = RobertaHead(mpnet_shape(config).hidden)

    def stages(self, rows: PaddedTexts) -> Iterator[mx.array]:
        return self.mpnet.stages(rows)

    def score(self, x: mx.array, rows: PaddedTexts) -> mx.array:
        return self.classifier(x[:, 0])


def longest_mpnet_input(config: dict[str, Any]) -> int:
    return mpnet_shape(config).positions - MPNET_PAD - 1
