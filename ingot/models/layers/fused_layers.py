"""All layers of a model as one native operation, on CPUs: at small batches dispatching operations costs more than
computing them.

The first layer is swapped for a module that runs all of them natively, the others for ones that pass their input on.
This covers the layers of Llama and its relatives; other models keep their own modules.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ingot.cache.layer_state import LayerState
from ingot.kernels.cpu import native
from ingot.models.families.registry import is_fusible
from ingot.models.layers.attention_backends import native_spans_of
from ingot.models.layers.modules import extend, native_weights_of
from ingot.models.layers.rope import PositionedRope
from ingot.models.lora.layers import LoraMapping


class LayerStandIn(nn.Module):
    """Replaces a layer, which it extends, and can still compute it alone."""

    def by_itself(self, x: mx.array, mask: Any, state: Any) -> mx.array:
        y: mx.array = super().__call__(x, mask, state)
        return y


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
    layers = fusible_layers_of(model)
    if not layers or not native.available():
        return False
    stack = _native_stack(layers)
    if stack is None:
        return False
    attention = layers[0].self_attn
    fused: FusedLayers = run_all_in_first(model, layers, FusedLayers)
    fused._stack, fused._all_layers = stack, lambda: model.model.layers
    fused._kv_heads = attention.n_kv_heads
    fused._sharing = attention.n_heads // attention.n_kv_heads
    fused._head_size = attention.k_proj.weight.shape[0] // attention.n_kv_heads
    return True


def run_all_in_first(model: Any, layers: Sequence[nn.Module], ours: type[nn.Module]) -> Any:
    """Swap the first layer for one of the class `ours`, which runs all of them and is returned."""
    first = extend(layers[0], ours, ours.__name__)
    model.model.update_modules(
        {"layers": [first, *(extend(each, SkippedLayer, "SkippedLayer") for each in layers[1:])]}
    )
    return first


def fusible_layers_of(model: Any) -> list[Any]:
    """The model's layers, if all of them are of one known kind."""
    inner = model.get("model")
    layers = inner.get("layers") if isinstance(inner, nn.Module) else None
    return layers if isinstance(layers, list) and all(map(is_fusible, layers)) else []


def _native_stack(layers: list[Any]) -> native.NativeLayerStack | None:
    attention = layers[0].self_attn
    rope = attention.rope
    # Some families leave the positions out of some layers, or let some see only a window.
    if not all(
        _is_same_rotation(layer.self_attn.rope, rope) and not vars(layer).get("use_sliding") for layer in layers
    ):
        return None
    rotation = rope.rotation
    size = attention.k_proj.weight.shape[0] // attention.n_kv_heads
    weights = [[native_weights_of(module) for module in _layer_matrices(layer)] for layer in layers]
    if any(weight is None for own in weights for weight in own):
        return None
    stack = native.NativeLayerStack(
        rotation.scale / rotation.periods,
        heads=attention.n_heads,
        kv_heads=attention.n_kv_heads,
        head_size=size,
        scale=attention.scale,
        eps=layers[0].input_layernorm.eps,
        rope_dims=rotation.dims,
        rope_neighbours=rotation.traditional,
        rope_gain=rotation.gain,
    )
    for layer, own in zip(layers, weights, strict=True):
        stack.add(
            norms=(layer.input_layernorm.weight, layer.post_attention_layernorm.weight),
            matrices=own,
            head_norms=tuple(
                layer.self_attn[name].weight if name in layer.self_attn else None for name in ("q_norm", "k_norm")
            ),
        )
    return stack


def _is_same_rotation(rope: nn.Module, other: nn.Module) -> bool:
    both_known = isinstance(rope, PositionedRope) and isinstance(other, PositionedRope)
    return both_known and rope.rotation.key == other.rotation.key


def _layer_matrices(layer: Any) -> tuple[Any, ...]:
    attention, mlp = layer.self_attn, layer.mlp
    return (
        *(attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj),
        *(mlp.gate_proj, mlp.up_proj, mlp.down_proj),
    )
