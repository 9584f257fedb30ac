"""What is done token by token: norms, gates, and drawing from logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ingot.kernels.native.extension import extension

if TYPE_CHECKING:
    import mlx.core as mx


def rms_norm(x: mx.array, weight: mx.array, eps: float) -> mx.array:
    normed: mx.array = extension().rms_norm(x, weight, eps)
    return normed


def layer_norm(x: mx.array, weight: mx.array | None, bias: mx.array | None, eps: float) -> mx.array:
    normed: mx.array = extension().layer_norm(x, weight, bias, eps)
    return normed


def gated(kind: str, gate: mx.array, up: mx.array | None = None) -> mx.array:
    """act(gate) * up, where act is silu, gelu, gelu_tanh or sigmoid; without `up` of the halves of gate's last axis."""
    native = extension()
    product: mx.array = native.gated(native.Gate[kind], gate, up)
    return product


def draw(logits: mx.array, draws: Sequence[tuple[float, int, float, float, float]]) -> mx.array:
    """A token for each row of logits [rows, vocab]; a draw is (temperature, top_k, top_p, min_p, number in [0, 1))."""
    tokens: mx.array = extension().draw(logits, draws)
    return tokens
