"""The output head: swapped for one that computes only the positions that are sampled, and hands over hidden states."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

from ingot.models.layers.gpu_linear import (
    DenseKernelEmbedding,
    DenseKernelLinear,
    QuantizedKernelEmbedding,
    QuantizedKernelLinear,
)
from ingot.models.layers.modules import (
    DenseEmbedding,
    DenseLinear,
    PackedEmbedding,
    PackedLinear,
    adopt_module,
    extend,
    temporarily_extended,
)

LM_HEAD_NAMES = frozenset({"lm_head", "embed_out", "output"})
TIED_HEAD_NAMES = frozenset(
    {"embed_tokens", "wte", "tok_embeddings", "embedding", "embeddings", "word_embeddings", "token_embeddings"}
)


class LogitsSelection:
    """Which positions [rows, n] of each row the output head computes; None computes all of them.

    `was_used` says whether a head ever read it: a swapped module may turn out not to be the model's head.
    """

    def __init__(self) -> None:
        self.at: mx.array | None = None
        self.width = 0
        """Tokens of a row in this pass. A head that the model's code calls for fewer at a time computes all of them."""
        self.was_used = False
        self.tapped_modules: tuple[str, ...] = ()
        """Modules whose inputs are the hidden states to capture, instead of the output head's."""
        self.captures_hidden = False
        self._captured: dict[str, mx.array] = {}

    @contextmanager
    def capturing_hidden(self) -> Iterator[None]:
        """While this is open, a forward pass leaves the hidden states of all tokens in `hidden`."""
        self.captures_hidden = True
        try:
            yield
        finally:
            self.captures_hidden, self._captured = False, {}

    @property
    def hidden(self) -> mx.array | None:
        """[rows, width, size], concatenated where several modules are tapped; None where none were captured."""
        parts = [self._captured[name] for name in self.tapped_modules or ("",) if name in self._captured]
        if len(parts) < max(1, len(self.tapped_modules)):
            return None
        return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=-1)

    def capture(self, name: str, states: mx.array) -> None:
        if self.captures_hidden:
            self._captured[name] = states

    def select(self, hidden: mx.array) -> mx.array:
        if not self.tapped_modules:
            self.capture("", hidden)
        if self.at is None or hidden.ndim != 3 or hidden.shape[1] != self.width:
            return hidden
        self.was_used = True
        return mx.take_along_axis(hidden, self.at[..., None], axis=1)


class _SelectsBeforeCall:
    selection: LogitsSelection

    def __call__(self, x: mx.array) -> mx.array:
        y: mx.array = super().__call__(self.selection.select(x))  # type: ignore[misc]
        return y


class _SelectsBeforeHead:
    selection: LogitsSelection

    def as_linear(self, x: mx.array) -> mx.array:
        y: mx.array = super().as_linear(self.selection.select(x))  # type: ignore[misc]
        return y


class _SelectsOutput:
    selection: LogitsSelection

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.selection.select(super().__call__(*args, **kwargs))  # type: ignore[misc]


_LINEAR = (nn.Linear, nn.QuantizedLinear, PackedLinear, DenseLinear, QuantizedKernelLinear, DenseKernelLinear)
_TIED = (
    nn.Embedding,
    nn.QuantizedEmbedding,
    PackedEmbedding,
    DenseEmbedding,
    QuantizedKernelEmbedding,
    DenseKernelEmbedding,
)
SELECTIVE_HEADS: dict[type, type] = {
    kind: type(f"Selective{kind.__name__}", (ours, kind), {})
    for ours, kinds in ((_SelectsBeforeCall, _LINEAR), (_SelectsBeforeHead, _TIED))
    for kind in kinds
}
KNOWN_HEADS = {*SELECTIVE_HEADS, *SELECTIVE_HEADS.values()}


def token_embedding_of(model: nn.Module) -> nn.Module | None:
    """The token embedding; None if the model has none that is known."""
    found = _only_module(model, TIED_HEAD_NAMES)
    return None if found is None else found[1]


def embedding_scale_of(model: nn.Module) -> float:
    """What the model multiplies embeddings by."""
    found = _only_module(model, TIED_HEAD_NAMES)
    outer = dict(model.named_modules())
    owner = None if found is None else outer.get(found[0].rpartition(".")[0])
    return float(getattr(owner, "embed_scale", 1.0))


class _EmbeddingWithFeatures:
    """Other vectors in the places of some tokens of a pass."""

    def __call__(self, ids: mx.array) -> mx.array:
        return self._put(super().__call__(ids))  # type: ignore[misc, attr-defined]


def embeddings_changed(model: nn.Module, put: Callable[[mx.array], mx.array]) -> AbstractContextManager[None]:
    """While this is open, the model's token embedding, which must be known, gives what `put` makes of it."""
    found = _only_module(model, TIED_HEAD_NAMES)
    assert found is not None, "a vision model's token embedding is known"
    return temporarily_extended(model, [found], type("Shown", (_EmbeddingWithFeatures,), {"_put": staticmethod(put)}))


class _NudgedEmbedding:
    """Moves embeddings a little."""

    def __call__(self, ids: mx.array) -> mx.array:
        return nudged_states(super().__call__(ids), self._by)  # type: ignore[misc, attr-defined]


def nudged_states(states: mx.array, by: float) -> mx.array:
    """Hidden states, each number off by this share of it."""
    signs = mx.where(mx.random.bernoulli(shape=states.shape[-1:], key=mx.random.key(11)), 1, -1)
    return states + states * signs.astype(states.dtype) * by


def nudged_embeddings(model: nn.Module, dtype: mx.Dtype) -> AbstractContextManager[None] | None:
    """While this is open, embeddings are off by one unit in the last place of `dtype`: the model's answer then shows
    how far rounding alone moves it. None where the embedding is not known."""
    found = _only_module(model, TIED_HEAD_NAMES)
    if found is None:
        return None
    nudged = type("Nudged", (_NudgedEmbedding,), {"_by": float(mx.finfo(dtype).eps)})
    return temporarily_extended(model, [found], nudged)


def lm_head_of(model: nn.Module) -> nn.Module | None:
    """The module that gives logits, which may be the embedding; None if the model has none that is known."""
    found = _find_lm_head(model)
    return None if found is None else found[1]


def _find_lm_head(model: nn.Module) -> tuple[str, nn.Module] | None:
    return _only_module(model, LM_HEAD_NAMES) or _only_module(model, TIED_HEAD_NAMES)


class _CapturesInput:
    selection: LogitsSelection
    path: str

    def __call__(self, x: mx.array, *args: Any, **kwargs: Any) -> Any:
        self.selection.capture(self.path, x)
        return super().__call__(x, *args, **kwargs)  # type: ignore[misc]


def tap_hidden_states(model: nn.Module, paths: Sequence[str], selection: LogitsSelection) -> None:
    """Swap the modules at `paths` for ones whose inputs are captured as hidden states."""
    modules = dict(model.named_modules())
    swapped = []
    for path in paths:
        tapped = extend(modules[path], _CapturesInput, "Tapped")
        tapped.selection, tapped.path = selection, path
        swapped.append((path, tapped))
    model.update_modules(tree_unflatten(swapped))
    selection.tapped_modules = tuple(paths)


def select_at_lm_head(model: nn.Module) -> LogitsSelection | None:
    """Swap the model's output head for one that computes only selected positions, or, if that is no module, what gives
    it its input; None if neither is known."""
    found = _find_lm_head(model)
    selection = LogitsSelection()
    if found is None:
        path, module = "model", model.get("model")
        if not isinstance(module, nn.Module) or not isinstance(model.get("lm_head"), mx.array):
            return None
        replacement = extend(module, _SelectsOutput, "Selective")
    else:
        (path, module), kind = found, type(found[1])
        replacement = adopt_module(module, SELECTIVE_HEADS.get(kind, kind))  # one swapped before keeps its kind
    replacement.selection = selection
    model.update_modules(tree_unflatten([(path, replacement)]))
    return selection


def _only_module(model: nn.Module, names: frozenset[str]) -> tuple[str, nn.Module] | None:
    """The one module with one of these names, or in such a module, if it is of a kind that can be an output head."""
    found = [
        (path, module)
        for path, module in model.named_modules()
        if not names.isdisjoint(path.rsplit(".", 2)[-2:]) and type(module) in KNOWN_HEADS
    ]
    return found[0] if len(found) == 1 else None
