"""Recurrent layers (gated delta nets, Mamba 2, short convolutions), each as one operation over all sequences of a
forward pass.

A step of theirs is dozens of small operations, each of which costs more to dispatch than to compute, and a prompt takes
as many steps as it has tokens. The modules here read and write the recurrent states in place, in mixed batches and
padded ones alike, by native kernels on CPUs and by those of GPUs. Without them, and for caches that are not ours, a
layer's own code runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from ingot.cache.forward_batch import ForwardBatch, MixedBatch, TokenSpan
from ingot.cache.layer_state import RecurrentState
from ingot.kernels.cpu import native
from ingot.kernels.measured import NOTHING_SLOWER, SlowerParts, native_recurrent_part
from ingot.kernels.recurrent.gated_delta import DeltaShape
from ingot.kernels.recurrent.kernels import RecurrentKernels, RecurrentSpans
from ingot.kernels.recurrent.mamba2 import Mamba2Shape
from ingot.kernels.recurrent.selfcheck import CheckedRecurrences, MixerShape
from ingot.kernels.recurrent.short_conv import ShortConvShape
from ingot.models.families.description import GatedDeltaSpec, Mamba2Spec, ShortConvSpec
from ingot.models.families.registry import recurrence_spec_of
from ingot.models.layers.gpu_linear import JoinedLinear, join_linears
from ingot.models.layers.modules import extend, measured_part, native_weights_of, swap_each
from ingot.models.lora.layers import LoraMapping


class _StatefulMixer(nn.Module):
    """Runs `_run` where a recurrent state is among the arguments, else the module that it extends."""

    def __call__(self, *args: Any, **kwargs: Any) -> mx.array:
        values = (*args, *kwargs.values())
        state = next((value for value in values if isinstance(value, RecurrentState)), None)
        if state is None:
            own: mx.array = super().__call__(*args, **kwargs)
            return own
        return self._run(values[0], state)

    def _run(self, x: mx.array, state: RecurrentState) -> mx.array:
        raise NotImplementedError


class NativeRecurrence(_StatefulMixer):
    """Computes what the recurrent mixer that it extends computes, natively."""

    _operation: Any
    _inputs: tuple[str, ...]  # the projections whose outputs the operation takes
    _state_shapes: tuple[tuple[int, ...], ...]  # of a slot
    _weights: tuple[list[Any], Any] | None  # of the input and output projections, where the operation does them too
    _lora_mapping: LoraMapping | None = None

    def _run(self, x: mx.array, state: RecurrentState) -> mx.array:
        state.returns_earlier_states = True
        y, *parts = self._advance(x, state.lend(*self._state_shapes), state.pieces, state.wanted)
        state.return_parts(parts)
        return y

    def _advance(self, x: mx.array, parts: list[mx.array], pieces: Sequence[TokenSpan], earlier: int) -> list[mx.array]:
        """The mixer's output, its state after that, and as many earlier ones."""
        if self._weights is not None and (self._lora_mapping is None or self._lora_mapping.opened is None):
            y, *parts = self._operation.through(x, *self._weights, *parts, pieces, earlier)
            return [y.astype(x.dtype), *parts]
        projected = {name: self[name](x) for name in dict.fromkeys(self._inputs)}
        y, *parts = self._operation(*(projected[name] for name in self._inputs), *parts, pieces, earlier)
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


def _native_mamba2(mixer: Any, spec: Mamba2Spec) -> NativeRecurrence:
    operation = native.mamba_scan(
        heads=mixer.num_heads,
        groups=mixer.n_groups,
        head_size=mixer.head_dim,
        state_size=mixer.ssm_state_size,
        dt_limit=tuple(mixer.time_step_limit),
        filter=mixer.conv1d.weight,
        filter_bias=mixer.conv1d.get("bias"),
        a_log=mixer.A_log,
        dt_bias=mixer.dt_bias,
        skip=mixer.D,
        **_mamba2_norm(mixer, spec),
    )
    state = (mixer.num_heads, mixer.head_dim, mixer.ssm_state_size)
    return _adopt_recurrence(mixer, ("in_proj",), operation, (_conv_tail_shape(mixer.conv1d), state))


def _mamba2_norm(mixer: Any, spec: Mamba2Spec) -> dict[str, Any]:
    if spec.normed is not None and not attrgetter(spec.normed)(mixer):
        return {"norm": None}
    return {
        "norm": mixer.norm.weight,
        "eps": attrgetter(spec.eps)(mixer),
        "norm_size": attrgetter(spec.norm_size)(mixer),
        "norm_first": spec.norm_first is not None and attrgetter(spec.norm_first)(mixer),
    }


def _short_convolution(mixer: Any) -> NativeRecurrence:
    operation = native.short_convolution(mixer.conv.weight, mixer.conv.get("bias"), gated=True)
    return _adopt_recurrence(mixer, ("in_proj",), operation, (_conv_tail_shape(mixer.conv),))


def _native_recurrence(mixer: Any, slower: SlowerParts) -> NativeRecurrence | None:
    spec = recurrence_spec_of(mixer)
    if spec is None or slower.leave_out(native_recurrent_part(_SHAPES[type(spec)])):
        return None
    if slower.leave_out(measured_part("recurrent mixer", mixer)):
        return None
    match spec:
        case GatedDeltaSpec(joint):
            return _joined_delta(mixer) if joint else _split_delta(mixer)
        case Mamba2Spec():
            return _native_mamba2(mixer, spec)
        case ShortConvSpec():
            return _short_convolution(mixer)


_SHAPES: dict[type, str] = {
    GatedDeltaSpec: DeltaShape.__name__,
    Mamba2Spec: Mamba2Shape.__name__,
    ShortConvSpec: ShortConvShape.__name__,
}


def swap_recurrences(model: nn.Module, slower: SlowerParts = NOTHING_SLOWER) -> int:
    """Swap every recurrent mixer that the native kernels compute; returns how many were swapped."""
    return swap_each(model, lambda module: _native_recurrence(module, slower)) if native.available() else 0


def _adopt_recurrence(
    mixer: Any, inputs: tuple[str, ...], operation: Any, state_shapes: tuple[tuple[int, ...], ...]
) -> NativeRecurrence:
    replacement: NativeRecurrence = extend(mixer, NativeRecurrence, "Native")
    replacement._operation, replacement._inputs, replacement._state_shapes = operation, inputs, state_shapes
    replacement._weights = _projection_weights(mixer, inputs)
    return replacement


def _projection_weights(mixer: Any, inputs: tuple[str, ...]) -> tuple[list[Any], Any] | None:
    modules = [mixer[name] for name in (*dict.fromkeys(inputs), "out_proj")]
    # Weights of another type would be held twice.
    if any(type(module) is nn.Linear and module.weight.dtype != mx.float32 for module in modules):
        return None
    *into, out = (native_weights_of(module) for module in modules)
    if out is None or None in into:
        return None
    by_name = dict(zip(dict.fromkeys(inputs), into, strict=True))
    return [by_name[name] for name in inputs], out


def _conv_tail_shape(convolution: Any) -> tuple[int, int]:
    channels, taps = convolution.weight.shape[:2]
    return taps - 1, channels


class KernelRecurrence(_StatefulMixer):
    """Computes what the recurrent mixer that it extends computes, by kernels of a GPU."""

    _kernels: RecurrentKernels
    _inputs: tuple[str, ...]  # the projections whose outputs, side by side, the kernels take
    joined_in: JoinedLinear | None  # these as one, where they are alike
    joined_out: JoinedLinear | None

    def _run(self, x: mx.array, state: RecurrentState) -> mx.array:
        flat = x.reshape(-1, x.shape[-1])
        states = state.in_place(*self._kernels.state_shapes)
        mixed, after = self._kernels.mix(self._project(flat), recurrent_spans(state.opened), states)
        if after:
            state.put_rows(after)
        project = self.out_proj if self.joined_out is None else self.joined_out
        projected: mx.array = project(mixed)
        return projected.reshape(x.shape)

    def _project(self, x: mx.array) -> mx.array:
        if self.joined_in is not None:
            return self.joined_in(x)
        return mx.concatenate([self[name](x) for name in self._inputs], axis=-1)


def recurrent_spans(opened: ForwardBatch | MixedBatch) -> RecurrentSpans:
    """The rows of a forward pass, the same for all layers."""
    if RECURRENT_SPANS not in opened.memo:
        opened.memo[RECURRENT_SPANS] = RecurrentSpans.of(opened.pieces)
    spans: RecurrentSpans = opened.memo[RECURRENT_SPANS]
    return spans


RECURRENT_SPANS = "recurrent spans"


class _KernelInputs(NamedTuple):
    """How kernels compute a mixer."""

    shape: MixerShape
    projections: tuple[str, ...]
    weights: dict[str, mx.array | None]
    options: dict[str, Any]


def kernel_recurrence(module: Any, kernels: CheckedRecurrences) -> KernelRecurrence | None:
    """The same by a GPU's kernels; None for other modules, and where the kernels are not correct for it."""
    found = _kernel_inputs(module)
    if found is None:
        return None
    weights = {name: weight for name, weight in found.weights.items() if weight is not None}
    made = kernels.of(found.shape, weights["filter"].dtype, weights, **found.options)
    if made is None:
        return None
    replacement: KernelRecurrence = extend(module, KernelRecurrence, "Kernel")
    replacement._kernels, replacement._inputs = made, found.projections
    projections = [module[name] for name in found.projections]
    replacement.joined_in = join_linears(*projections, names=found.projections)
    replacement.joined_out = join_linears(module.out_proj, names=["out_proj"])
    return replacement


def _kernel_inputs(mixer: Any) -> _KernelInputs | None:
    match recurrence_spec_of(mixer):
        case GatedDeltaSpec(joint):
            return _delta_inputs(mixer, interleaved=joint)
        case Mamba2Spec() as spec:
            return _mamba2_inputs(mixer, spec)
        case ShortConvSpec():
            (channels, taps), bias = mixer.conv.weight.shape[:2], mixer.conv.get("bias")
            weights = {"filter": mixer.conv.weight, "filter_bias": bias}
            return _KernelInputs(ShortConvShape(channels, taps, bias is not None), ("in_proj",), weights, {})
        case None:
            return None


def _delta_inputs(mixer: Any, *, interleaved: bool) -> _KernelInputs:
    sizes = mixer.num_k_heads, mixer.num_v_heads, mixer.head_k_dim, mixer.head_v_dim
    shape = DeltaShape(*sizes, mixer.conv1d.weight.shape[1], interleaved)
    split = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
    weights = {
        "filter": mixer.conv1d.weight,
        "a_log": mixer.A_log,
        "dt_bias": mixer.dt_bias,
        "norm": mixer.norm.weight,
    }
    projections = ("in_proj_qkvz", "in_proj_ba") if interleaved else split
    return _KernelInputs(shape, projections, weights, {"eps": float(mixer.norm.eps)})


def _mamba2_inputs(mixer: Any, spec: Mamba2Spec) -> _KernelInputs:
    norm, bias = _mamba2_norm(mixer, spec), mixer.conv1d.get("bias")
    shape = Mamba2Shape(
        mixer.num_heads,
        mixer.n_groups,
        mixer.head_dim,
        mixer.ssm_state_size,
        mixer.conv1d.weight.shape[1],
        norm.get("norm_size", 0),
        norm.get("norm_first", False),
        bias is not None,
    )
    weights = {
        "filter": mixer.conv1d.weight,
        "filter_bias": bias,
        "a_log": mixer.A_log,
        "dt_bias": mixer.dt_bias,
        "skip": mixer.D,
        "norm": norm["norm"],
    }
    least, most = mixer.time_step_limit
    options = {"dt_limit": (float(least), float(most)), "eps": float(norm.get("eps", 0.0))}
    return _KernelInputs(shape, ("in_proj",), weights, options)
