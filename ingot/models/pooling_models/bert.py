"""BERT and its relatives.

BERT: learned positions, two kinds of segments, a layer norm after each half of a layer. XLM-RoBERTa, RoBERTa and
CamemBERT: positions count from after the padding's number. MPNet: attention scores have a learned bias by the distance
of two tokens. The modules have the names of BERT's checkpoints.
"""

from __future__ import annotations

import math
import re
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
"""Of an embedding model: buffers, and the heads of training tasks."""
ROBERTA_DEFAULTS = {"pad_token_id": 1, "type_vocab_size": 1, "layer_norm_eps": 1e-5}
MPNET_PAD = 1  # positions count from after it, whatever the config pads with
MPNET_RENAMED = tuple(
    (re.compile(rf"\.attention\.{published}\."), f".attention.{ours}.")
    for published, ours in (
        ("attn.q", "self.query"),
        ("attn.k", "self.key"),
        ("attn.v", "self.value"),
        ("attn.o", "output.dense"),
        ("LayerNorm", "output.LayerNorm"),
    )
)
DISTANCE_BUCKETS, FARTHEST_DISTANCE = 32, 128
"""Distances that share a bias: half of the buckets for each direction, of these half for single tokens, the others ever
wider up to `FARTHEST_DISTANCE`."""


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
            raise ModelError(f"The model's config states {kind!r} positions; only absolute ones are supported")
        if config.get("is_decoder"):
            raise ModelError("The model's config states that it is a decoder, which is not supported for this family")
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
        self.query, self.key, self.value = (nn.Linear(shape.hidden, shape.hidden) for _ in range(3))

    def __call__(self, x: mx.array, rows: PaddedTexts, bias: mx.array | None) -> mx.array:
        queries, keys, values = (split_heads(part(x), self._heads) for part in (self.query, self.key, self.value))
        return merge_heads(attend_bidirectional(queries, keys, values, seen=rows.seen, bias=bias))


class BertResidualNorm(nn.Module):
    """A linear layer, a residual connection and a norm."""

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

    def __call__(self, x: mx.array, rows: PaddedTexts, bias: mx.array | None) -> mx.array:
        return self.output(self["self"](x, rows, bias), x)


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

    def __call__(self, x: mx.array, rows: PaddedTexts, bias: mx.array | None) -> mx.array:
        attended = self.attention(x, rows, bias)
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
        return mx.tanh(self.dense(x))


class Bert(nn.Module):
    """The trunk; `stages` yields the hidden states [rows, width, hidden] after each layer."""

    def __init__(self, config: dict[str, Any], *, pools: bool = False) -> None:
        super().__init__()
        shape = self.shape(config)
        self.embeddings = self.embedding(shape)
        self.encoder = BertLayers(shape)
        if pools:
            self.pooler = BertPooler(shape)
        self.longest = self.longest_input(shape)

    @staticmethod
    def shape(config: dict[str, Any]) -> BertShape:
        return BertShape.of(config)

    def embedding(self, shape: BertShape) -> nn.Module:
        return BertEmbeddings(shape)

    def longest_input(self, shape: BertShape) -> int:
        return shape.positions

    def attention_bias(self, width: int) -> mx.array | None:
        """[heads, 2 * width - 1]: added to scores by the key's distance from the query, from the farthest before it."""
        return None

    def stages(self, rows: PaddedTexts) -> Iterator[mx.array]:
        x, bias = self.embeddings(rows), self.attention_bias(rows.width)
        for layer in self.encoder.layer:
            x = layer(x, rows, bias)
            yield x


class RobertaEmbeddings(BertEmbeddings):
    def __init__(self, shape: BertShape) -> None:
        super().__init__(shape)
        self._pad, self._segments = shape.pad, shape.segments

    def __call__(self, rows: PaddedTexts) -> mx.array:
        types = rows.types if self._segments > 1 else mx.zeros_like(rows.types)
        return super().__call__(PaddedTexts(rows.tokens, types, rows.lengths, rows.seen))

    def positions(self, rows: PaddedTexts) -> mx.array:
        return roberta_positions(rows, self._pad)


def roberta_positions(rows: PaddedTexts, pad: int) -> mx.array:
    """A padding token has the padding's own number, also where a client put one between words."""
    real = (rows.tokens != pad).astype(mx.int32)
    return mx.cumsum(real, axis=1) * real + pad


class XlmRoberta(Bert):
    @staticmethod
    def shape(config: dict[str, Any]) -> BertShape:
        return BertShape.of(ROBERTA_DEFAULTS | {key: value for key, value in config.items() if value is not None})

    def embedding(self, shape: BertShape) -> nn.Module:
        return RobertaEmbeddings(shape)

    def longest_input(self, shape: BertShape) -> int:
        return shape.positions - shape.pad - 1


class MPNetEmbeddings(nn.Module):
    def __init__(self, shape: BertShape) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(shape.vocab, shape.hidden)
        self.position_embeddings = nn.Embedding(shape.positions, shape.hidden)
        self.LayerNorm = nn.LayerNorm(shape.hidden, eps=shape.eps)

    def __call__(self, rows: PaddedTexts) -> mx.array:
        positions = self.position_embeddings(roberta_positions(rows, MPNET_PAD))
        return self.LayerNorm(self.word_embeddings(rows.tokens) + positions)


class MPNet(Bert):
    """Its checkpoints' names become BERT's (`MPNET_RENAMED`)."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self.encoder.relative_attention_bias = nn.Embedding(DISTANCE_BUCKETS, self.shape(config).heads)

    @staticmethod
    def shape(config: dict[str, Any]) -> BertShape:
        buckets = CheckpointConfig(config).number("relative_attention_num_buckets", DISTANCE_BUCKETS)
        if buckets != DISTANCE_BUCKETS:
            raise ModelError(f"The model's config has {buckets} buckets of distances; MPNet has {DISTANCE_BUCKETS}")
        return BertShape.of({"layer_norm_eps": 1e-12, "pad_token_id": MPNET_PAD} | config)

    def embedding(self, shape: BertShape) -> nn.Module:
        return MPNetEmbeddings(shape)

    def longest_input(self, shape: BertShape) -> int:
        return shape.positions - MPNET_PAD - 1

    def attention_bias(self, width: int) -> mx.array:
        bias: mx.array = self.encoder.relative_attention_bias(mx.array(distance_buckets(width))).T
        return bias


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


class RobertaHead(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.dense = nn.Linear(hidden, hidden)
        self.out_proj = nn.Linear(hidden, 1)

    def __call__(self, x: mx.array) -> mx.array:
        return self.out_proj(mx.tanh(self.dense(x)))


class SequenceClassifier(nn.Module):
    """A cross-encoder: one number for each row, from its first token. `name` is the trunk's in checkpoints."""

    def __init__(self, name: str, trunk: Bert, classifier: nn.Module) -> None:
        super().__init__()
        self[name] = trunk
        self.classifier = classifier
        self._name, self.longest = name, trunk.longest

    def stages(self, rows: PaddedTexts) -> Iterator[mx.array]:
        stages: Iterator[mx.array] = self[self._name].stages(rows)
        return stages

    def score(self, x: mx.array, rows: PaddedTexts) -> mx.array:
        trunk, first = self[self._name], x[:, 0]
        return self.classifier(trunk.pooler(first) if "pooler" in trunk else first)


def bert_classifier(config: dict[str, Any]) -> SequenceClassifier:
    return SequenceClassifier("bert", Bert(config, pools=True), nn.Linear(BertShape.of(config).hidden, 1))


def roberta_classifier(config: dict[str, Any]) -> SequenceClassifier:
    return SequenceClassifier("roberta", XlmRoberta(config), RobertaHead(BertShape.of(config).hidden))


def mpnet_classifier(config: dict[str, Any]) -> SequenceClassifier:
    return SequenceClassifier("mpnet", MPNet(config), RobertaHead(BertShape.of(config).hidden))
