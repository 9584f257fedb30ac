"""Recurrent layers (gated delta nets, Mamba 2, short convolutions), each as one operation over all sequences of a
forward pass.

A step of them is dozens of small operations, each of which costs more to dispatch than to compute, and a prompt is as
many of them as it has tokens. What stands in here reads and writes the recurrent states in place, in mixed batches and
padded ones alike. CPUs use the native kernels; GPUs have kernels for gated delta nets. Without them, and for caches
that are not ours, a layer's own code runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

from ingot.cache.forward_batch import TokenSpan
from ingot.cache.layer_state import RecurrentState
from ingot.kernels.cpu import native
from ingot.kernels.gated_delta.kernels import DeltaKernels, DeltaShape, DeltaSpans
from ingot.kernels.gated_delta.selfcheck import CheckedDelta
from ingot.models.families.description import GatedDeltaSpec, Mamba2Spec, RecurrenceSpec, ShortConvSpec
from ingot.models.families.registry import recurrence_spec_of
from ingot.models.layers.modules import extend, native_weights_of
from ingot.models.lora.layers import LoraMapping


class NativeRecurrence(nn.Module):
    """Stands in for a recurrent mixer, which it extends."""

    _operation: Any
    _inputs: tuple[str, ...]  # the projections that make what the operation takes
    _rows: tuple[tuple[int, ...], ...]  # what a slot keeps
    _weights: tuple[list[Any], Any] | None  # of the projections before and behind it, where it can do them too
    _lora_mapping: LoraMapping | None = None

    def __call__(self, *given: Any, **named: Any) -> mx.array:
        values = (*given, *named.values())
        state = next((value for value in values if isinstance(value, RecurrentState)), None)
        if state is None:
            own: mx.array = super().__call__(*given, **named)
            return own
        x: mx.array = values[0]
        state.gives_earlier_states = True
        y, *parts = self._computed(x, state.lend(*self._rows), state.pieces, state.wanted)
        state.take_back_parts(parts)
        return y

    def _computed(
        self, x: mx.array, parts: list[mx.array], pieces: Sequence[TokenSpan], earlier: int
    ) -> list[mx.array]:
        """What the mixer gives, its state after that, and as many earlier ones."""
        if self._weights is not None and (self._lora_mapping is None or self._lora_mapping.opened is None):
            y, *parts = self._operation.through(x, *self._weights, *parts, pieces, earlier)
            return [y.astype(x.dtype), *parts]
        made = {name: self[name](x) for name in dict.fromkeys(self._inputs)}
        y, *parts = self._operation(*(made[name] for name in self._inputs), *parts, pieces, earlier)
        return [self.out_proj(y.astype(x.dtype)), *parts]


def _split_delta(mixer: Any) -> NativeRecurrence:
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
    return _native_delta(mixer, ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"), columns)


def _joined_delta(mixer: Any) -> NativeRecurrence:
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
    return _native_delta(mixer, ("in_proj_qkvz", "in_proj_qkvz", "in_proj_ba", "in_proj_ba"), columns)


def _native_delta(mixer: Any, inputs: tuple[str, ...], columns: dict[str, tuple[int, int, int]]) -> NativeRecurrence:
    operation = native.gated_delta_layer(
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
    return _adopt_recurrence(mixer, inputs, operation, (_conv_tail_shape(mixer.conv1d), state))


def _native_mamba2(mixer: Any, scan: Mamba2Spec) -> NativeRecurrence:
    operation = native.mamba_scan(
        heads=mixer.num_heads,
        groups=mixer.n_groups,
        head_size=mixer.head_dim,
        state_size=mixer.ssm_state_size,
        dt_limit=tuple(mixer.time_step_limit),
        filter=mixer.conv1d.weight,
        filter_bias=_conv_bias(mixer.conv1d),
        a_log=mixer.A_log,
        dt_bias=mixer.dt_bias,
        skip=mixer.D,
        **_mamba2_norm(mixer, scan),
    )
    state = (mixer.num_heads, mixer.head_dim, mixer.ssm_state_size)
    return _adopt_recurrence(mixer, ("in_proj",), operation, (_conv_tail_shape(mixer.conv1d), state))


def _mamba2_norm(mixer: Any, scan: Mamba2Spec) -> dict[str, Any]:
    if scan.normed is not None and not attrgetter(scan.normed)(mixer):
        return {"norm": None}
    return {
        "norm": mixer.norm.weight,
        "eps": attrgetter(scan.eps)(mixer),
        "norm_size": attrgetter(scan.norm_size)(mixer),
        "norm_first": scan.norm_first is not None and attrgetter(scan.norm_first)(mixer),
    }


def _short_convolution(mixer: Any) -> NativeRecurrence:
    operation = native.short_convolution(mixer.conv.weight, _conv_bias(mixer.conv), gated=True)
    return _adopt_recurrence(mixer, ("in_proj",), operation, (_conv_tail_shape(mixer.conv),))


def _native_recurrence(mixer: Any, recurrence: RecurrenceSpec) -> NativeRecurrence:
    match recurrence:
        case GatedDeltaSpec(joint):
            return _joined_delta(mixer) if joint else _split_delta(mixer)
        case Mamba2Spec():
            return _native_mamba2(mixer, recurrence)
        case ShortConvSpec():
            return _short_convolution(mixer)


def swap_recurrences(model: nn.Module) -> int:
    """Swap every recurrent mixer that the native kernels compute; returns how many were swapped."""
    if not native.available():
        return 0
    found = [(path, module, recurrence_spec_of(module)) for path, module in model.named_modules()]
    swapped = [(path, _native_recurrence(module, known)) for path, module, known in found if known is not None]
    model.update_modules(tree_unflatten(swapped))
    return len(swapped)


def _adopt_recurrence(
    mixer: Any, inputs: tuple[str, ...], operation: Any, rows: tuple[tuple[int, ...], ...]
) -> NativeRecurrence:
    taken: NativeRecurrence = extend(mixer, NativeRecurrence, "Native")
    taken._operation, taken._inputs, taken._rows = operation, inputs, rows
    taken._weights = _projection_weights(mixer, inputs)
    return taken


def _projection_weights(mixer: Any, inputs: tuple[str, ...]) -> tuple[list[Any], Any] | None:
    modules = [mixer[name] for name in (*dict.fromkeys(inputs), "out_proj")]
    # Weights of another type would be held twice.
    if any(type(module) is nn.Linear and module.weight.dtype != mx.float32 for module in modules):
        return None
    *into, out = (native_weights_of(module) for module in modules)
    if out is None or None in into:
        return None
    made = dict(zip(dict.fromkeys(inputs), into, strict=True))
    return [made[name] for name in inputs], out


def _conv_bias(convolution: nn.Module) -> mx.array | None:
    return convolution.get("bias")


def _conv_tail_shape(convolution: Any) -> tuple[int, int]:
    channels, taps = convolution.weight.shape[:2]
    return taps - 1, channels


DeltaProjections = tuple[mx.array, mx.array, mx.array, mx.array]


class KernelGatedDelta(nn.Module):
    """Stands in for a gated delta net, which it extends."""

    _kernels: DeltaKernels
    _joint: bool

    def __call__(self, *given: Any, **named: Any) -> mx.array:
        values = (*given, *named.values())
        state = next((value for value in values if isinstance(value, RecurrentState)), None)
        if state is None:
            own: mx.array = super().__call__(*given, **named)
            return own
        x: mx.array = values[0]
        heads, size, _ = self._kernels.shape.state
        channels, z, strengths, decays = (self._joined if self._joint else self._apart)(x)
        read = self._advanced(channels, strengths, decays, state)
        gated: mx.array = self.norm(read.reshape(*x.shape[:2], heads, size), z.reshape(*x.shape[:2], heads, size))
        projected: mx.array = self.out_proj(gated.reshape(*x.shape[:2], -1))
        return projected

    def _advanced(self, channels: mx.array, strengths: mx.array, decays: mx.array, state: RecurrentState) -> mx.array:
        """What all tokens read of their sequences' states, which move on."""
        shape, spans = self._kernels.shape, _delta_spans(state)
        channels, strengths, decays = (part.flatten(0, 1) for part in (channels, strengths, decays))
        tails, states = state.lend(shape.tail, shape.state)
        convolved = self._kernels.convolve(channels, spans, tails)
        read, _ = self._kernels.advance(convolved, decays, strengths, spans, states)
        state.take_back_parts([tails, states])
        return read

    def _apart(self, x: mx.array) -> DeltaProjections:
        return self.in_proj_qkv(x), self.in_proj_z(x), self.in_proj_b(x), self.in_proj_a(x)

    def _joined(self, x: mx.array) -> DeltaProjections:
        q, k, v, z, b, a = self.fix_query_key_value_ordering(self.in_proj_qkvz(x), self.in_proj_ba(x))
        return mx.concatenate([part.reshape(*x.shape[:2], -1) for part in (q, k, v)], axis=-1), z, b, a


def _delta_spans(state: RecurrentState) -> DeltaSpans:
    memo = state.opened.memo
    if "delta" not in memo:
        memo["delta"] = DeltaSpans.of(state.pieces)
    spans: DeltaSpans = memo["delta"]
    return spans


def kernel_gated_delta(module: Any, kernels: CheckedDelta) -> KernelGatedDelta | None:
    """The same by a GPU's kernels; None where it is something else, or where they are not right for it."""
    known = recurrence_spec_of(module)
    if not isinstance(known, GatedDeltaSpec):
        return None
    key_size, value_size = module.head_k_dim, module.head_v_dim
    taps = module.conv1d.weight.shape[1]
    found = kernels.of(
        DeltaShape(module.num_k_heads, module.num_v_heads, key_size, value_size, taps),
        module.conv1d.weight.dtype,
        filter=module.conv1d.weight,
        a_log=module.A_log,
        dt_bias=module.dt_bias,
    )
    if found is None:
        return None
    taken: KernelGatedDelta = extend(module, KernelGatedDelta, "Kernel")
    taken._kernels, taken._joint = found, known.joint
    return taken
