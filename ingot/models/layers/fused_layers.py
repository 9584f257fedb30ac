"""All layers of a model as one native operation, on CPUs: at small batches dispatching operations costs more than
computing them.

The first layer is swapped for a module that runs all of them natively, the others for ones that pass their input on.
This covers layers whose program (`layer_program`) is Llama's; other models keep their own modules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from ingot.cache.layer_state import LayerState
from ingot.kernels.cpu import native
from ingot.models.families.description import AttentionSpec
from ingot.models.families.registry import attention_spec_of, mlp_spec_of
from ingot.models.layers.attention_backends import native_spans_of
from ingot.models.layers.layer_program import LayerProgram, decoder_layers_of, decoder_of, layer_program_of
from ingot.models.layers.modules import extend, native_weights_of
from ingot.models.layers.rope import PositionedRope
from ingot.models.lora.layers import LoraMapping


class LayerStandIn(nn.Module):
    """Replaces a layer, which it extends, and can still compute it alone."""

    def by_itself(self, *args: Any, **options: Any) -> Any:
        return super().__call__(*args, **options)


def is_mlx_lm_cache(cache: Any) -> bool:
    """Whether it is a cache of mlx-lm's: then each layer is computed alone."""
    return cache is not None and not isinstance(cache, LayerState)


class FusedLayers(LayerStandIn):
    """Replaces a model's first layer, which it extends, and computes all of them."""

    _stack: native.NativeLayerStack
    _all_layers: Callable[[], Sequence[LayerStandIn]]
    _lora_mapping: LoraMapping | None = None
    _kv_heads: int
    _sharing: int  # heads that share keys
    _head_size: int

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        if is_mlx_lm_cache(cache):
            return self.by_itself(x, mask, cache)
        if cache.query_observer is not None or (
            self._lora_mapping is not None and self._lora_mapping.opened is not None
        ):
            for layer, state in zip(self._all_layers(), cache.neighbours, strict=True):
                x = layer.by_itself(x, mask, state)
            return x
        storages = [state.reserve(self._kv_heads, self._head_size, mx.float32) for state in cache.neighbours]
        keys, values = [storage.keys[0] for storage in storages], [storage.values[0] for storage in storages]
        coded = [storage.native_coded for storage in storages if storage.native_coded is not None]
        y, keys, values = self._stack(x, keys, values, native_spans_of(cache, self._sharing, cache.choice), coded)
        for storage, own_keys, own_values in zip(storages, keys, values, strict=True):
            storage.keys[0], storage.values[0] = own_keys, own_values
        return y.astype(x.dtype)


class SkippedLayer(LayerStandIn):
    """Replaces a layer, which it extends, that is computed with the first."""

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        return self.by_itself(x, mask, cache) if is_mlx_lm_cache(cache) else x


def fuse_layers(model: Any) -> bool:
    """Swap the layers of a model if the native stack covers all of them; returns whether it does."""
    programs = plain_programs_of(model)
    if not programs or not native.available():
        return False
    heads = _HeadShape.of(programs[0])
    stack = _native_stack(decoder_layers_of(model), programs, heads)
    if stack is None:
        return False
    fused: FusedLayers = replace_layers(model, {0: FusedLayers})[0]
    fused._stack, fused._all_layers = stack, lambda: decoder_layers_of(model)
    fused._kv_heads, fused._sharing, fused._head_size = heads.kv_heads, heads.heads // heads.kv_heads, heads.size
    return True


def replace_layers(model: Any, ours: Mapping[int, type[nn.Module]]) -> list[Any]:
    """Swap all layers, by their numbers, for ones of our classes, else for ones that pass their input on; returns the
    new ones."""
    kinds = [ours.get(number, SkippedLayer) for number in range(len(decoder_layers_of(model)))]
    layers = [extend(layer, kind, kind.__name__) for layer, kind in zip(decoder_layers_of(model), kinds, strict=True)]
    decoder_of(model).update_modules({"layers": layers})
    return layers


def plain_programs_of(model: Any) -> list[LayerProgram]:
    """The programs of a model's layers, if all of them are Llama's."""
    programs = [layer_program_of(layer) for layer in decoder_layers_of(model)]
    plain = [program for program in programs if program is not None and _is_plain(program)]
    return plain if len(plain) == len(programs) else []


def _is_plain(program: LayerProgram) -> bool:
    """Whether a layer computes what Llama's do, as far as its program says."""
    if len(program.blocks) != 2 or program.multiplier is not None or program.clipped or program.scale is not None:
        return False
    mixer, mlp_block = program.blocks
    attention, mlp = attention_spec_of(mixer.part), mlp_spec_of(mlp_block.part)
    if attention is None or mlp is None:
        return False
    if not isinstance(attention.scale, str) or not isinstance(attention.kv_heads, str):
        return False
    named = replace(attention, heads=_PLAIN.heads, kv_heads=_PLAIN.kv_heads, scale=_PLAIN.scale, out=_PLAIN.out)
    if replace(named, norms=None) != _PLAIN or mlp.act != "silu" or mlp.up is None:
        return False
    head_norms = (mixer.part[name] for name in attention.norms or () if name in mixer.part)
    norms = [*(block.norm_before for block in program.blocks), *head_norms]
    if any(block.norm_after is not None for block in program.blocks):
        return False
    if any(type(norm) is not nn.RMSNorm for norm in norms):
        return False
    return len({norm.eps for norm in norms if norm is not None}) == 1


_PLAIN = AttentionSpec()
"""Llama's attention."""


class _HeadShape(NamedTuple):
    """The heads of an attention module."""

    heads: int
    kv_heads: int
    size: int
    scale: float

    @classmethod
    def of(cls, program: LayerProgram) -> _HeadShape:
        attention = program.blocks[0].part
        spec = attention_spec_of(attention)
        assert spec is not None
        names = (spec.heads, spec.kv_heads, spec.scale)
        heads, kv_heads, scale = (attrgetter(name)(attention) for name in names if isinstance(name, str))
        return cls(heads, kv_heads, attention.k_proj.weight.shape[0] // kv_heads, scale)


def _native_stack(layers: list[Any], programs: list[LayerProgram], heads: _HeadShape) -> native.NativeLayerStack | None:
    attentions = [program.blocks[0].part for program in programs]
    rope = attentions[0].rope
    # Some families leave the positions out of some layers, or let some see only a window.
    if not all(
        _is_same_rotation(attention.rope, rope) and not vars(layer).get("use_sliding")
        for layer, attention in zip(layers, attentions, strict=True)
    ):
        return None
    weights = [[native_weights_of(module) for module in _layer_matrices(program)] for program in programs]
    if any(weight is None for own in weights for weight in own):
        return None
    rotation, before = rope.rotation, programs[0].blocks[0].norm_before
    assert before is not None
    stack = native.NativeLayerStack(
        rotation.scale / rotation.periods,
        heads=heads.heads,
        kv_heads=heads.kv_heads,
        head_size=heads.size,
        scale=heads.scale,
        eps=before.eps,
        rope_dims=rotation.dims,
        rope_neighbours=rotation.traditional,
        rope_gain=rotation.gain,
    )
    for program, own in zip(programs, weights, strict=True):
        stack.add(
            norms=tuple(block.norm_before.weight for block in program.blocks if block.norm_before is not None),
            matrices=own,
            head_norms=_head_norms(program),
        )
    return stack


def _head_norms(program: LayerProgram) -> tuple[mx.array | None, mx.array | None]:
    """The weights of the norms of queries and keys."""
    attention = program.blocks[0].part
    spec = attention_spec_of(attention)
    names = None if spec is None else spec.norms
    if names is None or names[0] not in attention:
        return None, None
    return attention[names[0]].weight, attention[names[1]].weight


def _is_same_rotation(rope: nn.Module, other: nn.Module) -> bool:
    both_known = isinstance(rope, PositionedRope) and isinstance(other, PositionedRope)
    return both_known and rope.rotation.key == other.rotation.key


def _layer_matrices(program: LayerProgram) -> tuple[Any, ...]:
    mixer, mlp = (block.part for block in program.blocks)
    attention_spec, mlp_spec = attention_spec_of(mixer), mlp_spec_of(mlp)
    assert attention_spec is not None and mlp_spec is not None and mlp_spec.up is not None
    return (
        *(mixer[name] for name in ("q_proj", "k_proj", "v_proj", attention_spec.out)),
        *(mlp[name] for name in (mlp_spec.gate, mlp_spec.up, mlp_spec.down)),
    )
