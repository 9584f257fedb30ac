"""ModernBERT: rotary positions, gated MLPs, pre-norms, and layers with sliding-window attention."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ingot.errors import ModelError
from ingot.models.checkpoint import CheckpointConfig
from ingot.models.pooling_models.encoder import (
    PaddedTexts,
    activation_function,
    attend_bidirectional,
    merge_heads,
    split_heads,
)

MODERNBERT_UNNEEDED = (r"^head\.", r"^decoder\.", r"^classifier\.")
LAYER_KINDS = ("full_attention", "sliding_attention")
ROPE_THETAS = {"full_attention": ("global_rope_theta", 160_000.0), "sliding_attention": ("local_rope_theta", 10_000.0)}


@dataclass(frozen=True, slots=True)
class ModernBertShape:
    vocab: int
    hidden: int
    inner: int
    heads: int
    kinds: tuple[str, ...]  # of the layers
    thetas: dict[str, float]
    reach: int
    eps: float
    act: str
    norm_bias: bool
    attention_bias: bool
    inner_bias: bool

    @classmethod
    def of(cls, config: dict[str, Any]) -> ModernBertShape:
        stated = CheckpointConfig(config)
        return cls(
            vocab=stated.number("vocab_size"),
            hidden=stated.number("hidden_size"),
            inner=stated.number("intermediate_size"),
            heads=stated.number("num_attention_heads"),
            kinds=_layer_kinds(config, stated),
            thetas={kind: _rope_theta(config, kind) for kind in LAYER_KINDS},
            reach=stated.number("local_attention", 128) // 2,
            eps=stated.real("norm_eps", 1e-5),
            act=stated.text("hidden_activation", "gelu"),
            norm_bias=stated.flag("norm_bias", False),
            attention_bias=stated.flag("attention_bias", False),
            inner_bias=stated.flag("mlp_bias", False),
        )


def _layer_kinds(config: dict[str, Any], stated: CheckpointConfig) -> tuple[str, ...]:
    kinds = config.get("layer_types")
    if kinds is None:
        every = stated.number("global_attn_every_n_layers", 3)
        count = stated.number("num_hidden_layers")
        kinds = [LAYER_KINDS[bool(number % every)] for number in range(count)]
    if unknown := [kind for kind in kinds if kind not in LAYER_KINDS]:
        raise ModelError(f"The model's config.json names the layer type {unknown[0]!r}, which ModernBERT does not have")
    return tuple(kinds)


def _rope_theta(config: dict[str, Any], kind: str) -> float:
    parameters = (config.get("rope_parameters") or {}).get(kind) or {}
    scaled = parameters.get("rope_type", "default") != "default" or config.get("rope_scaling") is not None
    if scaled:
        raise ModelError("The model's config.json scales its rotary positions, which is not supported for encoders")
    key, default = ROPE_THETAS[kind]
    return float(parameters.get("rope_theta") or config.get(key) or default)


class ModernBertEmbeddings(nn.Module):
    def __init__(self, shape: ModernBertShape) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(shape.vocab, shape.hidden)
        self.norm = nn.LayerNorm(shape.hidden, eps=shape.eps, bias=shape.norm_bias)

    def __call__(self, rows: PaddedTexts) -> mx.array:
        return self.norm(self.tok_embeddings(rows.tokens))


class ModernBertAttention(nn.Module):
    def __init__(self, shape: ModernBertShape, kind: str) -> None:
        super().__init__()
        self._heads = shape.heads
        self._theta = shape.thetas[kind]
        self._reach = shape.reach if kind == "sliding_attention" else None
        self.Wqkv = nn.Linear(shape.hidden, 3 * shape.hidden, bias=shape.attention_bias)
        self.Wo = nn.Linear(shape.hidden, shape.hidden, bias=shape.attention_bias)

    def __call__(self, x: mx.array, rows: PaddedTexts) -> mx.array:
        queries, keys, values = (split_heads(part, self._heads) for part in mx.split(self.Wqkv(x), 3, axis=-1))
        return self.Wo(
            merge_heads(
                attend_bidirectional(self._rope(queries), self._rope(keys), values, seen=rows.seen, reach=self._reach)
            )
        )

    def _rope(self, x: mx.array) -> mx.array:
        return mx.fast.rope(x, x.shape[-1], traditional=False, base=self._theta, scale=1.0, offset=0)


class ModernBertMlp(nn.Module):
    def __init__(self, shape: ModernBertShape) -> None:
        super().__init__()
        self._act = activation_function(shape.act)
        self.Wi = nn.Linear(shape.hidden, 2 * shape.inner, bias=shape.inner_bias)
        self.Wo = nn.Linear(shape.inner, shape.hidden, bias=shape.inner_bias)

    def __call__(self, x: mx.array) -> mx.array:
        inner, gate = mx.split(self.Wi(x), 2, axis=-1)
        return self.Wo(self._act(inner) * gate)


class ModernBertLayer(nn.Module):
    def __init__(self, shape: ModernBertShape, number: int) -> None:
        super().__init__()
        # The embeddings are normed already.
        if number > 0:
            self.attn_norm = nn.LayerNorm(shape.hidden, eps=shape.eps, bias=shape.norm_bias)
        self.attn = ModernBertAttention(shape, shape.kinds[number])
        self.mlp_norm = nn.LayerNorm(shape.hidden, eps=shape.eps, bias=shape.norm_bias)
        self.mlp = ModernBertMlp(shape)

    def __call__(self, x: mx.array, rows: PaddedTexts) -> mx.array:
        x = x + self.attn(self.attn_norm(x) if "attn_norm" in self else x, rows)
        return x + self.mlp(self.mlp_norm(x))


class ModernBert(nn.Module):
    """The trunk; `stages` yields the hidden states [rows, width, hidden] after each layer."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        shape = ModernBertShape.of(config)
        self.embeddings = ModernBertEmbeddings(shape)
        self.layers = [ModernBertLayer(shape, number) for number in range(len(shape.kinds))]
        self.final_norm = nn.LayerNorm(shape.hidden, eps=shape.eps, bias=shape.norm_bias)
        self.longest = CheckpointConfig(config).number("max_position_embeddings", 8192)

    def stages(self, rows: PaddedTexts) -> Iterator[mx.array]:
        x = self.embeddings(rows)
        for layer in self.layers:
            x = layer(x, rows)
            yield x
        yield self.final_norm(x)


class ModernBertHead(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        shape, stated = ModernBertShape.of(config), CheckpointConfig(config)
        self._act = activation_function(stated.text("classifier_activation", "gelu"))
        self.dense = nn.Linear(shape.hidden, shape.hidden, bias=stated.flag("classifier_bias", False))
        self.norm = nn.LayerNorm(shape.hidden, eps=shape.eps, bias=shape.norm_bias)

    def __call__(self, x: mx.array) -> mx.array:
        return self.norm(self._act(self.dense(x)))


class ModernBertClassifier(nn.Module):
    """A cross-encoder: one number for each row, from its first token or from the mean of all."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        pooling = CheckpointConfig(config).text("classifier_pooling", "cls")
        if pooling not in ("cls", "mean"):
            raise ModelError(f"The model's config.json states the pooling {pooling!r}, which ModernBERT does not have")
        self._mean = pooling == "mean"
        self.model = ModernBert(config)
        self.longest = self.model.longest
        self.head = ModernBertHead(config)
        self.classifier = nn.Linear(ModernBertShape.of(config).hidden, 1)

    def stages(self, rows: PaddedTexts) -> Iterator[mx.array]:
        return self.model.stages(rows)

    def score(self, x: mx.array, rows: PaddedTexts) -> mx.array:
        if not self._mean:
            return self.classifier(self.head(x[:, 0]))
        weights = rows.weights().astype(x.dtype)
        return self.classifier(self.head((x * weights).sum(axis=1) / weights.sum(axis=1)))
