"""The number formats of weights on this device, decided before a byte of them is read.

CPUs compute float32 fast and float16 very slowly. The native kernels multiply most weights as they are in the file,
quantised or in 16 bits, with activations in float32; MLX's own are slow at it on CPUs, so what the native ones do not
cover is dequantised and widened where memory allows. GPUs keep what the file holds, in MLX's forms.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

from ingot.errors import ConfigError
from ingot.kernels.cpu import native
from ingot.kernels.device import Device
from ingot.kernels.measured import (
    NATIVE_DENSE,
    NOTHING_SLOWER,
    SlowerParts,
    native_experts_part,
    native_packed_part,
    slower_parts,
)
from ingot.models.checkpoint import pause_loading
from ingot.models.gguf import weights
from ingot.models.gguf.quant_types import BLOCK_BITS, QUANT_GROUP, Kind
from ingot.models.layers.mlp import DenseSwitchLinear, PackedSwitchLinear, fuse_experts
from ingot.models.layers.modules import (
    DenseEmbedding,
    DenseLinear,
    PackedEmbedding,
    PackedLinear,
    float_dtype,
    named_parameters,
    native_dense,
    native_quantized,
)
from ingot.upstream import MultiLinear, QuantizedMultiLinear, QuantizedSwitchLinear, SwitchLinear

DTYPES = {"float32": mx.float32, "bfloat16": mx.bfloat16, "float16": mx.float16}
DTYPES_OF_16_BITS = (mx.bfloat16, mx.float16)
ROW_TILE = 16  # the most rows that the native kernels pad to a multiple of
UNIT_COLUMNS = 256  # columns of a row that share the units of their scales
UNPACK_SHARE = 0.5
"""Weights are dequantised to float32 when they then take at most this share of the device's memory."""


def settle_precision(model: nn.Module, device: Device, dtype: str | None) -> list[str]:
    """Cast and dequantise the model's weights in place, to `dtype` if there is one; returns notes for users."""
    if dtype is not None and dtype not in DTYPES:
        raise ConfigError(f"dtype must be one of {', '.join(DTYPES)}, not {dtype!r}", param="dtype")
    if dtype == "float16" and device.kind == "cpu":
        raise ConfigError("float16 is unusably slow on CPUs; use float32 or bfloat16", param="dtype")
    repack_ternary_layers(model)
    if device.kind != "cpu":
        _settle_on_gpu(model, dtype)
        return []
    if dtype is not None:
        _swap_one_by_one(model, weights.is_block_layer, lambda module: weights.exact_layer(module, DTYPES[dtype]))
        model.set_dtype(DTYPES[dtype])
        return []
    return _settle_on_cpu(model, device)


def repack_ternary_layers(model: nn.Module) -> None:
    """Layers whose weights are -1, 0 and 1, which mlx-lm multiplies by a Metal kernel alone, become MLX's quantised
    ones of 2 bits, with the same values."""
    _swap_one_by_one(model, _is_ternary, _repacked)


def _is_ternary(module: nn.Module) -> bool:
    return type(module).__name__ == "BitLinear"


def _repacked(layer: Any) -> nn.Module:
    scale = 1 / layer.weight_scale if layer.invert_weight_scales else layer.weight_scale
    codes = mx.concatenate([(layer.weight >> (2 * part)) & 3 for part in range(4)])  # of outputs, a quarter at a time
    outputs, inputs, bias = layer.out_features, layer.in_features, layer.get("bias")
    group = next((size for size in (64, 32) if inputs % size == 0), None)
    made: nn.Module
    if group is None:
        made = nn.Linear(1, 1, bias=False)
        made.weight = (codes.astype(scale.dtype) - 1) * scale
    else:
        made = nn.QuantizedLinear(group, 1, bias=False, group_size=group, bits=2)
        shifts = mx.arange(16, dtype=mx.uint32) * 2
        made.weight = (codes.reshape(outputs, -1, 16).astype(mx.uint32) << shifts).sum(axis=-1)
        made.scales = mx.broadcast_to(scale, (outputs, inputs // group))
        made.biases = -made.scales
    if bias is not None:
        made.bias = bias
    return made


def _settle_on_gpu(model: nn.Module, dtype: str | None) -> None:
    """Blocks become MLX's affine form. Its products need scales and activations in one format, or convert the scales
    each time: all of such a model is then bfloat16, in which activations do not overflow."""
    if any(weights.is_block_layer(module) for _, module in model.named_modules()):
        dtype = dtype or "bfloat16"
        scales = DTYPES[dtype]
        _swap_one_by_one(model, weights.is_block_layer, lambda module: weights.affine_layer(module, scales))
    if dtype is not None:
        model.set_dtype(DTYPES[dtype])


def _settle_on_cpu(model: nn.Module, device: Device) -> list[str]:
    room, slower = device.memory * UNPACK_SHARE, slower_parts(device)
    _swap_one_by_one(
        model,
        weights.is_block_layer,
        lambda module: (
            weights.native_block_layer(module) if native.available() else weights.exact_layer(module, mx.float16)
        ),
    )
    use_native_quantized(model, room, slower)
    use_native_dense(model, DTYPES_OF_16_BITS, slower)
    notes = _settle_others(model, room, slower)
    fuse_experts(model)
    return [*notes, *slower.notes]


def _settle_others(model: nn.Module, room: float, slower: SlowerParts) -> list[str]:
    """Weights that the native kernels do not multiply as they are."""
    if dequantized_bytes(model) <= room:
        dequantize_layers(model)
        use_native_dense(model, DTYPES_OF_16_BITS, slower)
        _cast(model, mx.float32)
        use_native_dense(model, (mx.float32,))
        return []
    if sum(weight.nbytes for _, weight in _other_float_weights(model)) * 2 <= room:
        _cast(model, mx.float32)
        return ["weights stay quantised: as float32 they would not fit in memory (slower)"]
    _cast(model, mx.bfloat16)
    return ["weights are bfloat16: float32 would not fit in memory (slower)"]


def widened_weights(model: nn.Module) -> set[str]:
    """Paths of the 16-bit weights and scales that the native kernels widen as they multiply."""
    return {
        f"{path}.{name}"
        for path, module in model.named_modules()
        if isinstance(module, _NATIVE)
        for name in ("weight", "scales", "biases")
    }


def main_dtype(model: Any) -> mx.Dtype:
    """The dtype of most computation. Weights that are widened as they are multiplied count as float32."""
    return float_dtype(model, widened_weights(model))


def rounds_activations(model: nn.Module) -> bool:
    """Whether the native kernels multiply by quantised weights, for which they round activations to 8 bits."""
    return any(isinstance(module, _ROUNDING) for _, module in model.named_modules())


def _other_float_weights(model: nn.Module) -> list[tuple[str, mx.array]]:
    """Floating weights that no native layer multiplies as they are."""
    widened = widened_weights(model)
    return [
        (path, array)
        for path, array in named_parameters(model)
        if mx.issubdtype(array.dtype, mx.floating) and path not in widened
    ]


def _cast(model: nn.Module, dtype: mx.Dtype) -> None:
    model.update(tree_unflatten([(path, array.astype(dtype)) for path, array in _other_float_weights(model)]))


def _swap_one_by_one(
    model: nn.Module, applies: Callable[[Any], bool], replacement_for: Callable[[Any], nn.Module]
) -> None:
    """Swap modules one after another, so that the weights of one at a time exist twice."""
    found = [path for path, module in model.named_modules() if applies(module)]
    for path in found:
        model.update_modules(tree_unflatten([(path, replacement_for(_module_at(model, path)))]))
        pause_loading()


def _module_at(model: Any, path: str) -> Any:
    for name in path.split("."):
        model = model[int(name)] if isinstance(model, list) else model[name]
    return model


def _is_quantized_module(module: Any) -> bool:
    return type(module) in _DEQUANTIZED and module.get("global_scale") is None


def _quantized_modules(model: nn.Module) -> Iterator[tuple[str, Any]]:
    return ((path, module) for path, module in model.named_modules() if _is_quantized_module(module))


def use_native_quantized(model: nn.Module, room: float, slower: SlowerParts = NOTHING_SLOWER) -> None:
    """Swap quantised layers for ones that the native kernels multiply as they are, where they then fit in `room`."""

    def covered(module: Any) -> bool:
        if not _is_quantized_module(module) or type(module) not in _PACKED:
            return False
        part = native_experts_part if isinstance(module, QuantizedSwitchLinear) else native_packed_part
        return native.covers_packing(
            bits=module.bits, group_size=module.group_size, mode=module.mode
        ) and not slower.leave_out(part(module.bits, module.mode))

    growth = sum(_arranged_growth(module) for _, module in _quantized_modules(model) if covered(module))
    fits = growth + sum(array.nbytes for _, array in named_parameters(model)) <= room
    _swap_one_by_one(
        model,
        lambda module: covered(module) and (fits or not _arranged_growth(module)),
        lambda module: native_quantized(module, _PACKED[type(module)]),
    )


def _arranged_growth(module: Any) -> int:
    """Bytes that a layer grows by in the native order: mxfp4 becomes bytes, with two factors for 32 of them."""
    if module.mode != "mxfp4":
        return 0
    return module.weight.size * 8 * 10 // 8 - module.weight.nbytes


def use_native_dense(model: nn.Module, formats: tuple[mx.Dtype, ...], slower: SlowerParts = NOTHING_SLOWER) -> None:
    """Swap plain layers in these formats for ones that the native kernels multiply."""
    if native.available():
        _swap_one_by_one(
            model,
            lambda module: (
                type(module) in _DENSE and module.weight.dtype in formats and not slower.leave_out(NATIVE_DENSE)
            ),
            lambda module: native_dense(module, _DENSE[type(module)]),
        )


def dequantized_bytes(model: nn.Module) -> int:
    """Bytes of all weights once they are dequantised, and widened to float32 where no kernel does."""
    layers = list(_quantized_modules(model))
    inside = {f"{path}.{name}" for path, module in layers for name in module}
    widened = widened_weights(model)
    loose = sum(
        array.nbytes if path in widened else 4 * array.size
        for path, array in named_parameters(model)
        if path not in inside
    )
    return loose + sum(module.weight.size * 32 // module.bits * _dequantized_dtype(module).size for _, module in layers)


def dequantize_layers(model: nn.Module) -> None:
    """Swap quantised layers for plain ones of the same values."""
    _swap_one_by_one(model, _is_quantized_module, _dequantized_layer)


def _dequantized_dtype(module: Any) -> mx.Dtype:
    """The format of a quantised layer's values: exact but for the modes with arbitrary scales."""
    return mx.bfloat16 if module.mode in ("mxfp8", "nvfp4") and native.available() else mx.float32


def _dequantized_layer(module: Any) -> nn.Module:
    weight = mx.dequantize(
        module.weight,
        module.scales,
        module.get("biases"),
        group_size=module.group_size,
        bits=module.bits,
        mode=module.mode,
    ).astype(_dequantized_dtype(module))
    mx.eval(weight)
    cls: Any = _DEQUANTIZED[type(module)]
    plain = cls.__new__(cls)
    nn.Module.__init__(plain)
    plain.weight = weight
    if "bias" in module:
        plain.bias = module.bias
    return plain


_DEQUANTIZED: dict[type, type] = {
    nn.QuantizedLinear: nn.Linear,
    nn.QuantizedEmbedding: nn.Embedding,
    QuantizedSwitchLinear: SwitchLinear,
    QuantizedMultiLinear: MultiLinear,
}
_PACKED: dict[type, type] = {
    nn.QuantizedLinear: PackedLinear,
    nn.QuantizedEmbedding: PackedEmbedding,
    QuantizedSwitchLinear: PackedSwitchLinear,
}
_DENSE: dict[type, type] = {nn.Linear: DenseLinear, nn.Embedding: DenseEmbedding, SwitchLinear: DenseSwitchLinear}
_ROUNDING = tuple(_PACKED.values())
_NATIVE = (*_DENSE.values(), *_PACKED.values())


def settled_bytes(model: Any, device: Device) -> int:
    """Bytes of the parameters in the device's formats."""
    layers = {path: module for path, module in model.named_modules() if isinstance(module, _WEIGHT_LAYERS)}
    inside = {f"{path}.{name}" for path in layers for name in ("weight", "scales", "biases")}
    narrow = device.kind != "cpu" and any(weights.is_block_layer(module) for module in layers.values())
    others = 0
    for path, array in named_parameters(model):
        if path not in inside:
            others += array.size * (4 if device.kind == "cpu" else 2 if narrow else array.itemsize)
    return others + sum(_layer_bytes(module, device) for module in layers.values())


def _layer_bytes(module: Any, device: Device) -> int:
    if weights.is_block_layer(module):
        return block_bytes(math.prod(module.shape), module.kind, device)
    stored = sum(module[name].nbytes for name in ("weight", "scales", "biases") if module.get(name) is not None)
    if device.kind != "cpu":
        return int(stored)
    if "scales" not in module:
        stays = native.available() and module.weight.dtype in DTYPES_OF_16_BITS
        return int(stored if stays else 4 * module.weight.size)
    count = module.weight.size * 32 // module.bits
    packed = native.covers_packing(bits=module.bits, group_size=module.group_size, mode=module.mode)
    if packed and not isinstance(module, QuantizedMultiLinear):
        rows = module.weight.shape[-2]
        return int(stored if module.mode == "affine" else count * 10 // 8) * -(-rows // ROW_TILE) * ROW_TILE // rows
    return int(count * (2 if module.mode in ("mxfp8", "nvfp4") and native.available() else 4))


def block_bytes(count: int, kind: Kind, device: Device) -> int:
    """So many weights of a GGUF file, in blocks of this kind."""
    if device.kind != "cpu":
        return count * weights.affine_bits(kind) // 8 + count // QUANT_GROUP * 4
    if not native.available():
        return count * 4
    units = 4 if kind in (Kind.Q2_K, Kind.Q4_K, Kind.Q5_K) else 2
    return count * BLOCK_BITS[kind] // 8 + count // UNIT_COLUMNS * (units + 16)


_WEIGHT_LAYERS = (
    *(nn.Linear, nn.Embedding, SwitchLinear, nn.QuantizedLinear, nn.QuantizedEmbedding, QuantizedSwitchLinear),
    *(QuantizedMultiLinear, weights.BlockLinear, weights.BlockEmbedding),
)
