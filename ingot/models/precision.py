"""Which number format the weights take on this device, decided before a byte of them is read.

CPUs compute float32 fast and float16 very slowly. The native kernels multiply most packed weights as they are; MLX's
own are slow at it on CPUs, so what the native ones do not cover is unpacked where memory allows. GPUs keep what the
file holds.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

from ingot.errors import ConfigError
from ingot.kernels import native
from ingot.kernels.device import Device
from ingot.models.modules import packed, parameters
from ingot.models.upstream import QuantizedSwitchLinear, SwitchLinear

DTYPES = {"float32": mx.float32, "bfloat16": mx.bfloat16, "float16": mx.float16}
UNPACK_SHARE = 0.5
"""Weights are unpacked to float32 when they then take at most this share of the device's memory."""


def settle(model: nn.Module, device: Device, asked: str | None) -> list[str]:
    """Cast and unpack the model's weights in place; returns what a user should know about it."""
    if asked is not None and asked not in DTYPES:
        raise ConfigError(f"dtype must be one of {', '.join(DTYPES)}, not {asked!r}", param="dtype")
    if asked == "float16" and device.kind == "cpu":
        raise ConfigError("float16 is unusably slow on CPUs; use float32 or bfloat16", param="dtype")
    if device.kind != "cpu":
        if asked is not None:
            model.set_dtype(DTYPES[asked])
        return []
    if asked is not None:
        model.set_dtype(DTYPES[asked])
        return []
    return _settle_on_cpu(model, device)


def _settle_on_cpu(model: nn.Module, device: Device) -> list[str]:
    room = device.memory * UNPACK_SHARE
    multiply_packed(model)
    if unpacked_bytes(model) <= room:
        unpack(model)
        model.set_dtype(mx.float32)
        return []
    if sum(weight.nbytes for _, weight in _floating(model)) * 2 <= room:
        model.set_dtype(mx.float32)
        return ["weights stay packed: unpacked they would not fit in memory (slower)"]
    model.set_dtype(mx.bfloat16)
    return ["weights are bfloat16: float32 would not fit in memory (slower)"]


def _floating(model: nn.Module) -> list[tuple[str, mx.array]]:
    return [(path, array) for path, array in parameters(model) if mx.issubdtype(array.dtype, mx.floating)]


def _packed(model: nn.Module) -> list[tuple[str, Any]]:
    return [
        (path, module)
        for path, module in model.named_modules()
        if type(module) in _UNPACKED and module.get("global_scale") is None
    ]


def multiply_packed(model: nn.Module) -> None:
    """Swap packed layers for ones that the native kernels multiply as they are."""
    found = [
        (path, packed(module))
        for path, module in _packed(model)
        if type(module) in (nn.QuantizedLinear, nn.QuantizedEmbedding)
        and native.covers(bits=module.bits, group_size=module.group_size, mode=module.mode)
    ]
    model.update_modules(tree_unflatten(found))


def unpacked_bytes(model: nn.Module) -> int:
    """Bytes of all weights with what is left to unpack as float32."""
    layers = _packed(model)
    inside = {f"{path}.{name}" for path, module in layers for name in module}
    loose = sum(array.size for path, array in parameters(model) if path not in inside)
    return 4 * (loose + sum(module.weight.size * 32 // module.bits for _, module in layers))


def unpack(model: nn.Module) -> None:
    """Swap packed layers for plain float32 ones of the same values."""
    model.update_modules(tree_unflatten([(path, _unpacked(module)) for path, module in _packed(model)]))


def _unpacked(module: Any) -> nn.Module:
    weight = mx.dequantize(
        module.weight,
        module.scales,
        module.get("biases"),
        group_size=module.group_size,
        bits=module.bits,
        mode=module.mode,
    ).astype(mx.float32)
    mx.eval(weight)
    cls: Any = _UNPACKED[type(module)]
    plain = cls.__new__(cls)
    nn.Module.__init__(plain)
    plain.weight = weight
    if "bias" in module:
        plain.bias = module.bias
    return plain


_UNPACKED: dict[type, type] = {
    nn.QuantizedLinear: nn.Linear,
    nn.QuantizedEmbedding: nn.Embedding,
    QuantizedSwitchLinear: SwitchLinear,
}
