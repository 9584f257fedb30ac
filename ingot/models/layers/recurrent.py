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
from ingot.kernels.recurrent.kernels import RecurrentKernels, RecurrentSpans
from ingot.kernels.recurrent.mixers import DeltaShape, Mamba2Shape, ShortConvShape
from ingot.kernels.recurrent.selfcheck import CheckedRecurrences, MixerShape
from ingot.models.families.description import GatedDeltaSpec, Mamba2Spec, ShortConvSpec
from ingot.models.families.registry import recurrence_spec_of
from ingot.models.layers.gpu_linear import JoinedLinear, join_linears
from ingot.models.layers.modules import extend, measured_part, native_weights_of, swap_each
from ingot.models.lora.layers import LoraMapping

Chain = tuple[str, ...]
"""The names of projections behind one another, which make an input of a mixer."""


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
    _inputs: tuple[Chain, ...]  # what makes each of the operation's inputs
    _out: str
    _state_shapes: tuple[tuple[int, ...], ...]  # of a slot
    _weights: tuple[list[list[Any]], Any] | None  # of these projections, where the operation does them too
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
        projected = {chain: _project(self, chain, x) for chain in dict.fromkeys(self._inputs)}
        y, *parts = self._operation(*(projected[chain] for chain in self._inputs), *parts, pieces, earlier)
        return [self[self._out](y.astype(x.dtype)), *parts]


def _native_delta(mixer: Any, spec: GatedDeltaSpec) -> NativeRecurrence:
    delta = _delta_of(mixer, spec)
    operation = native.gated_delta_layer(
        key_heads=delta.key_heads,
        value_heads=delta.value_heads,
        key_size=delta.key_size,
        value_size=delta.value_size,
        eps=mixer[spec.norm].eps,
        columns=_delta_columns(delta, spec),
        decays_by_key=spec.decays_by_key,
        bound=delta.bound,
        most_strength=delta.most_strength,
        sigmoid_gate=spec.gate_act == "sigmoid",
        **delta.weights,
    )
    qkv = [(name,) for name in spec.qkv]
    inputs = (*(qkv * 3)[:3], delta.gate, (spec.strength,), spec.decay)
    channels, taps = delta.weights["filter"].shape[:2]
    states = (taps - 1, channels), (delta.value_heads, delta.value_size, delta.key_size)
    return _adopt_recurrence(mixer, inputs, operation, states, spec.out)


class _Delta(NamedTuple):
    """What a gated delta net has, by its description."""

    key_heads: int
    value_heads: int
    key_size: int
    value_size: int
    gate: Chain
    bound: float | None
    most_strength: float
    weights: dict[str, mx.array]


def _delta_of(mixer: Any, spec: GatedDeltaSpec) -> _Delta:
    filters = [attrgetter(path)(mixer).weight for path in spec.convolutions]
    weights = {
        "filter": filters[0] if len(filters) == 1 else mx.concatenate(filters),
        "a_log": mixer.A_log.reshape(-1),
        "dt_bias": mixer.dt_bias.reshape(-1),
        "norm": mixer[spec.norm].weight,
    }
    gate = next(chain for chain in spec.gates if chain[0] in mixer)
    bound = None if spec.decay_bound is None else attrgetter(spec.decay_bound)(mixer)
    doubled = spec.most_strength is not None and attrgetter(spec.most_strength)(mixer)
    key_heads, value_heads, key_size, value_size = (int(attrgetter(name)(mixer)) for name in spec.sizes)
    strength = 2.0 if doubled else 1.0
    bound = None if bound is None else float(bound)
    return _Delta(key_heads, value_heads, key_size, value_size, gate, bound, strength, weights)


def _delta_columns(delta: _Delta, spec: GatedDeltaSpec) -> dict[str, tuple[int, int, int]]:
    """See `native.gated_delta_layer`."""
    key, value, heads = delta.key_size, delta.value_size, delta.value_heads // delta.key_heads
    if spec.joint:
        group = 2 * (key + heads * value)
        return {
            "q": (0, 0, group),
            "k": (key, 0, group),
            "v": (2 * key, value, group),
            "z": (2 * key + heads * value, value, group),
            "b": (0, 1, 2 * heads),
            "a": (heads, 1, 2 * heads),
        }
    all_keys = delta.key_heads * key if len(spec.qkv) == 1 else 0
    decays = key if spec.decays_by_key else 1
    return {
        "q": (0, 0, key),
        "k": (all_keys, 0, key),
        "v": (2 * all_keys, value, heads * value),
        "z": (0, value, heads * value),
        "b": (0, 1, heads),
        "a": (0, decays, heads * decays),
    }


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
    return _adopt_recurrence(mixer, (("in_proj",),), operation, (_conv_tail_shape(mixer.conv1d), state))


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
    return _adopt_recurrence(mixer, (("in_proj",),), operation, (_conv_tail_shape(mixer.conv),))


def _native_recurrence(mixer: Any, slower: SlowerParts) -> NativeRecurrence | None:
    spec = recurrence_spec_of(mixer)
    if type(spec) not in _SHAPES:
        return None
    by_key = isinstance(spec, GatedDeltaSpec) and spec.decays_by_key
    if slower.leave_out(native_recurrent_part(_SHAPES[type(spec)], by_key=by_key)):
        return None
    if slower.leave_out(measured_part("recurrent mixer", mixer)):
        return None
    match spec:
        case GatedDeltaSpec():
            return _native_delta(mixer, spec)
        case Mamba2Spec():
            return _native_mamba2(mixer, spec)
        case _:
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
    mixer: Any,
    inputs: tuple[Chain, ...],
    operation: Any,
    state_shapes: tuple[tuple[int, ...], ...],
    out: str = "out_proj",
) -> NativeRecurrence:
    replacement: NativeRecurrence = extend(mixer, NativeRecurrence, "Native")
    replacement._operation, replacement._inputs, replacement._state_shapes = operation, inputs, state_shapes
    replacement._out, replacement._weights = out, _projection_weights(mixer, inputs, out)
    return replacement


def _projection_weights(mixer: Any, inputs: tuple[Chain, ...], out: str) -> tuple[list[list[Any]], Any] | None:
    modules = {name: mixer[name] for name in (*(name for chain in inputs for name in chain), out)}
    # Weights of another type would be held twice.
    if any(type(module) is nn.Linear and module.weight.dtype != mx.float32 for module in modules.values()):
        return None
    weights = {name: native_weights_of(module) for name, module in modules.items()}
    if None in weights.values():
        return None
    return [[weights[name] for name in chain] for chain in inputs], weights[out]


def _project(mixer: Any, chain: Chain, x: mx.array) -> mx.array:
    for name in chain:
        x = mixer[name](x)
    return x


def _conv_tail_shape(convolution: Any) -> tuple[int, int]:
    channels, taps = convolution.weight.shape[:2]
    return taps - 1, channels


class KernelRecurrence(_StatefulMixer):
    """Computes what the recurrent mixer that it extends computes, by kernels of a GPU."""

    _kernels: RecurrentKernels
    _inputs: tuple[str, ...]  # the projections whose outputs, side by side, the kernels take
    _apart: tuple[Chain, ...]  # what makes each of the inputs that are apart from these
    _out: str
    joined_in: JoinedLinear | None  # these as one, where they are alike
    joined_apart: tuple[tuple[JoinedLinear | None, ...], ...]
    joined_out: JoinedLinear | None

    def _run(self, x: mx.array, state: RecurrentState) -> mx.array:
        flat = x.reshape(-1, x.shape[-1])
        states = state.in_place(*self._kernels.state_shapes)
        apart = [self._project_apart(number, flat) for number in range(len(self._apart))]
        mixed, after = self._kernels.mix(self._project(flat), recurrent_spans(state.opened), states, *apart)
        if after:
            state.put_rows(after)
        project = self[self._out] if self.joined_out is None else self.joined_out
        projected: mx.array = project(mixed)
        return projected.reshape(x.shape)

    def _project(self, x: mx.array) -> mx.array:
        if self.joined_in is not None:
            return self.joined_in(x)
        return mx.concatenate([self[name](x) for name in self._inputs], axis=-1)

    def _project_apart(self, number: int, x: mx.array) -> mx.array:
        for name, joined in zip(self._apart[number], self.joined_apart[number], strict=True):
            x = self[name](x) if joined is None else joined(x)
        return x


def recurrent_spans(opened: ForwardBatch | MixedBatch) -> RecurrentSpans:
    """The rows of a forward pass, the same for all layers."""
    if RECURRENT_SPANS not in opened.memo:
        opened.memo[RECURRENT_SPANS] = RecurrentSpans.of(opened.pieces, opened.targets)
    spans: RecurrentSpans = opened.memo[RECURRENT_SPANS]
    return spans


RECURRENT_SPANS = "recurrent spans"


class _KernelInputs(NamedTuple):
    """How kernels compute a mixer."""

    shape: MixerShape
    projections: tuple[str, ...]
    weights: dict[str, mx.array | None]
    options: dict[str, Any]
    apart: tuple[Chain, ...] = ()
    out: str = "out_proj"


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
    replacement._apart, replacement._out = found.apart, found.out
    projections = [module[name] for name in found.projections]
    replacement.joined_in = join_linears(*projections, names=found.projections)
    # Set as an attribute, a tuple would be among what the model's own module owns.
    vars(replacement)["joined_apart"] = tuple(
        tuple(join_linears(module[name], names=[name]) for name in chain) for chain in found.apart
    )
    replacement.joined_out = join_linears(module[found.out], names=[found.out])
    return replacement


def _kernel_inputs(mixer: Any) -> _KernelInputs | None:
    match recurrence_spec_of(mixer):
        case GatedDeltaSpec() as spec:
            return _delta_inputs(mixer, spec)
        case Mamba2Spec() as spec:
            return _mamba2_inputs(mixer, spec)
        case ShortConvSpec():
            (channels, taps), bias = mixer.conv.weight.shape[:2], mixer.conv.get("bias")
            weights = {"filter": mixer.conv.weight, "filter_bias": bias}
            return _KernelInputs(ShortConvShape(channels, taps, bias is not None), ("in_proj",), weights, {})
        case _:
            return None


def _delta_inputs(mixer: Any, spec: GatedDeltaSpec) -> _KernelInputs:
    """Projections behind others are apart from the joint one, which has gates, strengths and decays in this order."""
    delta = _delta_of(mixer, spec)
    gates_apart, decays_apart = len(delta.gate) > 1, len(spec.decay) > 1
    shape = DeltaShape(
        *(delta.key_heads, delta.value_heads, delta.key_size, delta.value_size),
        delta.weights["filter"].shape[1],
        spec.joint,
        spec.decays_by_key,
        delta.bound is not None,
        spec.gate_act == "sigmoid",
        gates_apart,
        decays_apart,
    )
    joint = (*spec.qkv, *(() if gates_apart else delta.gate), spec.strength, *(() if decays_apart else spec.decay))
    apart = (*(delta.gate,) * gates_apart, *(spec.decay,) * decays_apart)
    options = {"eps": float(mixer[spec.norm].eps), "bound": delta.bound or 0.0, "most_strength": delta.most_strength}
    return _KernelInputs(shape, tuple(dict.fromkeys(joint)), {**delta.weights}, options, apart, spec.out)


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
