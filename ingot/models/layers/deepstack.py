"""Features that are added to hidden states behind a model's first layers, at the places of what is seen."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import mlx.core as mx
from mlx.utils import tree_unflatten

from ingot.models.layers.modules import adopt


class DeepStack:
    """What a forward pass adds behind its layers: nothing, but while `adding` is open."""

    def __init__(self) -> None:
        self._places: mx.array | None = None
        self._features: tuple[mx.array, ...] = ()

    @contextmanager
    def adding(self, places: mx.array, features: tuple[mx.array, ...]) -> Iterator[None]:
        """Behind layer i, features[i] [places, size] at those of the pass's tokens."""
        self._places, self._features = places, features
        try:
            yield
        finally:
            self._places, self._features = None, ()

    def added(self, layer: int, states: mx.array) -> mx.array:
        if self._places is None:
            return states
        flat = states.reshape(-1, states.shape[-1])
        return flat.at[self._places].add(self._features[layer].astype(states.dtype)).reshape(states.shape)


class _AddsBehind:
    _deep: DeepStack
    _number: int

    def __call__(self, *given: Any, **named: Any) -> mx.array:
        states: mx.array = super().__call__(*given, **named)  # type: ignore[misc]
        return self._deep.added(self._number, states)


@cache
def _extended(kind: type) -> type:
    """By the same name: what is known of the class holds as long as nothing is added."""
    return type(kind.__name__, (_AddsBehind, kind), {"__module__": kind.__module__})


def swap_first_layers(model: Any, count: int) -> DeepStack | None:
    """Swap the model's first layers for ones behind which features can be added; None where that are none."""
    if not count:
        return None
    deep = DeepStack()
    first = {id(layer): number for number, layer in enumerate(model.layers[:count])}
    swapped = []
    for path, module in model.named_modules():
        number = first.get(id(module))
        if number is not None:
            kind: type = type(module)
            layer = adopt(module, _extended(kind))
            layer._deep, layer._number = deep, number
            swapped.append((path, layer))
    model.update_modules(tree_unflatten(swapped))
    return deep
