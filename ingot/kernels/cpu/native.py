"""Matrices as the kernels keep them, and products with them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ingot.kernels.native.extension import available, extension

if TYPE_CHECKING:
    import mlx.core as mx

BITS = (2, 3, 4, 5, 6, 8)
GROUPS = (32, 64, 128)
MXFP4 = {"mode": "mxfp4", "bits": 4, "group_size": 32}


class GateCurve(NamedTuple):
    """gate * sigmoid(slope * gate) * (up + offset), with gate cut off above `limit`, up on both sides."""

    slope: float = 1.0
    limit: float = math.inf
    offset: float = 0.0


def covers(*, bits: int, group_size: int, mode: str) -> bool:
    """Whether a packed layer of this form can be multiplied as it is."""
    if {"mode": mode, "bits": bits, "group_size": group_size} == MXFP4:
        return available()
    return available() and mode == "affine" and bits in BITS and group_size in GROUPS


def packed_weights(
    quanta: mx.array,
    scales: mx.array,
    biases: mx.array | None,
    bias: mx.array | None,
    group_size: int,
    bits: int,
) -> Any:
    """A packed matrix, put into the order that this machine's kernels want. Only where `covers`.

    With an axis more, there is one for each of several experts. Its `arrays` (quanta, scales, biases) take the place of
    those given, which need not be kept. Without biases, the mode is mxfp4.
    """
    if biases is None:
        return extension().Weights.mxfp4(quanta, scales, bias)
    return extension().Weights.packed(quanta, scales, biases, bias, group_size=group_size, bits=bits)


def block_weights(blocks: mx.array, bias: mx.array | None, bits: int) -> Any:
    """A matrix uint8 [rows, bytes of a row] in the blocks of a GGUF file's K format with so many bits.

    With an axis more, there is one for each of several experts. Its `arrays` (quanta, factors) take the place of what
    was given, in as many bytes.
    """
    return extension().Weights.blocks(blocks, bias, bits=bits)


def plain_weights(weight: mx.array, bias: mx.array | None) -> Any:
    """A matrix [rows, columns], or [experts, rows, columns]. bfloat16 and float16 are kept as they are."""
    return extension().Weights.plain(weight, bias)


def gguf_file(path: str, size: int, changed_ns: int) -> Any:
    """A GGUF file to read tensors from; None without kernels. Raises RuntimeError unless it is of that size and was
    last changed then."""
    native = extension()
    return None if native is None else native.GgufFile(path, size=size, changed_ns=changed_ns)


def file_bytes(pieces: Sequence[tuple[Any, int]], rows: int, row_bytes: int, head: int) -> mx.array:
    """Rows of pieces (file, offset), so many of each, as they lie there: uint8, read when they are needed. Of each
    `head` rows, unless it is 0, those that are even come first."""
    made: mx.array = extension().file_bytes(pieces, rows=rows, row_bytes=row_bytes, head=head)
    return made


def file_packed(
    pieces: Sequence[tuple[Any, int]], rows: int, row_bytes: int, head: int, bits: int, *, minima: bool
) -> list[mx.array]:
    """The same of blocks of 32 weights, as MLX packs them: quanta, scales and biases."""
    native = extension()
    made: list[mx.array] = native.file_packed(
        pieces, rows=rows, row_bytes=row_bytes, head=head, bits=bits, minima=minima
    )
    return made


def linear(x: mx.array, weights: Any) -> mx.array:
    """x [..., columns] times the transpose of weights [rows, columns], with their bias."""
    product: mx.array = extension().linear(x, weights)
    return product


def lookup(ids: mx.array, weights: Any) -> mx.array:
    """The rows of packed weights that `ids` name."""
    rows: mx.array = extension().lookup(ids, weights)
    return rows


def gather(x: mx.array, indices: mx.array, weights: Any) -> mx.array:
    """x [..., columns] times the weights of the experts `indices` [..., k]: [..., k, rows]."""
    product: mx.array = extension().gather(x, indices, weights)
    return product


def gather_gated(x: mx.array, indices: mx.array, experts: Sequence[Any], gating: GateCurve) -> mx.array:
    """The MLPs of the experts `indices` [..., k], whose weights are `experts` (gate, up, down): [..., k, rows]."""
    gate, up, down = experts
    slope, limit, offset = gating
    made: mx.array = extension().gather_gated(x, indices, gate, up, down, slope=slope, limit=limit, offset=offset)
    return made
