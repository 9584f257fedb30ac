"""Recurrent mixers on CPUs, each as one native operation over all slots.

A step of them is dozens of small operations, each of which costs more to dispatch than to compute, and a prompt is as
many of them as it has tokens. What stands in here reads and writes the live states in place, in mixed launches and
padded ones alike. Without the native kernels, and for caches that are not ours, a mixer's own code runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from operator import attrgetter
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

from ingot.cache.forward_batch import LaunchSpan
from ingot.cache.recurrent_state import RecurrentState
from ingot.kernels import native
from ingot.models.families.description import GatedDelta, Recurrence, Scan, ShortConvolution
from ingot.models.families.registry import recurrence_of
from ingot.models.layers.modules import adopt, weights_of
from ingot.models.lora.layers import Blend


class NativeMixer(nn.Module):
    """Stands in for a recurrent mixer, which it extends."""

    _operation: Any
    _inputs: tuple[str, ...]  # the projections that make what the operation takes
    _rows: tuple[tuple[int, ...], ...]  # what a slot keeps
    _weights: tuple[list[Any], Any] | None  # of the projections before and behind it, where it can do them too
    _blend: Blend | None = None

    def __call__(self, *given: Any, **named: Any) -> mx.array:
        values = (*given, *named.values())
        state = next((value for value in values if isinstance(value, RecurrentState)), None)
        if state is None:
            own: mx.array = super().__call__(*given, **named)
            return own
        x: mx.array = values[0]
        state.goes_back = True
        y, *parts = self._computed(x, state.lend(*self._rows), state.pieces, state.wanted)
        state.regain(parts)
        return y

    def _computed(
        self, x: mx.array, parts: list[mx.array], pieces: Sequence[LaunchSpan], earlier: int
    ) -> list[mx.array]:
        """What the mixer gives, its state after that, and as many earlier ones."""
        if self._weights is not None and (self._blend is None or self._blend.opened is None):
            y, *parts = self._operation.through(x, *self._weights, *parts, pieces, earlier)
            return [y.astype(x.dtype), *parts]
        made = {name: self[name](x) for name in dict.fromkeys(self._inputs)}
        y, *parts = self._operation(*(made[name] for name in self._inputs), *parts, pieces, earlier)
        return [self.out_proj(y.astype(x.dtype)), *parts]


def _split_delta(mixer: Any) -> NativeMixer:
    heads = mixer.num_v_heads // mixer.num_k_heads
    key, value = mixer.head_k_dim, mixer.head_v_dim
    columns = {
        "q": (0, 0, key),
        "k": (mixer.key_dim, 0, key),
        "v": (2 * mixer.key_dim, value, heads * value),
        "z": (0, value, heads * value),
        "b": (0, 1, heads),
        "a": (0, 1, heads),
    }
    return _delta(mixer, ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"), columns)


def _joined_delta(mixer: Any) -> NativeMixer:
    heads = mixer.num_v_heads // mixer.num_k_heads
    key, value = mixer.head_k_dim, mixer.head_v_dim
    group = 2 * (key + heads * value)
    columns = {
        "q": (0, 0, group),
        "k": (key, 0, group),
        "v": (2 * key, value, group),
        "z": (2 * key + heads * value, value, group),
        "b": (0, 1, 2 * heads),
        "a": (heads, 1, 2 * heads),
    }
    return _delta(mixer, ("in_proj_qkvz", "in_proj_qkvz", "in_proj_ba", "in_proj_ba"), columns)


def _delta(mixer: Any, inputs: tuple[str, ...], columns: dict[str, tuple[int, int, int]]) -> NativeMixer:
    operation = native.gated_delta(
        key_heads=mixer.num_k_heads,
        value_heads=mixer.num_v_heads,
        key_size=mixer.head_k_dim,
        value_size=mixer.head_v_dim,
        eps=mixer.norm.eps,
        columns=columns,
        filter=mixer.conv1d.weight,
        a_log=mixer.A_log,
        dt_bias=mixer.dt_bias,
        norm=mixer.norm.weight,
    )
    state = (mixer.num_v_heads, mixer.head_v_dim, mixer.head_k_dim)
    return _taken(mixer, inputs, operation, (_tail(mixer.conv1d), state))


def _scan(mixer: Any, scan: Scan) -> NativeMixer:
    operation = native.scan(
        heads=mixer.num_heads,
        groups=mixer.n_groups,
        head_size=mixer.head_dim,
        state_size=mixer.ssm_state_size,
        dt_limit=tuple(mixer.time_step_limit),
        filter=mixer.conv1d.weight,
        filter_bias=_bias(mixer.conv1d),
        a_log=mixer.A_log,
        dt_bias=mixer.dt_bias,
        skip=mixer.D,
        **_scan_norm(mixer, scan),
    )
    state = (mixer.num_heads, mixer.head_dim, mixer.ssm_state_size)
    return _taken(mixer, ("in_proj",), operation, (_tail(mixer.conv1d), state))


def _scan_norm(mixer: Any, scan: Scan) -> dict[str, Any]:
    if scan.normed is not None and not attrgetter(scan.normed)(mixer):
        return {"norm": None}
    return {
        "norm": mixer.norm.weight,
        "eps": attrgetter(scan.eps)(mixer),
        "norm_size": attrgetter(scan.norm_size)(mixer),
        "norm_first": scan.norm_first is not None and attrgetter(scan.norm_first)(mixer),
    }


def _short_convolution(mixer: Any) -> NativeMixer:
    operation = native.convolution(mixer.conv.weight, _bias(mixer.conv), gated=True)
    return _taken(mixer, ("in_proj",), operation, (_tail(mixer.conv),))


def _native(mixer: Any, recurrence: Recurrence) -> NativeMixer:
    match recurrence:
        case GatedDelta(joint):
            return _joined_delta(mixer) if joint else _split_delta(mixer)
        case Scan():
            return _scan(mixer, recurrence)
        case ShortConvolution():
            return _short_convolution(mixer)


def swap_recurrences(model: nn.Module) -> int:
    """Swap every recurrent mixer that the native kernels compute; returns how many were swapped."""
    if not native.available():
        return 0
    found = [(path, module, recurrence_of(module)) for path, module in model.named_modules()]
    swapped = [(path, _native(module, known)) for path, module, known in found if known is not None]
    model.update_modules(tree_unflatten(swapped))
    return len(swapped)


def _taken(mixer: Any, inputs: tuple[str, ...], operation: Any, rows: tuple[tuple[int, ...], ...]) -> NativeMixer:
    theirs: type[nn.Module] = type(mixer)
    taken: NativeMixer = adopt(mixer, _extended(theirs))
    taken._operation, taken._inputs, taken._rows = operation, inputs, rows
    taken._weights = _weights(mixer, inputs)
    return taken


def _weights(mixer: Any, inputs: tuple[str, ...]) -> tuple[list[Any], Any] | None:
    modules = [mixer[name] for name in (*dict.fromkeys(inputs), "out_proj")]
    # Weights of another type would be held twice.
    if any(type(module) is nn.Linear and module.weight.dtype != mx.float32 for module in modules):
        return None
    *into, out = (weights_of(module) for module in modules)
    if out is None or None in into:
        return None
    made = dict(zip(dict.fromkeys(inputs), into, strict=True))
    return [made[name] for name in inputs], out


@cache
def _extended(theirs: type[nn.Module]) -> type:
    return type(f"Native{theirs.__name__}", (NativeMixer, theirs), {})


def _bias(convolution: nn.Module) -> mx.array | None:
    return convolution.get("bias")


def _tail(convolution: Any) -> tuple[int, int]:
    channels, taps = convolution.weight.shape[:2]
    return taps - 1, channels
