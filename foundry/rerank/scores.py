"""The shipped cross-encoder's scores, computed with mlx alone: a plain BERT, small enough to read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from ingot.kernels.cpu import fastblas

# mlx binds its BLAS when it is imported.
fastblas.install()

import mlx.core as mx  # noqa: E402

Weights = dict[str, mx.array]


class CrossEncoder:
    def __init__(self, folder: Path) -> None:
        self._config: dict[str, Any] = json.loads((folder / "config.json").read_text())
        loaded: Weights = mx.load(str(folder / "model.safetensors"))
        self._weights = {name: tensor.astype(mx.float32) for name, tensor in loaded.items()}
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._tokenizer.enable_truncation(self._config["max_position_embeddings"])
        self._tokenizer.enable_padding(pad_id=self._config["pad_token_id"])

    def scores(self, query: str, passages: list[str]) -> np.ndarray:
        """One number a passage; above zero, the passage answers the query."""
        found = self._tokenizer.encode_batch([(query, passage) for passage in passages])
        states = self._embedded(mx.array([one.ids for one in found]), mx.array([one.type_ids for one in found]))
        there = mx.array([one.attention_mask for one in found])
        mask = mx.where(there[:, None, None, :] > 0, 0.0, -1e9)
        for number in range(self._config["num_hidden_layers"]):
            states = self._layer(f"bert.encoder.layer.{number}", states, mask)
        pooled = mx.tanh(self._linear("bert.pooler.dense", states[:, 0]))
        return np.array(self._linear("classifier", pooled)[:, 0])

    def _embedded(self, tokens: mx.array, segments: mx.array) -> mx.array:
        tables = [
            self._weights[f"bert.embeddings.{kind}_embeddings.weight"] for kind in ("word", "token_type", "position")
        ]
        words, types, places = tables
        return self._normed("bert.embeddings.LayerNorm", words[tokens] + types[segments] + places[: tokens.shape[1]])

    def _layer(self, name: str, states: mx.array, mask: mx.array) -> mx.array:
        heads = self._config["num_attention_heads"]
        rows, length, width = states.shape
        queries, keys, values = (
            self._linear(f"{name}.attention.self.{part}", states).reshape(rows, length, heads, -1).transpose(0, 2, 1, 3)
            for part in ("query", "key", "value")
        )
        mixed = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=(width / heads) ** -0.5, mask=mask)
        mixed = self._linear(f"{name}.attention.output.dense", mixed.transpose(0, 2, 1, 3).reshape(rows, length, width))
        states = self._normed(f"{name}.attention.output.LayerNorm", states + mixed)
        inner = self._linear(f"{name}.intermediate.dense", states)
        inner = inner * (1 + mx.erf(inner / 2**0.5)) / 2
        return self._normed(f"{name}.output.LayerNorm", states + self._linear(f"{name}.output.dense", inner))

    def _linear(self, name: str, states: mx.array) -> mx.array:
        return states @ self._weights[f"{name}.weight"].T + self._weights[f"{name}.bias"]

    def _normed(self, name: str, states: mx.array) -> mx.array:
        epsilon = self._config["layer_norm_eps"]
        return mx.fast.layer_norm(states, self._weights[f"{name}.weight"], self._weights[f"{name}.bias"], epsilon)
