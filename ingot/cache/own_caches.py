"""Live states of models whose caches are of a kind that ours cannot stand in for: each row has the model's own caches.

Such a model's mixers compute one row at a time, over caches that its own code made; everything around them computes all
rows of a mixed batch at once. A checkpoint is a copy of everything that a cache holds: its arrays, behind a description
of how they hang together. Only the engine thread may call anything here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from ingot.cache.arrays import copy_array
from ingot.cache.forward_batch import ForwardBatch, MixedBatch, PerBatch
from ingot.cache.layer_state import RecurrentState

_ARRAY, _OBJECT, _TUPLE, _KEPT = "array", "object", "tuple", "kept"
_FIXED_SIZE = (bool, int, float, str, type(None))
_BEGUN = "own caches"
"""In a batch's memo, once its row has new caches if it begins."""


class RowCaches:
    """The caches of all layers, by the slots of rows."""

    def __init__(self, make: Callable[[], Sequence[Any]]) -> None:
        self._make, self._rows = make, dict[int, Sequence[Any]]()

    def of(self, slot: int, *, anew: bool = False) -> Sequence[Any]:
        if anew or slot not in self._rows:
            self._rows[slot] = self._make()
        return self._rows[slot]

    def opened(self, batch: ForwardBatch) -> Sequence[Any]:
        """Those of the only row of a batch that is being computed: new ones for a row that begins."""
        assert batch.count == 1, "these caches hold one row each"
        begins = batch.starts == (0,) and _BEGUN not in batch.memo
        batch.memo[_BEGUN] = True
        return self.of(batch.rows[0].slot, anew=begins)

    def drop(self, slot: int) -> None:
        self._rows.pop(slot, None)

    def clear(self) -> None:
        self._rows.clear()

    def each(self, layer: int) -> Iterator[Any]:
        return (caches[layer] for caches in self._rows.values())


class OwnCacheState(RecurrentState):
    """A layer of such a model."""

    def __init__(self, rows: RowCaches, layer: int) -> None:
        super().__init__(0)
        self._rows, self._layer = rows, layer

    @property
    def as_cache(self) -> Any:
        """The open row's own cache, or those of a mixed batch's rows."""
        if self.whole is None:
            return self._rows.opened(self.open_batch)[self._layer]
        return CachePerRow(self.whole, [self._rows.opened(part)[self._layer] for part in self.whole.parts])

    @property
    def slot_bytes(self) -> int:
        """Of the longest row."""
        return max(
            (sum(array.nbytes for array in _arrays_in(cache)) for cache in self._rows.each(self._layer)), default=0
        )

    def resize(self, slots: int) -> None:
        pass

    def leave(self, slot: int) -> None:
        self._rows.drop(slot)

    def free(self) -> None:
        self._rows.clear()

    def arrays(self) -> list[mx.array]:
        return [array for cache in self._rows.each(self._layer) for array in _arrays_in(cache)]

    def row(self, slot: int) -> list[mx.array | None]:
        arrays: list[mx.array] = []
        described = json.dumps(_describe(self._rows.of(slot)[self._layer], arrays)).encode()
        return [mx.array(np.frombuffer(described, np.uint8)), *map(copy_array, arrays)]

    def put(self, slot: int, parts: Sequence[mx.array | None]) -> None:
        described, *arrays = parts
        if self._layer == 0:
            self._rows.of(slot, anew=True)
        caches = self._rows.of(slot)
        own = json.loads(np.asarray(described).tobytes())
        _restore(own, [None if array is None else copy_array(array) for array in arrays], caches[self._layer])


@dataclass(frozen=True)
class NumberPerRow(PerBatch):
    """A number of each row. Code that needs one before its layers run has the first row's."""

    def __int__(self) -> int:
        return int(self.parts[0])


class CachePerRow:
    """A layer's caches in a mixed batch, one for each row, which are parts of their own. Mixers are given their row's.
    What a model's code asks of a cache before that: masks and numbers are for each row, all else is the first row's."""

    def __init__(self, mixed: MixedBatch, caches: Sequence[Any]) -> None:
        self.mixed, self.own = mixed, caches

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """That of the rows' caches, as models tell caches by their classes."""
        return type(self.own[0])

    def make_mask(self, width: int, *args: Any, **kwargs: Any) -> PerBatch | None:
        caches = zip(self.mixed.parts, self.own, strict=True)
        masks = tuple(cache.make_mask(part.width, *args, **kwargs) for part, cache in caches)
        return None if all(mask is None for mask in masks) else PerBatch(self.mixed, masks)

    def __getitem__(self, index: int) -> CachePerRow:
        return CachePerRow(self.mixed, [cache.caches[index] for cache in self.own])

    def __getattr__(self, name: str) -> Any:
        values = [getattr(cache, name) for cache in self.own]
        if all(type(value) is int for value in values) and len(set(values)) > 1:
            return NumberPerRow(self.mixed, tuple(values))
        return values[0]


def _arrays_in(value: Any) -> list[mx.array]:
    arrays: list[mx.array] = []
    _describe(value, arrays)
    return arrays


def _describe(value: Any, arrays: list[mx.array]) -> Any:
    """`value` as JSON, with its arrays by their numbers among `arrays`; what is neither data nor has any is the same in
    every such cache."""
    if isinstance(value, mx.array):
        arrays.append(value)
        return {_ARRAY: len(arrays) - 1}
    if isinstance(value, _FIXED_SIZE):
        return value
    if isinstance(value, list | tuple):
        items = [_describe(item, arrays) for item in value]
        return {_TUPLE: items} if isinstance(value, tuple) else items
    if hasattr(value, "__dict__") and not callable(value):
        return {_OBJECT: {name: _describe(each, arrays) for name, each in vars(value).items()}}
    return {_KEPT: None}


def _restore(described: Any, arrays: Sequence[mx.array | None], like: Any) -> Any:
    """What was described, in `like`, which a new cache has in its place, where that is an object."""
    if isinstance(described, list):
        olds = like if isinstance(like, list) else []
        return [
            _restore(item, arrays, olds[number] if number < len(olds) else None)
            for number, item in enumerate(described)
        ]
    if not isinstance(described, dict):
        return described
    [(kind, inside)] = described.items()
    if kind == _ARRAY:
        return arrays[inside]
    if kind == _TUPLE:
        return tuple(_restore(inside, arrays, list(like) if isinstance(like, tuple) else None))
    if kind == _OBJECT:
        for name, each in inside.items():
            vars(like)[name] = _restore(each, arrays, vars(like).get(name))
    return like
