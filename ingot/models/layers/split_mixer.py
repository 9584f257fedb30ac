"""Mixers of a library's, which compute the parts of a mixed batch one after another.

Where each row has caches of the library's own, only that which needs them is computed so: projections and norms of a
mixer's inputs, and the projection that it ends in, read their weights once for all rows (`TokenShares`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

from ingot.cache.forward_batch import MixedBatch, PerBatch, TokenPositions
from ingot.cache.layer_state import LayerState
from ingot.cache.own_caches import CachePerRow
from ingot.models.layers.decoder import ROW_ARGUMENTS
from ingot.models.layers.modules import extend
from ingot.models.lora.layers import LoraMapping

_NO_CONTEXT = nullcontext()
_BY_TOKEN = (nn.Linear, nn.QuantizedLinear, nn.RMSNorm, nn.LayerNorm)


class TokenShares:
    """One call of a mixer over a mixed batch of one row a part. Arrays that hold all tokens are known by the shares of
    them that parts were given, and so is what modules that treat tokens one by one make of these: the first part's call
    computes all tokens, and every part gets its share."""

    def __init__(self, mixed: MixedBatch, *, upright: bool) -> None:
        """`upright`: tokens are rows of one token each."""
        self.part = 0
        """The one that is being computed."""
        self._axis, self._ends = (0 if upright else 1), [end for _, end in mixed.bounds[:-1]]
        self._widths = [part.width for part in mixed.parts]
        self._wholes: dict[int, tuple[mx.array, mx.array]] = {}  # by a share's id: it and all tokens
        self._computed: dict[tuple[int, int], Sequence[mx.array]] = {}  # by a module's id and that of all tokens
        self._outputs: dict[int, tuple[mx.array, TokenModule, mx.array]] = {}  # by its id: what made it of what

    def of(self, whole: mx.array) -> Sequence[mx.array]:
        """The parts' shares of all tokens."""
        shares: Sequence[mx.array] = [*mx.split(whole, self._ends, axis=self._axis)]
        self._wholes |= {id(share): (share, whole) for share in shares}
        return shares

    def call(self, module: TokenModule, x: mx.array) -> mx.array:
        """What a module makes of `x`: where this is a share, its share of what the module makes of all tokens."""
        _, whole = self._wholes.get(id(x), (x, None))
        if whole is None:
            output = module.computed(x)
            self._outputs[id(output)] = (output, module, x)
            return output
        key = id(module), id(whole)
        if key not in self._computed:
            self._computed[key] = self.of(module.computed(whole))
        return self._computed[key][self.part]

    def joined(self, outputs: Sequence[mx.array]) -> mx.array:
        """The parts' outputs, for all tokens. What one module made of each is made again, of all at once: nothing of
        the former was computed yet."""
        made = [self._outputs.get(id(output)) for output in outputs]
        modules = {id(each[1]) for each in made if each is not None}
        shapes = [None if each is None else each[2].shape[:-1] for each in made]
        if made[0] is None or len(modules) > 1 or shapes != [(1, width) for width in self._widths]:
            return mx.concatenate([*outputs], axis=self._axis)
        return made[0][1].computed(mx.concatenate([each[2] for each in made if each is not None], axis=self._axis))


class OpenShares:
    """Those of the call that is open of a mixer, which its modules find here."""

    shares: TokenShares | None = None


class TokenModule(nn.Module):
    """A module inside a mixer that treats tokens one by one."""

    _open: OpenShares

    def computed(self, x: mx.array) -> mx.array:
        output: mx.array = super().__call__(x)
        return output

    def __call__(self, x: mx.array) -> mx.array:
        shares = self._open.shares
        return self.computed(x) if shares is None else shares.call(self, x)


def share_tokens(model: nn.Module) -> None:
    """Have modules inside mixers that treat tokens one by one compute all rows at once. The mixers were swapped, and
    rows have caches of their own."""
    for mixer in [module for _, module in model.named_modules() if isinstance(module, SplitMixer)]:
        mixer._open = OpenShares()
        inside = [(path, module) for path, module in mixer.named_modules() if isinstance(module, _BY_TOKEN)]
        swapped = [(path, extend(module, TokenModule, "Shared")) for path, module in inside]
        for _, module in swapped:
            module._open = mixer._open
        mixer.update_modules(tree_unflatten(swapped))


class SplitMixer(nn.Module):
    """Splits mixed batches and has the module that it extends compute each of their parts."""

    _lora_mapping: LoraMapping | None = None
    _open: OpenShares | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        values = (*args, *kwargs.values())
        rows = next((value for value in values if isinstance(value, CachePerRow)), None)
        if rows is not None:
            return self._compute_rows(rows.mixed, args, kwargs)
        state = next((value for value in values if isinstance(value, LayerState)), None)
        mixed = _mixed_batch_of(state, values)
        if mixed is None:
            return super().__call__(*args, **kwargs)
        outputs: list[Any] = []
        for number, part in enumerate(mixed.parts):
            before = outputs[-1:]
            own = [_part_of_argument(value, mixed, number, before) for value in args]
            options = {name: _part_of_argument(value, mixed, number, before) for name, value in kwargs.items()}
            with nullcontext() if state is None else state.computing(part), self._loras_of(*mixed.bounds[number]):
                outputs.append(super().__call__(*own, **options))
        return _join_outputs(mixed, outputs, mixed.joined)

    def _compute_rows(self, mixed: MixedBatch, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Each row with its own cache, and what needs none for all at once."""
        given = mixed.memo.get(ROW_ARGUMENTS, {})
        named = {name: given.get(name, value) for name, value in kwargs.items()}
        upright = any(_is_upright(value, mixed) for value in (*args, *named.values()))
        shares = TokenShares(mixed, upright=upright)
        split = [_row_arguments(value, mixed, shares) for value in args]
        options = {name: _row_arguments(value, mixed, shares) for name, value in named.items()}
        outputs: list[Any] = []
        if self._open is not None:
            self._open.shares = shares
        try:
            for shares.part, bounds in enumerate(mixed.bounds):
                with self._loras_of(*bounds):
                    own = [each[shares.part] for each in split]
                    outputs.append(
                        super().__call__(*own, **{name: each[shares.part] for name, each in options.items()})
                    )
            if self._open is not None:
                self._open.shares = None
            return _join_outputs(mixed, outputs, shares.joined)
        finally:
            if self._open is not None:
                self._open.shares = None

    def _loras_of(self, begin: int, end: int) -> AbstractContextManager[None]:
        return _NO_CONTEXT if self._lora_mapping is None else self._lora_mapping.within(begin, end)


def _row_arguments(value: Any, mixed: MixedBatch, shares: TokenShares) -> Sequence[Any]:
    """An argument for each row."""
    if isinstance(value, CachePerRow):
        return value.own
    if isinstance(value, PerBatch):
        return value.parts
    if isinstance(value, dict):
        return _dicts_of_rows(value, mixed)
    if isinstance(value, mx.array) and (_is_upright(value, mixed) or value.shape[:2] == (1, mixed.tokens)):
        return shares.of(value)
    return [value] * len(mixed.parts)


def _is_upright(value: Any, mixed: MixedBatch) -> bool:
    """Whether its rows are of one token each."""
    return isinstance(value, mx.array) and value.shape[:2] == (mixed.tokens, 1)


def _dicts_of_rows(shared: dict[Any, Any], mixed: MixedBatch) -> Sequence[dict[Any, Any]]:
    """What layers tell later ones by a dict: one for each row, from the first mixer that is given it on."""
    kept = mixed.memo.setdefault(("dict", id(shared)), (shared, [dict(shared) for _ in mixed.parts]))
    rows: Sequence[dict[Any, Any]] = kept[1]
    return rows


def _mixed_batch_of(state: LayerState | None, values: Iterable[Any]) -> MixedBatch | None:
    """The mixed batch that a mixer is called in; one that has no state of its own finds it in its arguments."""
    if state is not None:
        return state.whole
    return next((value.mixed for value in values if isinstance(value, PerBatch)), None)


def _part_of_argument(value: Any, mixed: MixedBatch, number: int, before: list[Any]) -> Any:
    """A part's share of an argument, once the part before has been computed."""
    if isinstance(value, PerBatch):
        return value.parts[number]
    if isinstance(value, TokenPositions):
        return mixed.parts[number].offset
    if isinstance(value, mx.array) and value.shape[:2] == (1, mixed.tokens):
        tokens = mixed.taken(number, value)
        # In order: states can only be written in place while nobody waits to read them.
        return mx.depends(tokens, _first_output(before[0])) if before else tokens
    if isinstance(value, mx.array) and value.shape[:3] == (1, 1, mixed.tokens):  # factors of tokens, for all heads
        return mixed.taken(number, value[0])[:, None]
    return value


def _first_output(output: Any) -> mx.array:
    first: mx.array = output[0] if isinstance(output, tuple) else output
    return first


def _join_outputs(mixed: MixedBatch, outputs: list[Any], join: Callable[[Sequence[mx.array]], mx.array]) -> Any:
    """The tokens' states together again; a mixer's further outputs are for other mixers, which split them again."""
    joined = join([_first_output(output) for output in outputs])
    if not isinstance(outputs[0], tuple):
        return joined
    return joined, *(PerBatch(mixed, parts) for parts in list(zip(*outputs, strict=True))[1:])
