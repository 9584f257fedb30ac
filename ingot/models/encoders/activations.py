"""Activation functions by the names that configs and sentence-transformers files give them."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn

from ingot.errors import ModelError

Activation = Callable[[mx.array], mx.array]


def _same(x: mx.array) -> mx.array:
    return x


ACTIVATIONS: dict[str, Activation] = {
    "gelu": nn.gelu,
    "gelu_new": nn.gelu_approx,
    "gelu_pytorch_tanh": nn.gelu_approx,
    "gelu_fast": nn.gelu_approx,
    "relu": nn.relu,
    "silu": nn.silu,
    "swish": nn.silu,
    "tanh": mx.tanh,
    "sigmoid": mx.sigmoid,
    "identity": _same,
}


def activation(name: str) -> Activation:
    """The function of a config's name (`gelu`) or of a torch class's (`torch.nn.modules.activation.Tanh`)."""
    known = ACTIVATIONS.get(name.rpartition(".")[2].lower())
    if known is None:
        raise ModelError(f"The model uses the activation function {name!r}, which ingot does not know for encoders")
    return known
