"""Recurrent layers (gated delta nets, Mamba 2, short convolutions), each as one operation over all sequences of a
forward pass.

A step of theirs is dozens of small operations, each of which costs more to dispatch than to compute, and a prompt takes
as many steps as it has tokens. The modules here read and write the recurrent states in place, in mixed batches and
padded ones alike. CPUs use the native kernels; GPUs have kernels for gated delta nets. Without them, and for caches
that are not ours, a layer's own code runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ingot.cache.forward_batch import ForwardBatch, MixedBatch, TokenSpan
from ingot.cache.layer_state import RecurrentState
from ingot.kernels.cpu import native
from ingot.kernels.gated_delta.kernels import DeltaKernels, DeltaShape, DeltaSpans
from ingot.kernels.gated_delta.selfcheck import CheckedDelta
from ingot.models.families.description import GatedDeltaSpec, Mamba2Spec, ShortConvSpec
from ingot.models.families.registry import recurrence_spec_of
from ingot.models.layers.gpu_linear import JoinedLinear, can_join_linears, join_linears
from ingot.models.layers.modules import extend, native_weights_of, swap_each
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


def _native_recurrence(mixer: Any) -> NativeRecurrence | None:
    match recurrence_spec_of(mixer):
        case GatedDeltaSpec(joint):
            return _joined_delta(mixer) if joint else _split_delta(mixer)
        case Mamba2Spec() as spec:
            return _native_mamba2(mixer, spec)
        case ShortConvSpec():
            return _short_convolution(mixer)
        case None:
            return None


def swap_recurrences(model: nn.Module) -> int:
    """Swap every recurrent mixer that the native kernels compute; returns how many were swapped."""
    return swap_each(model, _native_recurrence) if native.available() else 0


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


DELTA_PROJECTIONS = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")


class KernelGatedDelta(_StatefulMixer):
    """Computes what the gated delta net that it extends computes, by kernels of a GPU."""

    _kernels: DeltaKernels
    joined_in: JoinedLinear | None  # the projections of `DELTA_PROJECTIONS`, in this order
    joined_out: JoinedLinear | None

    def _run(self, x: mx.array, state: RecurrentState) -> mx.array:
        flat = x.reshape(-1, x.shape[-1])
        read, z = self._advance_jointly(flat, state) if self.joined_in is not None else self._advance(flat, state)
        gated: mx.array = self.norm(read, z.reshape(read.shape))
        project = self.out_proj if self.joined_out is None else self.joined_out
        projected: mx.array = project(gated.reshape(flat.shape[0], -1))
        return projected.reshape(x.shape)

    def _advance_jointly(self, x: mx.array, state: RecurrentState) -> tuple[mx.array, mx.array]:
        """What all tokens read of their sequences' states, which are advanced; and their gates."""
        assert self.joined_in is not None
        shape, joint = self._kernels.shape, self.joined_in(x)
        gates, strengths, decays = shape.columns
        spans, (tails, states) = delta_spans(state.opened), state.in_place(shape.tail, shape.state)
        convolved = self._kernels.convolve(joint, spans, tails)
        read, _ = self._kernels.advance(convolved, joint, joint, spans, states, (decays, strengths))
        return read, joint[:, gates:strengths]

    def _advance(self, x: mx.array, state: RecurrentState) -> tuple[mx.array, mx.array]:
        """The same of separate projections."""
        shape = self._kernels.shape
        channels, z, strengths, decays = (
            mx.contiguous(part.reshape(x.shape[0], -1)) for part in self._project(x[None])
        )
        spans, (tails, states) = delta_spans(state.opened), state.in_place(shape.tail, shape.state)
        convolved = self._kernels.convolve(channels, spans, tails)
        return self._kernels.advance(convolved, decays, strengths, spans, states)[0], z

    def _project(self, x: mx.array) -> tuple[mx.array, ...]:
        """Queries, keys and values; gates of the output; strengths; decays."""
        if DELTA_PROJECTIONS[0] in self:
            return tuple(self[name](x) for name in DELTA_PROJECTIONS)
        q, k, v, z, b, a = self.fix_query_key_value_ordering(self.in_proj_qkvz(x), self.in_proj_ba(x))
        return mx.concatenate([part.reshape(*x.shape[:2], -1) for part in (q, k, v)], axis=-1), z, b, a


def delta_spans(opened: ForwardBatch | MixedBatch) -> DeltaSpans:
    """The rows of a forward pass, the same for all layers."""
    if "delta" not in opened.memo:
        opened.memo["delta"] = DeltaSpans.of(opened.pieces)
    spans: DeltaSpans = opened.memo["delta"]
    return spans


def kernel_gated_delta(module: Any, kernels: CheckedDelta) -> KernelGatedDelta | None:
    """The same by a GPU's kernels; None for other modules, and where the kernels are not correct for it."""
    spec = recurrence_spec_of(module)
    if not isinstance(spec, GatedDeltaSpec):
        return None
    conv = module.conv1d.weight
    projections = [] if spec.joint else [module[name] for name in DELTA_PROJECTIONS]
    found = kernels.of(
        DeltaShape(module.num_k_heads, module.num_v_heads, module.head_k_dim, module.head_v_dim, conv.shape[1]),
        conv.dtype,
        filter=conv,
        a_log=module.A_log,
        dt_bias=module.dt_bias,
        joint=can_join_linears(*projections),
    )
    if found is None:
        return None
    replacement: KernelGatedDelta = extend(module, KernelGatedDelta, "Kernel")
    replacement._kernels = found
    replacement.joined_in = replacement.joined_out = None
    if projections:
        replacement.joined_in = join_linears(*projections, names=DELTA_PROJECTIONS)
        replacement.joined_out = join_linears(module.out_proj, names=["out_proj"])
    return replacement
