"""MPNet: RoBERTa's positions, and scores that grow or shrink with how far apart two tokens stand."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ingot.errors import ModelError
from ingot.models.encoders.attention import attend, heads_of, merge_heads
from ingot.models.encoders.config import EncoderConfig
from ingot.models.encoders.padded import PaddedTexts
from ingot.models.encoders.xlm_roberta import Head
from ingot.models.pooling_models.bert import Intermediate, ResidualNorm, Shape

PAD = 1  # positions count from behind it, whatever the config pads with
BUCKETS, FARTHEST = 32, 128
"""Distances that share a number: half of the buckets for each side, of these half for single tokens, the rest ever
wider up to `FARTHEST`."""


def shape_of(config: dict[str, Any]) -> Shape:
    buckets = EncoderConfig(config).number("relative_attention_num_buckets", BUCKETS)
    if buckets != BUCKETS:
        raise ModelError(f"The model's config asks for {buckets} buckets of distances; MPNet has {BUCKETS}")
    return Shape.of({"layer_norm_eps": 1e-12, "pad_token_id": PAD} | config)


class Embeddings(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(shape.vocab, shape.hidden)
        self.position_embeddings = nn.Embedding(shape.positions, shape.hidden)
        self.LayerNorm = nn.LayerNorm(shape.hidden, eps=shape.eps)

    def __call__(self, rows: PaddedTexts) -> mx.array:
        real = (rows.tokens != PAD).astype(mx.int32)
        positions = mx.cumsum(real, axis=1) * real + PAD
        return self.LayerNorm(self.word_embeddings(rows.tokens) + self.position_embeddings(positions))


class SelfAttention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self._heads = shape.heads
        self.q, self.k, self.v, self.o = (nn.Linear(shape.hidden, shape.hidden) for _ in range(4))

    def __call__(self, x: mx.array, rows: PaddedTexts, bias: mx.array) -> mx.array:
        queries, keys, values = (heads_of(part(x), self._heads) for part in (self.q, self.k, self.v))
        return self.o(merge_heads(attend(queries, keys, values, seen=rows.seen, bias=bias)))


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attn = SelfAttention(shape)
        self.LayerNorm = nn.LayerNorm(shape.hidden, eps=shape.eps)

    def __call__(self, x: mx.array, rows: PaddedTexts, bias: mx.array) -> mx.array:
        return self.LayerNorm(self.attn(x, rows, bias) + x)


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention = Attention(shape)
        self.intermediate = Intermediate(shape)
        self.output = ResidualNorm(shape.inner, shape)

    def __call__(self, x: mx.array, rows: PaddedTexts, bias: mx.array) -> mx.array:
        attended = self.attention(x, rows, bias)
        return self.output(self.intermediate(attended), attended)


class Layers(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.layer = [Layer(shape) for _ in range(shape.layers)]
        self.relative_attention_bias = nn.Embedding(BUCKETS, shape.heads)

    def bias(self, width: int) -> mx.array:
        """[heads, 2 * width - 1]: what is added to a score, by the key's distance from the query, from the farthest
        before it."""
        return self.relative_attention_bias(mx.array(buckets(width))).T


def buckets(width: int) -> np.ndarray:
    """The bucket of each distance from 1 - width to width - 1. Rounded in float32, as the published weights were."""
    distances = np.arange(1 - width, width)
    half = BUCKETS // 2
    single = half // 2
    far = np.abs(distances)
    spread = np.log(np.maximum(far, 1).astype(np.float32) / np.float32(single)) / np.float32(
        math.log(FARTHEST / single)
    )
    wide = np.minimum(single + (spread * np.float32(half - single)).astype(np.int64), half - 1)
    return np.where(far < single, far, wide) + half * (distances > 0)


class MPNet(nn.Module):
    """The trunk; `stages` yields the hidden states [rows, width, hidden] after each layer."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        shape = shape_of(config)
        self.embeddings = Embeddings(shape)
        self.encoder = Layers(shape)

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
        self.classifier = Head(shape_of(config).hidden)

    def stages(self, rows: PaddedTexts) -> Iterator[mx.array]:
        return self.mpnet.stages(rows)

    def score(self, x: mx.array, rows: PaddedTexts) -> mx.array:
        return self.classifier(x[:, 0])


def longest(config: dict[str, Any]) -> int:
    return shape_of(config).positions - PAD - 1
