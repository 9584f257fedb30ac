"""A pooling model behind one interface: rows of tokens in, a few numbers a row out, computed stage by stage.

Only the engine thread may run one. `run` is a generator so that the engine can serve streams between stages, however
long a text is. Also what BERT-type encoders share: texts padded on the right to one batch, bidirectional attention in
tiles whose scores take bounded memory, and activation functions by their names in configs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ingot.errors import ModelError
from ingot.models.layers.modules import named_parameters

FloatRows: TypeAlias = "list[array[float]]"
PoolingWork: TypeAlias = "Generator[None, None, list[array[float]]]"
ActivationFunction = Callable[[mx.array], mx.array]
TILE_BYTES = 32 << 20
"""The most that scores of one tile take; they and their softmax exist together."""
UNSEEN_SCORE = -1e9
"""Added to the scores of padding. Finite: a row of padding that sees nothing must not become NaN and spread."""


@dataclass(frozen=True, slots=True)
class PoolingTraits:
    family: str
    vocab: int
    length: int  # the longest input, in tokens
    dimension: int  # of a row's result
    unit: bool  # vectors have length 1
    notes: tuple[str, ...] = ()


class PoolingEncoder(ABC):
    traits: PoolingTraits

    @abstractmethod
    def run(self, tokens: Sequence[Sequence[int]], types: Sequence[Sequence[int]]) -> PoolingWork:
        """Compute a batch. Each `next` does a bounded part of the work; the returned value has one entry a row."""

    @abstractmethod
    def batch_bytes(self, tokens: int, width: int) -> int:
        """The most memory that a batch of `tokens`, with padding, takes while it runs; `width` is its longest row."""

    def rest(self) -> None:
        """Frees the memory that MLX caches for the next batch."""
        mx.clear_cache()

    @property
    @abstractmethod
    def weight_bytes(self) -> int: ...

    @property
    @abstractmethod
    def dtype(self) -> str: ...


class TrunkEncoder(PoolingEncoder):
    """A BERT-type model. `model` has `stages`, and `finish` makes [rows, dimension] of the last one's states."""

    def __init__(
        self, model: Any, finish: Any, traits: PoolingTraits, *, pad: int, hidden: int, inner: int, heads: int
    ) -> None:
        self._model, self._finish, self.traits = model, finish, traits
        self._pad, self._hidden, self._inner, self._heads = pad, hidden, inner, heads

    def run(self, tokens: Sequence[Sequence[int]], types: Sequence[Sequence[int]]) -> PoolingWork:
        rows = PaddedTexts.of(tokens, types, self._pad)
        last: mx.array | None = None
        for x in self._model.stages(rows):
            mx.async_eval(x)
            # The stage before is evaluated while this one is computed, so that a device is never idle.
            if last is not None:
                mx.eval(last)
                yield
            last = x
        assert last is not None, "a model without layers"
        return float_rows_of(self._finish(last, rows))

    def batch_bytes(self, tokens: int, width: int) -> int:
        return encoder_batch_bytes(tokens, width, hidden=self._hidden, inner=self._inner, heads=self._heads)

    @property
    def weight_bytes(self) -> int:
        return module_bytes(module for module in (self._model, self._finish) if isinstance(module, nn.Module))

    @property
    def dtype(self) -> str:
        return str(max(named_parameters(self._model), key=lambda found: found[1].size)[1].dtype).rsplit(".", 1)[-1]


def encoder_batch_bytes(tokens: int, width: int, *, hidden: int, inner: int, heads: int) -> int:
    # The states of a stage, of its heads, and of its MLP before and after the activation; half as much of the next one,
    # which starts before the first is done.
    states = 4 * tokens * (12 * hidden + 6 * inner)
    return states + min(3 * TILE_BYTES, 3 * 4 * heads * tokens * width)


def module_bytes(modules: Iterable[nn.Module]) -> int:
    return sum(weight.nbytes for module in modules for _, weight in named_parameters(module))


def float_rows_of(x: mx.array) -> FloatRows:
    """Rows of floats as plain values that any thread may use."""
    values = np.asarray(x.astype(mx.float32))
    return [array("f", row.tobytes()) for row in values]


@dataclass(frozen=True)
class PaddedTexts:
    tokens: mx.array  # [rows, width]
    types: mx.array  # [rows, width]: 0 for the first text of a pair, 1 for the second
    lengths: mx.array  # [rows]
    seen: mx.array | None  # [rows, width], False at padding; None where no row is padded

    @classmethod
    def of(cls, tokens: Sequence[Sequence[int]], types: Sequence[Sequence[int]], pad: int) -> PaddedTexts:
        """`types[i]` may be empty, which is all zeros."""
        lengths = [len(row) for row in tokens]
        width = max(lengths)
        ragged = min(lengths) < width
        counts = mx.array(lengths)
        return cls(
            mx.array([[*row, *[pad] * (width - len(row))] for row in tokens], dtype=mx.int32),
            mx.array([[*row, *[0] * (width - len(row))] for row in types], dtype=mx.int32),
            counts,
            mx.arange(width)[None] < counts[:, None] if ragged else None,
        )

    @property
    def width(self) -> int:
        return self.tokens.shape[1]

    def weights(self) -> mx.array:
        """[rows, width, 1]: 1 at a token, 0 at padding."""
        real = mx.arange(self.width)[None] < self.lengths[:, None]
        return real[..., None].astype(mx.float32)


def attend_bidirectional(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    *,
    seen: mx.array | None,
    reach: int | None = None,
    bias: mx.array | None = None,
) -> mx.array:
    """Attention over [rows, heads, width, size].

    `seen` [rows, width] is False at padding; None where there is none. With `reach` a token attends only to tokens at
    most that far from it. `bias` [heads, 2 * width - 1] is added to scores by the key's distance from the query, from
    1 - width on.
    """
    rows, heads, width, size = queries.shape
    scale = size**-0.5
    tile = max(1, min(width, TILE_BYTES // (4 * rows * heads * width)))
    if reach is not None:
        tile = min(width, max(tile, reach))
    pieces = []
    for begin in range(0, width, tile):
        end = min(width, begin + tile)
        low, high = (0, width) if reach is None else (max(0, begin - reach), min(width, end + reach))
        mask = _score_mask(queries.dtype, seen, (begin, end), (low, high), reach)
        if bias is not None:
            apart = mx.arange(low, high)[None, :] - mx.arange(begin, end)[:, None] + width - 1
            near = bias[:, apart].astype(queries.dtype)
            mask = near if mask is None else mask + near
        pieces.append(
            mx.fast.scaled_dot_product_attention(
                queries[:, :, begin:end], keys[:, :, low:high], values[:, :, low:high], scale=scale, mask=mask
            )
        )
    return pieces[0] if len(pieces) == 1 else mx.concatenate(pieces, axis=2)


def _score_mask(
    dtype: mx.Dtype, seen: mx.array | None, at: tuple[int, int], to: tuple[int, int], reach: int | None
) -> mx.array | None:
    """The mask of the scores of the queries `at` for the keys `to`; None where all of them are seen."""
    allowed = None if seen is None else seen[:, None, None, to[0] : to[1]]
    if reach is not None and max(at[1] - 1 - to[0], to[1] - 1 - at[0]) > reach:
        near = mx.abs(mx.arange(*at)[:, None] - mx.arange(*to)[None, :]) <= reach
        allowed = near[None, None] if allowed is None else mx.logical_and(allowed, near)
    if allowed is None:
        return None
    lowest = UNSEEN_SCORE if dtype != mx.float16 else -6e4
    return mx.where(allowed, mx.array(0.0, dtype=dtype), mx.array(lowest, dtype=dtype))


def split_heads(x: mx.array, heads: int) -> mx.array:
    """[rows, width, heads * size] as [rows, heads, width, size]."""
    rows, width, _ = x.shape
    return x.reshape(rows, width, heads, -1).transpose(0, 2, 1, 3)


def merge_heads(x: mx.array) -> mx.array:
    """The reverse of `split_heads`."""
    rows, _, width, _ = x.shape
    return x.transpose(0, 2, 1, 3).reshape(rows, width, -1)


ACTIVATIONS: dict[str, ActivationFunction] = {
    "gelu": nn.gelu,
    "gelu_new": nn.gelu_approx,
    "gelu_pytorch_tanh": nn.gelu_approx,
    "gelu_fast": nn.gelu_approx,
    "relu": nn.relu,
    "silu": nn.silu,
    "swish": nn.silu,
    "tanh": mx.tanh,
    "sigmoid": mx.sigmoid,
    "identity": lambda x: x,
}


def activation_function(name: str) -> ActivationFunction:
    """The function of a config's name (`gelu`) or of a torch class's (`torch.nn.modules.activation.Tanh`)."""
    function = ACTIVATIONS.get(name.rpartition(".")[2].lower())
    if function is None:
        raise ModelError(f"The model uses the activation function {name!r}, which is not supported for encoders")
    return function
