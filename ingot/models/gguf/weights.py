"""GGUF weights in a running model: layers that hold blocks of the K formats, and tensors that stay in the GGUF file.

The form of blocks depends on the device. The native kernels multiply by them exactly, in the file's own number of bits.
MLX has no form with integer scales in units of their own: there, the two formats with a scale for 32 weights keep their
codes and round the scales, and the others, with one for 16, are quantised anew with two more bits, whose step is at
most about a quarter of theirs.

Tensors that stay in the file are arrays like those that converting the file would have written. The native kernels read
them lazily; without those they are read at once, which takes more memory for a while.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from gguf.constants import GGML_QUANT_SIZES
from gguf.constants import GGMLQuantizationType as Kind
from mlx.utils import tree_unflatten

from ingot.errors import ModelError
from ingot.kernels.cpu import native
from ingot.models.checkpoint import pause_loading
from ingot.models.files.gguf_files import GgufReferences, ReferencedTensor, references_in
from ingot.models.gguf.file import GGUF_MAGIC
from ingot.models.gguf.quant_types import (
    BLOCK_BITS,
    BLOCKS_KEY,
    PACKED_BITS,
    QUANT_GROUP,
    SMALL_BLOCKS,
    dequantize_rows,
    pack_blocks,
    rope_head_order,
)
from ingot.models.layers.mlp import PackedSwitchLinear
from ingot.models.layers.modules import PackedEmbedding, PackedLinear
from ingot.upstream import QuantizedSwitchLinear, SwitchLinear

CHUNK_WEIGHTS = 1 << 24  # weights that are dequantised at a time
NUMBER_DTYPES = {Kind.F32: mx.float32, Kind.F16: mx.float16, Kind.BF16: mx.bfloat16}


class BlockLinear(nn.Module):
    """A placeholder for a layer: `weight` is uint8 [..., rows, bytes of a row], as in the file."""

    def __init__(self, module: Any, kind: Kind) -> None:
        super().__init__()
        block, size = GGML_QUANT_SIZES[kind]
        *rows, columns = module.weight.shape
        self.weight = mx.zeros((*rows, columns // block * size), mx.uint8)
        if "bias" in module:
            self.bias = module.bias
        self.kind, self.shape = kind, tuple(module.weight.shape)


class BlockEmbedding(BlockLinear): ...


class BlockSwitchLinear(BlockLinear): ...


def with_gguf_blocks(
    classes: Callable[..., tuple[type, type]], others: Collection[str] = ()
) -> Callable[..., tuple[type, type]]:
    """Wraps a finder of model classes: the model has layers of blocks where its config says so. Weights in `others` are
    not the model's."""

    def find_classes(config: dict[str, Any]) -> tuple[type, type]:
        model_class, args_class = classes(config=config)
        blocks: Mapping[str, str] = config.get(BLOCKS_KEY) or {}
        kinds = {path: kind for path, kind in blocks.items() if f"{path}.weight" not in others}
        if not kinds:
            return model_class, args_class

        class Blocked(model_class):  # type: ignore[misc, valid-type]
            def __init__(self, args: Any) -> None:
                super().__init__(args)
                hold_blocks(self, kinds)

        return Blocked, args_class

    return find_classes


def hold_blocks(model: nn.Module, kinds: Mapping[str, str]) -> None:
    """Swap the layers at these paths for ones whose weights are blocks of these kinds."""
    modules = dict(model.named_modules())
    layers = [(path, _BLOCK_LAYERS[type(modules[path])](modules[path], Kind[kind])) for path, kind in kinds.items()]
    model.update_modules(tree_unflatten(layers))


def is_block_layer(module: Any) -> bool:
    return isinstance(module, BlockLinear)


def plain_stand_in(module: BlockLinear) -> nn.Module:
    """A layer of the same shape with lazy weights, which take no memory unless they are computed."""
    layer = _new_layer(_PLAIN[type(module)], module)
    layer.weight = mx.zeros(module.shape)
    return layer


def native_block_layer(module: BlockLinear) -> nn.Module:
    """The same layer for the native kernels."""
    bits = BLOCK_BITS[module.kind]
    layer = _new_layer(_NATIVE[type(module)], module)
    layer.native = native.block_weights(module.weight, module.get("bias"), bits)
    layer.weight, layer.scales = layer.native.arrays[:2]
    layer.group_size, layer.bits, layer.mode = QUANT_GROUP, bits, module.kind.name
    return layer


def exact_layer(module: BlockLinear, dtype: mx.Dtype) -> nn.Module:
    """The same layer in MLX's affine form where that can have the same values, else as plain numbers.

    Numbers are of `dtype`, or float32 where that cannot hold the largest.
    """
    if module.kind in PACKED_BITS:
        return affine_layer(module, mx.float32 if dtype == mx.float16 else dtype)
    layer = _new_layer(_PLAIN[type(module)], module)
    layer.weight = _dequantized(module, dtype)
    if not mx.isfinite(layer.weight).all().item():
        layer.weight = _dequantized(module, mx.float32)
    return layer


def affine_layer(module: BlockLinear, dtype: mx.Dtype) -> nn.Module:
    """The same layer in MLX's affine form, whose factors are rounded to `dtype`."""
    layer = _new_layer(_QUANTIZED[type(module)], module)
    parts = [_affine_parts(raw, module.kind, dtype) for raw in _row_chunks(module)]
    layer.weight, layer.scales, layer.biases = (
        _join_chunks(module, list(chunks)) for chunks in zip(*parts, strict=True)
    )
    layer.group_size, layer.bits, layer.mode = QUANT_GROUP, affine_bits(module.kind), "affine"
    if isinstance(layer, QuantizedSwitchLinear):
        layer.global_scale = None  # which other modes have
    return layer


def affine_bits(kind: Kind) -> int:
    """Bits of a weight in MLX's affine form."""
    return PACKED_BITS.get(kind) or BLOCK_BITS[kind] + 2


def _affine_parts(raw: np.ndarray, kind: Kind, dtype: mx.Dtype) -> tuple[mx.array, mx.array, mx.array]:
    if kind in PACKED_BITS:
        packed = pack_blocks(raw, kind)
        assert packed.biases is not None, "affine forms have biases"
        weight, scales, biases = (mx.array(part) for part in (packed.weight, packed.scales, packed.biases))
    else:
        weight, scales, biases = _quantize_symmetric(mx.array(dequantize_rows(raw, kind)), affine_bits(kind))
    parts = weight, scales.astype(dtype), biases.astype(dtype)
    mx.eval(parts)
    return parts


def _quantize_symmetric(values: mx.array, bits: int) -> tuple[mx.array, mx.array, mx.array]:
    """MLX's affine form, with as many steps for numbers below zero as above: on GPUs MLX includes zero where a group's
    numbers are all below it, so those groups are negated."""
    groups = values.reshape(len(values), -1, QUANT_GROUP)
    signs = mx.where(groups.max(axis=-1) < 0, -1.0, 1.0)
    weight, scales, biases = mx.quantize((groups * signs[..., None]).reshape(values.shape), QUANT_GROUP, bits)
    return weight, scales * signs, biases * signs


def _dequantized(module: BlockLinear, dtype: mx.Dtype) -> mx.array:
    chunks = []
    for raw in _row_chunks(module):
        chunks.append(mx.array(dequantize_rows(raw, module.kind)).astype(dtype))
        mx.eval(chunks[-1])
    return _join_chunks(module, chunks)


def _row_chunks(module: BlockLinear) -> Iterator[np.ndarray]:
    """The rows of all matrices, as many at a time as memory allows."""
    rows = module.weight.reshape(-1, module.weight.shape[-1])
    block, size = GGML_QUANT_SIZES[module.kind]
    step = max(1, CHUNK_WEIGHTS // (rows.shape[1] // size * block))
    for start in range(0, rows.shape[0], step):
        yield np.array(rows[start : start + step])


def _join_chunks(module: BlockLinear, chunks: list[mx.array]) -> mx.array:
    return mx.concatenate(chunks).reshape(*module.weight.shape[:-1], -1)


def _new_layer(cls: type[nn.Module], module: BlockLinear) -> Any:
    layer: Any = cls.__new__(cls)
    nn.Module.__init__(layer)
    if "bias" in module:
        layer.bias = module.bias
    if isinstance(module, BlockEmbedding):
        layer.num_embeddings, layer.dims = module.shape
    return layer


_BLOCK_LAYERS: dict[type, type[BlockLinear]] = {
    nn.Linear: BlockLinear,
    nn.Embedding: BlockEmbedding,
    SwitchLinear: BlockSwitchLinear,
}
_NATIVE: dict[type, type] = {
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


def with_gguf_tensors(classes: Callable[..., tuple[type, type]], folder: Path) -> Callable[..., tuple[type, type]]:
    """Wraps a finder of model classes: the model also loads the weights that are in a GGUF file, not in its folder."""
    references = references_in(folder)
    if references is None:
        return classes
    read_tensors = partial(read_referenced_tensors, references)

    def find_classes(config: dict[str, Any]) -> tuple[type, type]:
        model_class, args_class = classes(config=config)

        class InPlace(model_class):  # type: ignore[misc, valid-type]
            def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
                whole = weights | read_tensors()
                return super().sanitize(whole) if hasattr(model_class, "sanitize") else whole

        return InPlace, args_class

    return find_classes


def read_referenced_tensors(references: GgufReferences) -> dict[str, mx.array]:
    """The tensors by name, packed ones with their scales and biases. Raises ModelError where a file is not as it
    was."""
    references.check()
    files = [_GgufSource(file.path, file.size, file.changed_ns) for file in references.files]
    tensors: dict[str, mx.array] = {}
    for name, tensor in references.tensors.items():
        try:
            parts = _read_tensor(tensor, files)
        except (LookupError, ValueError, TypeError, ArithmeticError, OSError, RuntimeError) as error:
            raise ModelError(f"the tensor {name!r} cannot be read from its GGUF file: {error}") from error
        names = [name, *(f"{name.rpartition('.')[0]}.{part}" for part in ("scales", "biases"))]
        tensors |= dict(zip(names, parts, strict=False))
    return tensors


class _GgufSource:
    """A file that tensors are read from: lazily by the native kernels, where there are any, or at once."""

    def __init__(self, path: str, size: int, changed_ns: int) -> None:
        self.path = path
        try:
            self.lazy = native.gguf_file(path, size, changed_ns)
        except RuntimeError as error:
            raise ModelError(str(error)) from error
        if self.lazy is None:
            with Path(path).open("rb") as file:
                if file.read(len(GGUF_MAGIC)) != GGUF_MAGIC:
                    raise ModelError(f"{path} is no GGUF file")


def _read_tensor(tensor: ReferencedTensor, files: list[_GgufSource]) -> list[mx.array]:
    kind = Kind[tensor.kind]
    block, size = GGML_QUANT_SIZES[kind]
    *outer, columns = tensor.shape
    row_bytes, rows = columns // block * size, math.prod(outer) // len(tensor.pieces)
    head = rows // tensor.heads if tensor.heads else 0
    pieces = [(files[number], offset) for number, offset in tensor.pieces]
    if pieces[0][0].lazy is None:
        parts = _read_tensor_now(kind, pieces, rows, row_bytes, head)
    else:
        lazy = [(file.lazy, offset) for file, offset in pieces]
        if kind in SMALL_BLOCKS:
            parts = native.file_packed(lazy, rows, row_bytes, head, PACKED_BITS[kind], minima=SMALL_BLOCKS[kind])
        else:
            parts = [native.file_bytes(lazy, rows, row_bytes, head)]
    if kind in NUMBER_DTYPES:
        parts = [parts[0].view(NUMBER_DTYPES[kind])]
    return [part.reshape(*outer, -1) for part in parts]


def _read_tensor_now(
    kind: Kind, pieces: list[tuple[_GgufSource, int]], rows: int, row_bytes: int, head: int
) -> list[mx.array]:
    raw = np.concatenate(
        [np.fromfile(file.path, np.uint8, rows * row_bytes, offset=offset) for file, offset in pieces]
    ).reshape(-1, row_bytes)
    if head:
        raw = raw[rope_head_order(len(raw), head)]
    pause_loading()
    if kind not in SMALL_BLOCKS:
        return [mx.array(raw)]
    packed = pack_blocks(raw, kind)
    assert packed.biases is not None, "these formats have biases"
    return [mx.array(packed.weight), *(mx.array(part.astype(np.float16)) for part in (packed.scales, packed.biases))]
