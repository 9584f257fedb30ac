"""Products with weights of 16 bits against MLX's own, on the device at hand: what differs or is slower is not used.
Each kind of layer is compared once, and the largest is raced.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from statistics import median

import mlx.core as mx

from ingot.kernels.dense_matmul.kernels import (
    DENSE_TUNING,
    MOST_ROWS,
    TUNING_CHOICES,
    DenseProduct,
    DenseTuning,
    DenseWeights,
    dense_product,
)
from ingot.kernels.device import Device
from ingot.kernels.gpu.emulator import Emulator
from ingot.kernels.gpu.launcher import compile_kernels, kernel_launcher
from ingot.kernels.selfcheck import BOUNDS, Case, Verdicts, check_cases

RACED_BYTES = 1 << 27
"""Of weights from which on a product takes longer than asking for it, and more than caches hold."""
DenseKey = tuple[mx.Dtype, tuple[int, ...], bool]


class CheckedDense(Verdicts[DenseKey, DenseTuning]):
    """Those of a device. What is slower is not used either. Metal is left to MLX."""

    _slower: str | None = None

    def meet(self, layers: Iterable[DenseWeights]) -> None:
        """Compile for all layers of a model at once, and let the largest be raced."""
        known = {weights.kind: weights for weights in layers if self._could_be(weights)}
        if not known:
            return
        compile_dense_kernels(self._device, known.values())
        largest = max(known.values(), key=lambda weights: weights.weight.nbytes)
        if largest.weight.nbytes >= RACED_BYTES and not isinstance(kernel_launcher(self._device), Emulator):
            tuning = self._tuning(largest)
            if tuning is not None:
                self._slower = race_dense_product(dense_product(self._device, tuning), largest)
            if self._slower is not None:
                self.wrong[largest.kind] = self._slower

    def of(self, weights: DenseWeights) -> DenseProduct | None:
        """None where there is no kernel for such weights that is right and fast."""
        if self._slower is not None or not self._could_be(weights):
            return None
        tuning = self._tuning(weights)
        return None if tuning is None else dense_product(self._device, tuning)

    def _could_be(self, weights: DenseWeights) -> bool:
        return self._device.kind == "cuda" and kernel_launcher(self._device) is not None and weights.is_covered

    def _tuning(self, weights: DenseWeights) -> DenseTuning | None:
        """How the product is cut that is right; None where none is."""
        tuning = self._way(weights.kind, TUNING_CHOICES, lambda way: check_dense_product(self._device, weights, way))
        if tuning is not None:
            self.wrong.pop(weights.kind, None)  # by another cut
        return tuning


ROWS = (MOST_ROWS, 20, 11, 3, 1)
"""Of each width some."""
ENDS = 128
"""Outputs at both ends that are compared: as float32, all of them might not fit beside a model."""
RACED, ROUNDS, TIMES, SLACK = (1, 8), 9, 4, 1.3
"""Rows that keep their bits, and whole layers as one launch, are worth that much."""


def compile_dense_kernels(device: Device, layers: Iterable[DenseWeights]) -> None:
    """All kernels for such layers at once, where compiling is ours to do."""
    compile_kernels(device, lambda run: [[*_cases(DenseProduct(run), weights)] for weights in layers])


def check_dense_product(device: Device, weights: DenseWeights, tuning: DenseTuning = DENSE_TUNING) -> str | None:
    """What is wrong with the products of a layer on this device; None where they are right."""
    return check_cases(device, lambda: dense_product(device, tuning), lambda product: _cases(product, weights))


def race_dense_product(
    product: DenseProduct, weights: DenseWeights, clock: Callable[[], float] = time.perf_counter
) -> str | None:
    """How much slower it is than MLX's own; None where it is not, or hardly."""
    for rows in RACED:
        x = _random_rows(rows, weights)
        ours, theirs = _median_times(
            [partial(product, x, weights.weight), partial(mx.matmul, x, weights.weight.T)], clock
        )
        if ours > SLACK * theirs:
            return f"takes {ours / theirs:.2f} times as long as MLX's own for {rows} rows, {weights}"
    return None


def _median_times(works: list[Callable[[], mx.array]], clock: Callable[[], float]) -> list[float]:
    """Seconds of each, turn by turn."""
    for work in works:
        mx.eval(work())
    rounds = [[_time_work(work, clock) for work in works] for _ in range(ROUNDS)]
    return [median(each) for each in zip(*rounds, strict=True)]


def _time_work(work: Callable[[], mx.array], clock: Callable[[], float]) -> float:
    begun = clock()
    mx.eval([work() for _ in range(TIMES)])
    return clock() - begun


def _cases(product: DenseProduct, weights: DenseWeights) -> Iterator[Case]:
    x = _random_rows(max(ROWS), weights)
    found = [product(x[:rows], weights.weight, bias=weights.bias) for rows in ROWS]
    for ends in (slice(None, ENDS), slice(-ENDS, None)):
        wanted = x.astype(mx.float32) @ weights.weight[ends].astype(mx.float32).T
        wanted = wanted if weights.bias is None else wanted + weights.bias[ends]
        yield Case(f"multiply differs for {weights}", found[0][:, ends], wanted, BOUNDS[weights.weight.dtype])
    for some in found:
        said = f"a row's product depends on how many rows there are, for {weights}"
        yield Case(said, some, found[0][: some.shape[0]])


def _random_rows(rows: int, weights: DenseWeights) -> mx.array:
    drawn = mx.random.normal((rows, weights.weight.shape[1]), key=mx.random.key(7))
    return drawn.astype(weights.weight.dtype)
