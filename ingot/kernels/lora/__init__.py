"""What LoRA adapters add to products of few tokens, each token's own: two thin products, as kernels of a graph."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx

from ingot.kernels.gpu.kernel_source import Kernel, LaunchConfig, OutputSpec, read_source
from ingot.kernels.gpu.launcher import Launcher

SOURCE = Path(__file__).parent / "source"
PACKED, DENSE = (SOURCE.parents[1] / room / "source" for room in ("packed_matmul", "dense_matmul"))
CHUNK = 8
"""Numbers that are read at once: ranks and what goes in are multiples of it."""
MOST_PARTS = 4
_WARPS = 8
_THREADS = 128
_SHRINK = ("states", "matrices", "places")
_EXPAND = ("product", "inner", "matrices", "places")


@cache
def lora_shrink_kernel() -> Kernel:
    return Kernel("lora", "shrink", _SHRINK, ("inner",), "", read_source(SOURCE / "shrink.h"))


@cache
def lora_expand_kernel(*, gated: bool) -> Kernel:
    header = read_source(SOURCE / "column.h")
    if gated:
        header += "#define GATED\n" + read_source(PACKED / "exponential.h") + read_source(DENSE / "gate.h")
    return Kernel(
        "lora", "expand_gated" if gated else "expand", _EXPAND, ("sums",), header, read_source(SOURCE / "expand.h")
    )


class LoraMatrices(NamedTuple):
    """Of all adapters, beside layers that are one product. Those at place 0 are never read."""

    into: mx.array  # [adapters, layers * rank, inputs]
    out: mx.array  # [adapters, outputs of all layers, rank]
    ends: tuple[int, ...]  # where each layer's outputs end

    @property
    def is_covered(self) -> bool:
        """Whether the kernels can multiply by them."""
        parts, inputs, rank = len(self.ends), self.into.shape[2], self.out.shape[2]
        return parts <= MOST_PARTS and inputs % CHUNK == 0 and rank % CHUNK == 0 and rank > 0


def add_lora_products(
    run: Launcher, states: mx.array, product: mx.array, matrices: LoraMatrices, places: mx.array, *, gated: bool = False
) -> mx.array:
    """The product of states [tokens, inputs] with what the adapter at each token's place adds to it; of `gated` ones,
    of two layers or the halves of one, silu of the first's times the second's."""
    inner = _shrink_product(run, states, matrices.into, places)
    tokens, size = product.shape
    first, second, third = _bounds(matrices.ends)
    given = size // 2 if gated else size
    template = (
        *(("T", product.dtype), ("SIZE", size), ("RANK", matrices.out.shape[2]), ("PARTS", len(matrices.ends))),
        *(("FIRST", first), ("SECOND", second), ("THIRD", third), ("THREADS", _THREADS)),
    )
    work = LaunchConfig(
        template, (-(-given // _THREADS), tokens, 1), _THREADS, (OutputSpec((tokens, given), product.dtype),)
    )
    return run(lora_expand_kernel(gated=gated), [product, inner, matrices.out, places], work)[0]


def _shrink_product(run: Launcher, states: mx.array, into: mx.array, places: mx.array) -> mx.array:
    tokens, size = states.shape
    ranks = into.shape[1]
    template = (("T", states.dtype), ("SIZE", size), ("RANKS", ranks), ("WARPS", _WARPS))
    work = LaunchConfig(template, (ranks, tokens, 1), _WARPS * 32, (OutputSpec((tokens, ranks), states.dtype),))
    return run(lora_shrink_kernel(), [states, into, places], work)[0]


def _bounds(ends: Sequence[int]) -> tuple[int, int, int]:
    """Where the first three of up to four layers end; what is not there ends with the last."""
    last = len(ends) - 1
    return ends[0], ends[min(1, last)], ends[min(2, last)]
