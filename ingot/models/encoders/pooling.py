"""From hidden states to one vector a row, as a recipe says. Always in float32."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from ingot.models import checkpoint
from ingot.models.encoders.activations import activation
from ingot.models.encoders.padded import PaddedTexts
from ingot.models.pooling_models.sentence_transformers import Dense, Normalize, Recipe

LEAST_NORM = 1e-12


class Pooling(nn.Module):
    """The recipe at work: `__call__` makes [rows, dimension] of the last hidden states [rows, width, hidden]."""

    def __init__(self, recipe: Recipe, hidden: int) -> None:
        super().__init__()
        self._modes = recipe.pooling
        self._steps = recipe.steps
        self.dimension = hidden * len(recipe.pooling)
        self.dense = [_DenseLayer(step) for step in recipe.steps if isinstance(step, Dense)]
        for layer in self.dense:
            self.dimension = layer.outputs

    def __call__(self, x: mx.array, rows: PaddedTexts) -> mx.array:
        x = x.astype(mx.float32)
        pooled = mx.concatenate([_POOLINGS[mode](x, rows) for mode in self._modes], axis=-1)
        layers = iter(self.dense)
        for step in self._steps:
            pooled = _normal(pooled) if isinstance(step, Normalize) else next(layers)(pooled)
        return pooled


class _DenseLayer(nn.Module):
    def __init__(self, step: Dense) -> None:
        super().__init__()
        self._act = activation(step.act)
        self.outputs = step.outputs
        self.linear = nn.Linear(step.inputs, step.outputs, bias=step.bias)
        checkpoint.give(self, checkpoint.read(step.folder), unneeded=(), whose=step.folder.name)
        self.set_dtype(mx.float32)

    def __call__(self, x: mx.array) -> mx.array:
        return self._act(self.linear(x))


def _normal(x: mx.array) -> mx.array:
    return x / mx.maximum(mx.linalg.norm(x, axis=-1, keepdims=True), LEAST_NORM)


def _first(x: mx.array, rows: PaddedTexts) -> mx.array:
    return x[:, 0]


def _last(x: mx.array, rows: PaddedTexts) -> mx.array:
    return mx.take_along_axis(x, (rows.lengths - 1)[:, None, None], axis=1)[:, 0]


def _largest(x: mx.array, rows: PaddedTexts) -> mx.array:
    return mx.where(rows.weights() > 0, x, -mx.inf).max(axis=1)


def _mean(x: mx.array, rows: PaddedTexts) -> mx.array:
    weights = rows.weights()
    return (x * weights).sum(axis=1) / weights.sum(axis=1)


def _mean_by_root(x: mx.array, rows: PaddedTexts) -> mx.array:
    weights = rows.weights()
    return (x * weights).sum(axis=1) / mx.sqrt(weights.sum(axis=1))


def _later_weigh_more(x: mx.array, rows: PaddedTexts) -> mx.array:
    weights = rows.weights() * mx.arange(1, rows.width + 1, dtype=mx.float32)[None, :, None]
    return (x * weights).sum(axis=1) / weights.sum(axis=1)


_POOLINGS = {
    "cls": _first,
    "max": _largest,
    "mean": _mean,
    "mean_sqrt_len_tokens": _mean_by_root,
    "weightedmean": _later_weigh_more,
    "lasttoken": _last,
}
