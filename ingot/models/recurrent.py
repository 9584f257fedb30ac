"""Recurrent mixers on CPUs: what they do between their projections, as one native operation over all slots.

A step of them is dozens of small operations, each of which costs more to dispatch than to compute, and a prompt is as
many of them as it has tokens. What stands in here reads and writes the live states in place, in mixed launches and
padded ones alike. Without the native kernels, and for caches that are not ours, a mixer's own code runs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

from ingot.cache.layers import RecurrentState
from ingot.kernels import native
from ingot.models.modules import adopt


class NativeMixer(nn.Module):
    """Stands in for a recurrent mixer, which it extends."""

    _operation: Any
    _rows: tuple[tuple[int, ...], ...]  # what a slot keeps

    def __call__(self, *given: Any, **named: Any) -> mx.array:
        values = (*given, *named.values())
        state = next((value for value in values if isinstance(value, RecurrentState)), None)
        if state is None:
            own: mx.array = super().__call__(*given, **named)
            return own
        x: mx.array = values[0]
        parts = state.lend(*self._rows)
        y, *parts = self._operation(*self._projected(x), *parts, state.pieces)
        state.regain(parts)
        out: mx.array = self.out_proj(y.astype(x.dtype))
        return out

    def _projected(self, x: mx.array) -> tuple[mx.array, ...]:
        """What the operation takes besides the state."""
        return (self.in_proj(x),)


class SplitDelta(NativeMixer):
    """Gated delta with a projection for each of its inputs."""

    def _projected(self, x: mx.array) -> tuple[mx.array, ...]:
        return self.in_proj_qkv(x), self.in_proj_z(x), self.in_proj_b(x), self.in_proj_a(x)


class JoinedDelta(NativeMixer):
    """Gated delta whose projections give, for each key head, all that belongs to it."""

    def _projected(self, x: mx.array) -> tuple[mx.array, ...]:
        both, gates = self.in_proj_qkvz(x), self.in_proj_ba(x)
        return both, both, gates, gates


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
    return _delta(mixer, SplitDelta, columns)


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
    return _delta(mixer, JoinedDelta, columns)


def _delta(mixer: Any, kind: type[NativeMixer], columns: dict[str, tuple[int, int, int]]) -> NativeMixer:
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
    return _taken(mixer, kind, operation, (_tail(mixer.conv1d), state))


def _scan(mixer: Any, **norm: Any) -> NativeMixer:
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
        **norm,
    )
    state = (mixer.num_heads, mixer.head_dim, mixer.ssm_state_size)
    return _taken(mixer, NativeMixer, operation, (_tail(mixer.conv1d), state))


def _scan_normed(mixer: Any) -> NativeMixer:
    norm = mixer.norm
    return _scan(mixer, norm=norm.weight, eps=norm.eps, norm_size=mixer.intermediate_size)


def _scan_normed_in_groups(mixer: Any) -> NativeMixer:
    norm = mixer.norm
    return _scan(mixer, norm=norm.weight, eps=norm.eps, norm_size=norm.group_size)


def _falcon(mixer: Any) -> NativeMixer:
    if not mixer.mamba_rms_norm:
        return _scan(mixer, norm=None)
    norm = mixer.norm
    return _scan(
        mixer,
        norm=norm.weight,
        eps=norm.variance_epsilon,
        norm_size=mixer.intermediate_size,
        norm_first=norm.norm_before_gate,
    )


def _short_convolution(mixer: Any) -> NativeMixer:
    operation = native.convolution(mixer.conv.weight, _bias(mixer.conv), gated=True)
    return _taken(mixer, NativeMixer, operation, (_tail(mixer.conv),))


MIXERS: dict[str, Callable[[Any], NativeMixer]] = {
    "qwen3_5.GatedDeltaNet": _split_delta,
    "qwen3_next.Qwen3NextGatedDeltaNet": _joined_delta,
    "mamba2.Mamba2Block": _scan_normed,
    "granitemoehybrid.GraniteMoeHybridMamba2Mixer": _scan_normed,
    "nemotron_h.NemotronHMamba2Mixer": _scan_normed_in_groups,
    "falcon_h1.FalconH1Mixer": _falcon,
    "lfm2.ShortConv": _short_convolution,
    "lfm2_moe.ShortConv": _short_convolution,
}
"""Classes whose arithmetic the native kernels know, by module and name."""


def swap_recurrences(model: nn.Module) -> int:
    """Swap every recurrent mixer that the native kernels compute; returns how many were swapped."""
    if not native.available():
        return 0
    found = [(path, module) for path, module in model.named_modules() if _name(module) in MIXERS]
    model.update_modules(tree_unflatten([(path, MIXERS[_name(module)](module)) for path, module in found]))
    return len(found)


def _name(module: nn.Module) -> str:
    kind = type(module)
    return f"{kind.__module__.rsplit('.', 1)[-1]}.{kind.__name__}"


def _taken(mixer: Any, kind: type[NativeMixer], operation: Any, rows: tuple[tuple[int, ...], ...]) -> NativeMixer:
    theirs: type[nn.Module] = type(mixer)
    taken: NativeMixer = adopt(mixer, _extended(kind, theirs))
    taken._operation = operation
    taken._rows = rows
    return taken


@cache
def _extended(ours: type[nn.Module], theirs: type[nn.Module]) -> type:
    return type(f"{ours.__name__}{theirs.__name__}", (ours, theirs), {})


def _bias(convolution: nn.Module) -> mx.array | None:
    return convolution.get("bias")


def _tail(convolution: Any) -> tuple[int, int]:
    channels, taps = convolution.weight.shape[:2]
    return taps - 1, channels
