"""Layers of Llama's kind, which can be computed by kernels of ours alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from ingot.kernels.decode_graph.kernels import Norm, gate, shift
from ingot.kernels.gpu.scores import Score
from ingot.kernels.lora.kernels import LoraMatrices, add_adapted
from ingot.models.layers.attention import MixedAttention
from ingot.models.layers.dense_linear import DenseKernelLinear
from ingot.models.layers.gpu_linear import KernelLinear
from ingot.models.layers.mlp import JoinedMLP
from ingot.models.layers.norms import factor, is_rms
from ingot.models.layers.products import Product


@dataclass(frozen=True, slots=True, eq=False)
class CoveredLayer:
    """What the graph needs of one."""

    attention: MixedAttention
    mlp: JoinedMLP
    norms: tuple[Norm, Norm]

    @property
    def products(self) -> list[Product]:
        """What it multiplies by."""
        products = (self.attention._into, self.attention._out, self.mlp._into, self.mlp._out)
        return [product for product in products if product is not None]


def covered(layer: Any) -> CoveredLayer | None:
    """None where it holds something that the graph has no kernel for."""
    attention, mlp, norms = layer.self_attn, layer.mlp, (layer.input_layernorm, layer.post_attention_layernorm)
    if not isinstance(attention, MixedAttention) or not isinstance(mlp, JoinedMLP) or not all(map(is_rms, norms)):
        return None
    if attention._paged is None or attention._turning is None or attention._wiring.gated or not mlp.is_silu:
        return None
    products = (attention._into, attention._out, mlp._into, mlp._out)
    factors = [factor(norm) for norm in norms]
    if not all(map(_is_known, products)):
        return None
    made = [Norm(weight, norm.eps) for weight, norm in zip(factors, norms, strict=True) if weight is not None]
    return CoveredLayer(attention, mlp, (made[0], made[1])) if len(made) == 2 else None


def alike(layers: Sequence[CoveredLayer]) -> bool:
    """Whether all see their rows alike, and turn by the same angles."""
    first = layers[0].attention
    return all(
        (other._heads, other._kv_heads, other._scale, other._cap, other._rotates)
        == (first._heads, first._kv_heads, first._scale, first._cap, first._rotates)
        and other._wiring.sinks is None
        and other._turning is not None
        and first._turning is not None
        and other._turning._angles is first._turning._angles
        for other in (layer.attention for layer in layers)
    )


def multiply(score: Score, product: Product, x: mx.array) -> mx.array:
    """Of states of which each token's are one behind another."""
    linear = product.linear
    if isinstance(linear, DenseKernelLinear):
        return linear._product.by(score).launched(x, linear.weight, bias=linear.get("bias"))
    assert isinstance(linear, KernelLinear)
    y = linear._product.by(score).launched(x, linear._packed)
    return shift(score, y, linear.bias) if "bias" in linear else y


def adapted(score: Score, product: Product, x: mx.array, places: mx.array | None) -> mx.array:
    """The same, with what the adapters at tokens' places add."""
    y, matrices = multiply(score, product, x), matrices_of(product)
    return y if places is None or matrices is None else add_adapted(score, x, y, matrices, places)


def matrices_of(product: Product) -> LoraMatrices | None:
    """Of the adapters beside it."""
    return None if product.added is None else product.added.matrices


def gated(score: Score, product: Product, x: mx.array, places: mx.array | None) -> mx.array:
    """What an MLP gates, by its gate: of weights of both, the gate's first; with what adapters add."""
    linear, matrices = product.linear, matrices_of(product)
    if places is not None and matrices is not None:
        return add_adapted(score, x, multiply(score, product, x), matrices, places, gated=True)
    if "bias" in linear:
        return gate(score, multiply(score, product, x))
    if isinstance(linear, DenseKernelLinear):
        return linear._product.by(score).gated(x, linear.weight)
    assert isinstance(linear, KernelLinear)
    return linear._product.by(score).gated(x, linear._packed)


def _is_known(product: Product | None) -> bool:
    return product is not None and isinstance(product.linear, DenseKernelLinear | KernelLinear)
