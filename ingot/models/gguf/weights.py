"""Layers whose weights are still the blocks of a GGUF file's K formats: what becomes of them depends on the device.

The native kernels multiply them in the file's own number of bits, exactly. MLX has no form with scales of whole
numbers in units of their own: there, the two formats that have a scale for 32 weights keep their codes and round the
scales, and the others, which have one for 16, are quantised anew with two bits more, whose step is then at most about
a quarter of theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from gguf.constants import GGML_QUANT_SIZES
from gguf.constants import GGMLQuantizationType as Kind
from mlx.utils import tree_unflatten

from ingot.kernels import native
from ingot.models.gguf.quant_types import BLOCK_BITS, BLOCKS_KEY, GROUP, PACKED_BITS, dense, pack
from ingot.models.layers.experts import PackedSwitchLinear
from ingot.models.layers.modules import PackedEmbedding, PackedLinear
from ingot.upstream import QuantizedSwitchLinear, SwitchLinear

CHUNK_WEIGHTS = 1 << 24  # weights that are unpacked at a time


class BlockLinear(nn.Module):
    """Stands where a layer will: `weight` uint8 [..., rows, bytes of a row], as they lie in the file."""

    def __init__(self, module: Any, kind: Kind) -> None:
        super().__init__()
        block, size = GGML_QUANT_SIZES[kind]
        *rows, columns = module.weight.shape
        self.weight = mx.zeros((*rows, columns // block * size), mx.uint8)
        if "bias" in module:
            self.bias = module.bias
        self.kind, self.shape = kind, tuple(module.weight.shape)


class BlockEmbedding(BlockLinear):
    pass


class BlockSwitchLinear(BlockLinear):
    pass


def with_blocks(
    classes: Callable[..., tuple[type, type]], others: Collection[str] = ()
) -> Callable[..., tuple[type, type]]:
    """What finds a model's classes, but the model has layers of blocks where its config says so. The weights `others`
    are not the model's."""

    def found(config: dict[str, Any]) -> tuple[type, type]:
        model_class, args_class = classes(config=config)
        said: Mapping[str, str] = config.get(BLOCKS_KEY) or {}
        kinds = {path: kind for path, kind in said.items() if f"{path}.weight" not in others}
        if not kinds:
            return model_class, args_class

        class Blocked(model_class):  # type: ignore[misc, valid-type]
            def __init__(self, args: Any) -> None:
                super().__init__(args)
                hold_blocks(self, kinds)

        return Blocked, args_class

    return found


def hold_blocks(model: nn.Module, kinds: Mapping[str, str]) -> None:
    """Swap the layers at these paths for ones whose weights are blocks of these kinds."""
    modules = dict(model.named_modules())
    held = [(path, _HELD[type(modules[path])](modules[path], Kind[kind])) for path, kind in kinds.items()]
    model.update_modules(tree_unflatten(held))


def is_block(module: Any) -> bool:
    return isinstance(module, BlockLinear)


def stand_in(module: BlockLinear) -> nn.Module:
    """A layer of the same shape whose weights nobody reads: they take no memory while nothing is computed."""
    made = _made(_PLAIN[type(module)], module)
    made.weight = mx.zeros(module.shape)
    return made


def multiplied(module: BlockLinear) -> nn.Module:
    """The same layer as the native kernels compute it."""
    bits = BLOCK_BITS[module.kind]
    made = _made(_PACKED[type(module)], module)
    made.native = native.block_weights(module.weight, module.get("bias"), bits)
    made.weight, made.scales = made.native.arrays[:2]
    made.group_size, made.bits, made.mode = GROUP, bits, module.kind.name
    return made


def exact(module: BlockLinear, dtype: mx.Dtype) -> nn.Module:
    """The same layer in MLX's affine form where that can have the same values, else as plain numbers.

    Numbers are of `dtype`, or float32 where that cannot hold the largest.
    """
    if module.kind in PACKED_BITS:
        return affine(module, mx.float32 if dtype == mx.float16 else dtype)
    made = _made(_PLAIN[type(module)], module)
    made.weight = _joined(module, [_numbers(raw, module.kind, dtype) for raw in _rows(module)])
    if not mx.isfinite(made.weight).all().item():
        made.weight = _joined(module, [_numbers(raw, module.kind, mx.float32) for raw in _rows(module)])
    return made


def affine(module: BlockLinear, dtype: mx.Dtype) -> nn.Module:
    """The same layer in MLX's affine form, whose factors are rounded to `dtype`."""
    made = _made(_QUANTIZED[type(module)], module)
    parts = [_quantized(raw, module.kind, dtype) for raw in _rows(module)]
    made.weight, made.scales, made.biases = (_joined(module, list(chunks)) for chunks in zip(*parts, strict=True))
    made.group_size, made.bits, made.mode = GROUP, affine_bits(module.kind), "affine"
    if isinstance(made, QuantizedSwitchLinear):
        made.global_scale = None  # which other modes have
    return made


def affine_bits(kind: Kind) -> int:
    """Bits of a weight in MLX's affine form."""
    return PACKED_BITS.get(kind) or BLOCK_BITS[kind] + 2


def _quantized(raw: np.ndarray, kind: Kind, dtype: mx.Dtype) -> tuple[mx.array, mx.array, mx.array]:
    if kind in PACKED_BITS:
        packed = pack(raw, kind)
        assert packed.biases is not None, "affine forms have biases"
        weight, scales, biases = (mx.array(part) for part in (packed.weight, packed.scales, packed.biases))
    else:
        weight, scales, biases = _in_steps(mx.array(dense(raw, kind)), affine_bits(kind))
    made = weight, scales.astype(dtype), biases.astype(dtype)
    mx.eval(made)
    return made


def _in_steps(values: mx.array, bits: int) -> tuple[mx.array, mx.array, mx.array]:
    """MLX's affine form, of as many steps for numbers below zero as above: on GPUs MLX counts zero in where a group's
    numbers are all below it, so those are turned around."""
    groups = values.reshape(len(values), -1, GROUP)
    signs = mx.where(groups.max(axis=-1) < 0, -1.0, 1.0)
    weight, scales, biases = mx.quantize((groups * signs[..., None]).reshape(values.shape), GROUP, bits)
    return weight, scales * signs, biases * signs


def _numbers(raw: np.ndarray, kind: Kind, dtype: mx.Dtype) -> mx.array:
    numbers = mx.array(dense(raw, kind)).astype(dtype)
    mx.eval(numbers)
    return numbers


def _rows(module: BlockLinear) -> Iterator[np.ndarray]:
    """The rows of all matrices one below another, so many at a time as memory allows."""
    rows = module.weight.reshape(-1, module.weight.shape[-1])
    block, size = GGML_QUANT_SIZES[module.kind]
    step = max(1, CHUNK_WEIGHTS // (rows.shape[1] // size * block))
    for start in range(0, rows.shape[0], step):
        yield np.array(rows[start : start + step])


def _joined(module: BlockLinear, chunks: list[mx.array]) -> mx.array:
    return mx.concatenate(chunks).reshape(*module.weight.shape[:-1], -1)


def _made(cls: type[nn.Module], module: BlockLinear) -> Any:
    made: Any = cls.__new__(cls)
    nn.Module.__init__(made)
    if "bias" in module:
        made.bias = module.bias
    if isinstance(module, BlockEmbedding):
        made.num_embeddings, made.dims = module.shape
    return made


_HELD: dict[type, type[BlockLinear]] = {
    nn.Linear: BlockLinear,
    nn.Embedding: BlockEmbedding,
    SwitchLinear: BlockSwitchLinear,
}
_PACKED: dict[type, type] = {
    BlockLinear: PackedLinear,
    BlockEmbedding: PackedEmbedding,
    BlockSwitchLinear: PackedSwitchLinear,
}
_PLAIN: dict[type, type] = {BlockLinear: nn.Linear, BlockEmbedding: nn.Embedding, BlockSwitchLinear: SwitchLinear}
_QUANTIZED: dict[type, type] = {
    BlockLinear: nn.QuantizedLinear,
    BlockEmbedding: nn.QuantizedEmbedding,
    BlockSwitchLinear: QuantizedSwitchLinear,
}
