"""Products with a Q4_K_M file's weights on CPUs: in the file's blocks, against the same weights in MLX's formats.

python -m bench.blocks                        a decoding row, some rows, a prompt; both formats, alternating
python -m bench.blocks --rounds 3 --layers 1  to see that it works
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES
from gguf.constants import GGMLQuantizationType as Kind

import ingot.engine  # noqa: F401  (binds the fast BLAS before mlx)
from ingot.kernels.cpu import native

HIDDEN, INNER, KV, VOCAB = 1536, 8960, 256, 32000
MATRICES = {
    "attn_q": (Kind.Q4_K, HIDDEN, HIDDEN),
    "attn_k": (Kind.Q4_K, KV, HIDDEN),
    "attn_v": (Kind.Q6_K, KV, HIDDEN),
    "attn_output": (Kind.Q4_K, HIDDEN, HIDDEN),
    "ffn_gate": (Kind.Q4_K, INNER, HIDDEN),
    "ffn_up": (Kind.Q4_K, INNER, HIDDEN),
    "ffn_down": (Kind.Q6_K, HIDDEN, INNER),
}
HEAD = (Kind.Q6_K, VOCAB, HIDDEN)
COUNTS = (1, 8, 64)


@dataclass(frozen=True, slots=True)
class Forms:
    """One matrix, in both forms."""

    columns: int
    file_bytes: int
    blocks: Any
    unfolded: Any


def forms(kind: Kind, rows: int, columns: int, dice: np.random.Generator) -> Forms:
    import mlx.core as mx

    from ingot.models.gguf.quant_types import BLOCK_BITS, PACKED_BITS, QUANT_GROUP, dequantize_rows, pack_blocks

    block, size = GGML_QUANT_SIZES[kind]
    raw = dice.integers(0, 256, (rows * columns // block, size), dtype=np.uint8)
    units = {Kind.Q4_K: (0, 2), Kind.Q6_K: (208,)}[kind]
    for at in units:
        raw[:, at : at + 2] = np.full((len(raw), 1), 1e-4, np.float16).view(np.uint8)
    raw = raw.reshape(rows, -1)
    if kind in PACKED_BITS:
        packed = pack_blocks(raw, kind)
        parts = [mx.array(part) for part in (packed.weight, packed.scales, packed.biases)]
        unfolded = native.packed_weights(parts[0], parts[1], parts[2], None, QUANT_GROUP, PACKED_BITS[kind])
    else:
        unfolded = native.plain_weights(mx.array(dequantize_rows(raw, kind).astype(np.float16)), None)
    return Forms(columns, raw.nbytes, native.block_weights(mx.array(raw), None, BLOCK_BITS[kind]), unfolded)


def timed(matrices: Sequence[Forms], count: int, chosen: Callable[[Forms], Any]) -> float:
    """Seconds for all products of a step of so many rows."""
    import mlx.core as mx

    inputs = {columns: mx.random.normal((count, columns)) for columns in {matrix.columns for matrix in matrices}}
    mx.eval(list(inputs.values()))
    begun = time.perf_counter()
    for matrix in matrices:
        mx.eval(native.linear(inputs[matrix.columns], chosen(matrix)))
    return time.perf_counter() - begun


def weight_bytes(matrices: Sequence[Forms], chosen: Callable[[Forms], Any]) -> int:
    return sum(array.nbytes for matrix in matrices for array in chosen(matrix).arrays)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every round's figures here")
    options = parser.parse_args()
    dice = np.random.default_rng(0)
    matrices = [forms(*shape, dice) for shape in [*MATRICES.values()] * options.layers + [HEAD]]
    chosen = {"blocks": lambda matrix: matrix.blocks, "unfolded": lambda matrix: matrix.unfolded}
    size = sum(matrix.file_bytes for matrix in matrices)
    for name, form in chosen.items():
        print(f"{name}: {weight_bytes(matrices, form) / size:.3f} of the file's {size / 1e6:.0f} MB")
    kept: dict[str, dict[str, list[float]]] = {}
    for count in COUNTS:
        rounds = {name: [] for name in chosen}
        for _ in range(options.rounds):
            for name, form in chosen.items():
                rounds[name].append(timed(matrices, count, form))
        kept[str(count)] = rounds
        blocks, unfolded = (statistics.median(rounds[name]) * 1e3 for name in ("blocks", "unfolded"))
        print(
            f"{count:3} rows: blocks {blocks:.1f} ms, unfolded {unfolded:.1f} ms, {unfolded / blocks:.2f} times as fast"
        )
    if options.json:
        options.json.write_text(json.dumps(kept))


if __name__ == "__main__":
    main()
