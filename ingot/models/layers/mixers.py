"""A model's mixers: the modules that let a token see others of its sequence, and so take a cache.

They are what must know about mixed launches; everything else in a model treats tokens one by one. Attention that we
know computes them as a whole, and so do gated delta nets where a GPU has kernels for them. Any other mixer is run once
for each launch of a mixed one, by its own code.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

from ingot.cache.forward_batch import Mixed, Parted
from ingot.cache.layer_state import LayerState
from ingot.cache.positions import Positions
from ingot.kernels import native
from ingot.kernels.checked import CheckedKernels
from ingot.models.families.registry import recurrence_of, wiring_of
from ingot.models.layers.attention import MixedAttention, mixed_attention
from ingot.models.layers.attention_backends import Rotations
from ingot.models.layers.gated_delta import kernel_delta
from ingot.models.layers.modules import adopt, own_class, restored
from ingot.models.layers.rope import SharedRopes
from ingot.models.layers.turning import Turns
from ingot.models.lora.layers import Blend

_NOTHING = nullcontext()


class SplitMixer(nn.Module):
    """Takes mixed launches apart and has the module that it extends compute each of their launches."""

    _blend: Blend | None = None

    def __call__(self, *given: Any, **named: Any) -> Any:
        values = (*given, *named.values())
        state = next((value for value in values if isinstance(value, LayerState)), None)
        mixed = _mixed(state, values)
        if mixed is None:
            return super().__call__(*given, **named)
        outputs: list[Any] = []
        for number, part in enumerate(mixed.parts):
            before = outputs[-1:]
            own = [_own(value, mixed, number, before) for value in given]
            options = {name: _own(value, mixed, number, before) for name, value in named.items()}
            with nullcontext() if state is None else state.computing(part), self._adapted(*mixed.bounds[number]):
                outputs.append(super().__call__(*own, **options))
        return _joined(mixed, outputs)

    def _adapted(self, begin: int, end: int) -> AbstractContextManager[None]:
        return _NOTHING if self._blend is None else self._blend.within(begin, end)


def _mixed(state: LayerState | None, values: Iterable[Any]) -> Mixed | None:
    """The mixed launch that a mixer is called in; one that has no state of its own still knows it by its arguments."""
    if state is not None:
        return state.whole
    return next((value.mixed for value in values if isinstance(value, Parted)), None)


def _own(value: Any, mixed: Mixed, number: int, before: list[Any]) -> Any:
    """What of an argument concerns one launch, once the launch before has given what it gives."""
    if isinstance(value, Parted):
        return value.parts[number]
    if isinstance(value, Positions):
        return mixed.parts[number].offset
    if isinstance(value, mx.array) and value.shape[:2] == (1, mixed.tokens):
        taken = mixed.taken(number, value)
        # In order: states can only be written in place while nobody waits to read them.
        return mx.depends(taken, _first(before[0])) if before else taken
    return value


def _first(output: Any) -> mx.array:
    first: mx.array = output[0] if isinstance(output, tuple) else output
    return first


def _joined(mixed: Mixed, outputs: list[Any]) -> Any:
    """The tokens' states as one row again; what else a mixer gives is for other mixers, which take it apart again."""
    joined = mixed.joined([_first(output) for output in outputs])
    if not isinstance(outputs[0], tuple):
        return joined
    return joined, *(Parted(mixed, parts) for parts in list(zip(*outputs, strict=True))[1:])


@cache
def _split(kind: type) -> type:
    return type(f"Split{kind.__name__}", (SplitMixer, kind), {})


def mixers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The outermost modules inside the model's layers that take a cache, with their paths."""
    takers = [(path, module) for path, module in model.named_modules() if _INSIDE.match(path) and _takes_cache(module)]
    paths = {path for path, _ in takers}
    return [(path, module) for path, module in takers if not any(outer in paths for outer in _around(path))]


_INSIDE = re.compile(r".*\.\d+\.[^\d]")
"""Behind the number of a layer."""


def _takes_cache(module: nn.Module) -> bool:
    return "cache" in inspect.signature(type(module).__call__).parameters


def _around(path: str) -> Iterable[str]:
    names = path.split(".")
    return (".".join(names[:length]) for length in range(1, len(names)))


def swap_mixers(model: nn.Module, *, unfused: bool, kernels: CheckedKernels | None = None) -> int:
    """Swap every mixer of the model for one that understands mixed launches; returns how many were swapped."""
    found, ropes = mixers(model), SharedRopes() if unfused else None
    ragged = Rotations() if unfused and native.available() else None
    turns = None if kernels is None else Turns(kernels)
    swapped = [(path, _swapped(module, ropes, ragged, kernels, turns)) for path, module in found]
    model.update_modules(tree_unflatten(swapped))
    return len(found)


def split_mixers(model: nn.Module) -> None:
    """Swap every mixer of the model for its own code, run once for each launch of a mixed one."""
    model.update_modules(tree_unflatten([(path, adopt(each, _split(type(each)))) for path, each in mixers(model)]))


def unknown_mixers(model: nn.Module) -> list[str]:
    """The classes of attention that run mlx-lm's own code, of a model whose modules were swapped or will be."""
    split = [module for module in model.modules() if isinstance(module, SplitMixer)]
    left = [each for _, each in mixers(model) if type(each) is own_class(each) and wiring_of(each) is None]
    return sorted({own_class(each).__name__ for each in (*split, *left) if recurrence_of(restored(each)) is None})


def _swapped(
    module: nn.Module,
    ropes: SharedRopes | None,
    ragged: Rotations | None,
    kernels: CheckedKernels | None,
    turns: Turns | None,
) -> nn.Module:
    attention = mixed_attention(module, ropes, ragged, kernels, turns)
    if attention is not None:
        return attention
    recurrence = None if kernels is None else kernel_delta(module, kernels.delta)
    return adopt(module, _split(type(module))) if recurrence is None else recurrence


def tiled(model: nn.Module) -> bool:
    """Whether a swapped model's mixed launches never hold the scores of more than a tile where they are not fused."""
    swapped = [module for _, module in model.named_modules() if isinstance(module, MixedAttention | SplitMixer)]
    return bool(swapped) and all(isinstance(module, MixedAttention) for module in swapped)
