"""Products with 16-bit weights are compared with MLX's own on the device at hand: a kernel that differs or is slower is
not used. Each kind of layer is compared once, and the largest is timed.
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
from ingot.kernels.measured import DENSE
from ingot.kernels.selfcheck import BOUNDS, Case, Verdicts, check_cases

RACED_BYTES = 1 << 27
"""Weights of this size are larger than caches, and a product takes longer than its launch."""
DenseKey = tuple[mx.Dtype, tuple[int, ...], bool]


class CheckedDense(Verdicts[DenseKey, DenseTuning]):
    """The dense products of a device. Metal uses MLX's."""

    _slower: str | None = None

    def meet(self, layers: Iterable[DenseWeights]) -> None:
        """Compile for all layers of a model at once, and time the largest."""
        kinds = {weights.kind: weights for weights in layers if self._is_covered(weights)}
        if not kinds:
            return
        compile_dense_kernels(self._device, kinds.values())
        largest = max(kinds.values(), key=lambda weights: weights.weight.nbytes)
        if largest.weight.nbytes >= RACED_BYTES and not isinstance(kernel_launcher(self._device), Emulator):
            tuning = self._tuning(largest)
            if tuning is not None:
                self._slower = race_dense_product(dense_product(self._device, tuning), largest)
            if self._slower is not None:
                self.wrong[largest.kind] = self._slower

    def of(self, weights: DenseWeights) -> DenseProduct | None:
        """None where there is no kernel for such weights that is right and fast."""
        if self._slower is not None or not self._is_covered(weights) or self._slower_parts.leave_out(DENSE):
            return None
        tuning = self._tuning(weights)
        return None if tuning is None else dense_product(self._device, tuning)

    def _is_covered(self, weights: DenseWeights) -> bool:
        return self._device.kind == "cuda" and kernel_launcher(self._device) is not None and weights.is_covered

    def _tuning(self, weights: DenseWeights) -> DenseTuning | None:
        """The first tuning that is right; None where none is."""
        tuning = self._first_right(
            weights.kind, TUNING_CHOICES, lambda tuning: check_dense_product(self._device, weights, tuning)
        )
        if tuning is not None:
            self.wrong.pop(weights.kind, None)  # of an earlier tuning
        return tuning


ROWS = (MOST_ROWS, 20, 11, 3, 1)
"""Some of each width."""
ENDS = 128
"""Outputs at both ends that are compared: as float32, all of them might not fit into memory."""
RACED, ROUNDS, TIMES, SLACK = (1, 8), 9, 4, 1.3
"""Batch-invariant bits, and whole layers as one launch, are worth that slowdown."""


def compile_dense_kernels(device: Device, layers: Iterable[DenseWeights]) -> None:
    """All kernels for such layers at once, where we compile them."""
    compile_kernels(device, lambda run: [[*_cases(DenseProduct(run), weights)] for weights in layers])


def check_dense_product(device: Device, weights: DenseWeights, tuning: DenseTuning = DENSE_TUNING) -> str | None:
    """The first wrong product of a layer on this device; None where all are right."""
    kind = ("dense", weights.kind, tuning)
    return check_cases(device, kind, lambda: dense_product(device, tuning), lambda product: _cases(product, weights))


def race_dense_product(
    product: DenseProduct, weights: DenseWeights, clock: Callable[[], float] = time.perf_counter
) -> str | None:
    """How much slower it is than MLX's own; None where it is not slower, or hardly."""
    for rows in RACED:
        x = _random_rows(rows, weights)
        ours, mlx = _median_times([partial(product, x, weights.weight), partial(mx.matmul, x, weights.weight.T)], clock)
        if ours > SLACK * mlx:
            return f"takes {ours / mlx:.2f} times as long as MLX's own for {rows} rows, {weights}"
    return None


def _median_times(works: list[Callable[[], mx.array]], clock: Callable[[], float]) -> list[float]:
    """Seconds of each, in alternation."""
    for work in works:
        mx.eval(work())
    rounds = [[_time_work(work, clock) for work in works] for _ in range(ROUNDS)]
    return [median(each) for each in zip(*rounds, strict=True)]


def _time_work(work: Callable[[], mx.array], clock: Callable[[], float]) -> float:
    start = clock()
    mx.eval([work() for _ in range(TIMES)])
    return clock() - start


def _cases(product: DenseProduct, weights: DenseWeights) -> Iterator[Case]:
    x = _random_rows(max(ROWS), weights)
    outputs = [product(x[:rows], weights.weight, bias=weights.bias) for rows in ROWS]
    for ends in (slice(None, ENDS), slice(-ENDS, None)):
        expected = x.astype(mx.float32) @ weights.weight[ends].astype(mx.float32).T
        expected = expected if weights.bias is None else expected + weights.bias[ends]
        yield Case(f"multiply differs for {weights}", outputs[0][:, ends], expected, BOUNDS[weights.weight.dtype])
    for output in outputs:
        message = f"a row's product depends on how many rows there are, for {weights}"
        yield Case(message, output, outputs[0][: output.shape[0]])


def _random_rows(rows: int, weights: DenseWeights) -> mx.array:
    return mx.random.normal((rows, weights.weight.shape[1]), key=mx.random.key(7)).astype(weights.weight.dtype)
