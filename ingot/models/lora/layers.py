"""Linear layers with LoRA adapters, chosen for each token.

A layer that some adapter is for is swapped for one with the stacked matrices of all adapters. In a forward pass in
which no token has an adapter, it computes what it did before.

On CPUs, modules that compute several layers, or a mixer and what is around it, as one operation run the layers' own
modules in a pass with adapters; so rows with and without an adapter take separate passes there. On CUDA, decode graphs
with adapters have two more kernels for each product, and are made again when adapters come or go. Loading tries an
adapter on a few tokens: every layer that it is for must have been used.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import accumulate, groupby
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ingot.kernels.cpu import native
from ingot.kernels.lora import CHUNK, LoraMatrices
from ingot.models.layers.modules import extend
from ingot.models.lora.weights import LoraPair

FEW_LORA_TOKENS = 64
"""Tokens up to which each is multiplied by its own adapter's matrices; of more, those that follow one another and have
the same adapter are multiplied together."""
RANK_STEP = CHUNK
"""Ranks are padded to multiples of it."""


@dataclass(frozen=True)
class TokenLoras:
    """The tokens of a forward pass: which slot's adapter each of them goes through; 0 is none."""

    slots: tuple[int, ...]
    _numbers: dict[tuple[int, ...], mx.array] = field(default_factory=dict)

    @cached_property
    def used(self) -> frozenset[int]:
        return frozenset(self.slots) - {0}

    @cached_property
    def runs(self) -> tuple[tuple[int, int, int], ...]:
        """Tokens [begin, end) of one slot each."""
        found, begin = [], 0
        for slot, run in groupby(self.slots):
            end = begin + len(list(run))
            found.append((begin, end, slot))
            begin = end
        return tuple(found)

    def numbers_in(self, order: tuple[int, ...]) -> mx.array:
        """[tokens]: the number of each token's slot in `order`, from 1, and 0 for those that are not in it."""
        if order not in self._numbers:
            numbers = {slot: number for number, slot in enumerate(order, start=1)}
            self._numbers[order] = mx.array([numbers.get(slot, 0) for slot in self.slots], dtype=mx.uint32)
        return self._numbers[order]


class LoraMapping:
    """Which adapters the open forward pass of a model goes through. Only the engine thread may use it."""

    def __init__(self) -> None:
        self.opened: TokenLoras | None = None
        self.order: tuple[int, ...] = ()
        """Slots of all adapters, in the order in which their matrices lie."""
        self.version = 0
        """Changes whenever the matrices do."""

    @contextmanager
    def over(self, slots: Sequence[int]) -> Iterator[None]:
        """A pass over tokens with these slots, in order."""
        before = self.opened
        self.opened = TokenLoras(tuple(slots)) if any(slots) else None
        try:
            yield
        finally:
            self.opened = before

    @contextmanager
    def within(self, begin: int, end: int) -> Iterator[None]:
        """Computing the open pass's tokens [begin, end) alone."""
        with self.over(() if self.opened is None else self.opened.slots[begin:end]):
            yield


class LoraMatrixStack:
    """The adapters' matrices of layers with the same input: one layer, or those of a joined product."""

    def __init__(
        self,
        mapping: LoraMapping,
        paths: Sequence[str],
        inputs: int,
        outputs: Sequence[int],
        dtype: mx.Dtype,
        *,
        quick: bool,
    ) -> None:
        """`quick`: the native kernels multiply, if this is a single layer."""
        self.paths, self.inputs, self.ends = tuple(paths), inputs, tuple(accumulate(outputs))
        self._lora_mapping, self._dtype, self._quick = mapping, dtype, quick and len(paths) == 1
        self._pairs: list[dict[int, LoraPair]] = [{} for _ in paths]  # by slot
        self._order: tuple[int, ...] = ()
        self._native: tuple[Any, Any] | None = None
        self.matrices: LoraMatrices | None = None
        """Of the adapters in their order, after one that adds nothing."""
        self.used_paths: set[str] = set()
        """Paths of layers that were called in a pass with adapters."""

    @property
    def nbytes(self) -> int:
        return 0 if self.matrices is None else self.matrices.into.nbytes + self.matrices.out.nbytes

    @property
    def slots(self) -> frozenset[int]:
        return frozenset(slot for pairs in self._pairs for slot in pairs)

    def hold(self, path: str, slot: int, pair: LoraPair) -> None:
        """Takes effect at the next `stack`."""
        self._pairs[self.paths.index(path)][slot] = pair

    def drop(self, slot: int) -> None:
        for pairs in self._pairs:
            pairs.pop(slot, None)

    def stack(self, order: tuple[int, ...]) -> None:
        """Stack the matrices of all adapters, in this order."""
        self._order, self._native = order, None
        if not self.slots:
            self.matrices = None
            return
        rank = padded_rank(max(pair.rank for pairs in self._pairs for pair in pairs.values()))
        into, out = (mx.stack([self._halves(slot, half, rank) for slot in (0, *order)]) for half in (0, 1))
        self.matrices = LoraMatrices(into, out, self.ends)
        mx.eval(into, out)
        for position, slot in enumerate(order, start=1):
            for number, pairs in enumerate(self._pairs):
                if slot in pairs:
                    pairs[slot] = self._view(position, number, pairs[slot].rank)
        if self._quick:
            self._native = native.plain_weights(into, None), native.plain_weights(out, None)

    def _halves(self, slot: int, half: int, rank: int) -> mx.array:
        """All layers' parts of an adapter's first or second matrix."""
        return mx.concatenate(
            [self._half(pairs.get(slot), half, rank, number) for number, pairs in enumerate(self._pairs)]
        )

    def _half(self, pair: LoraPair | None, half: int, rank: int, number: int) -> mx.array:
        """A layer's part of an adapter's first [rank, inputs] or second matrix [outputs, rank]."""
        if pair is None:
            outputs = self.ends[number] - self._begin(number)
            return mx.zeros((outputs, rank) if half else (rank, self.inputs), self._dtype)
        matrix = (pair.b if half else pair.a).T.astype(self._dtype)
        wider = (0, rank - pair.rank)
        return mx.pad(matrix, [(0, 0), wider] if half else [wider, (0, 0)])

    def _view(self, position: int, number: int, rank: int) -> LoraPair:
        """The matrices of one adapter for one layer, out of the stack."""
        assert self.matrices is not None
        into, out = self.matrices.into[position], self.matrices.out[position]
        begin = number * out.shape[-1]
        return LoraPair(into[begin : begin + rank].T, out[self._begin(number) : self.ends[number], :rank].T)

    def _begin(self, number: int) -> int:
        return self.ends[number - 1] if number else 0

    def __call__(self, x: mx.array, y: mx.array) -> mx.array:
        """`y`, the concatenated products of x with all layers, plus what adapters add to them."""
        return self.add_to(y, x, range(len(self.paths)))

    def add_to(self, y: mx.array, x: mx.array, numbers: Sequence[int]) -> mx.array:
        """The same for some of the layers."""
        added = self._multiply(numbers, x.reshape(-1, x.shape[-1]))
        return y if added is None else y + added.reshape(y.shape).astype(y.dtype)

    def _multiply(self, numbers: Sequence[int], x: mx.array) -> mx.array | None:
        """What adapters add to products of x [tokens, inputs]; None where they add nothing."""
        tokens = self._lora_mapping.opened
        if tokens is None:
            return None
        self.used_paths.update(self.paths[number] for number in numbers)
        if x.shape[0] != len(tokens.slots):
            raise ValueError(f"{self.paths[0]} gets {x.shape[0]} of {len(tokens.slots)} tokens")
        if self.matrices is None or not tokens.used & self.slots:
            return None
        x = x.astype(self._dtype)
        chosen = tokens.numbers_in(self._order)
        if self._native is not None:
            inner = native.gather_experts(x, chosen[:, None], self._native[0])[:, 0]
            return native.gather_experts(inner, chosen[:, None], self._native[1])[:, 0]
        if len(tokens.slots) > FEW_LORA_TOKENS or not _can_gather(self._dtype):
            return mx.concatenate([self._multiply_run(numbers, x[begin:end], slot) for begin, end, slot in tokens.runs])
        return self._multiply_gathered(numbers, x, chosen, self.matrices)

    def _multiply_gathered(
        self, numbers: Sequence[int], x: mx.array, chosen: mx.array, matrices: LoraMatrices
    ) -> mx.array:
        """Each token by its own adapter's matrices."""
        rank = matrices.out.shape[2]
        inner = mx.gather_mm(x[:, None], matrices.into.swapaxes(1, 2), rhs_indices=chosen)
        parts = []
        for number in numbers:
            out = matrices.out[:, self._begin(number) : self.ends[number]].swapaxes(1, 2)
            own = inner[..., number * rank : (number + 1) * rank]
            parts.append(mx.gather_mm(own, out, rhs_indices=chosen)[:, 0])
        return _join_columns(parts)

    def _multiply_run(self, numbers: Sequence[int], x: mx.array, slot: int) -> mx.array:
        """Tokens that all have the same adapter."""
        parts = []
        for number in numbers:
            pair = self._pairs[number].get(slot)
            size = self.ends[number] - self._begin(number)
            parts.append(mx.zeros((x.shape[0], size), self._dtype) if pair is None else x @ pair.a @ pair.b)
        return _join_columns(parts)


@cache
def _can_gather(dtype: mx.Dtype) -> bool:
    """Whether MLX multiplies by chosen matrices of that format here."""
    try:
        mx.eval(mx.gather_mm(mx.ones((1, 1, 8), dtype), mx.ones((1, 8, 8), dtype), rhs_indices=mx.array([0])))
    except (RuntimeError, ValueError):
        return False
    return True


def padded_rank(rank: int) -> int:
    return -(-rank // RANK_STEP) * RANK_STEP


def _join_columns(parts: Sequence[mx.array]) -> mx.array:
    return parts[0] if len(parts) == 1 else mx.concatenate(list(parts), axis=-1)


class LoraLinear(nn.Module):
    """Adds what adapters add to the product of the linear layer that it extends."""

    _matrices: LoraMatrixStack
    _number: int  # among their layers

    def __call__(self, x: mx.array) -> mx.array:
        return self._matrices.add_to(super().__call__(x), x, (self._number,))


def with_lora(layer: nn.Module, matrices: LoraMatrixStack, number: int) -> nn.Module:
    """The same layer, with what adapters add."""
    replacement: LoraLinear = extend(layer, LoraLinear, "Adapted")
    replacement._matrices, replacement._number = matrices, number
    return replacement
