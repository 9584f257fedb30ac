"""Products with weights of 16 bits against MLX's own, on the device at hand: what differs must not be used, nor what is
slower."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from functools import partial
from statistics import median

import mlx.core as mx

from ingot.kernels.dense.tuning import TUNING, Tuning
from ingot.kernels.dense_matmul.kernels import MOST_ROWS, DenseProduct, DenseWeights, dense_product
from ingot.kernels.device import Device
from ingot.kernels.gpu.launchers import Launcher, prepare

BOUNDS = {mx.float16: 2**-9, mx.bfloat16: 2**-6}
"""Of the largest product, by which another may be off. It is rounded once."""
ROWS = (MOST_ROWS, 20, 11, 3, 1)
"""Of each width some."""
ENDS = 128
"""Outputs at both ends that are compared: as float32, all of them might not fit beside a model."""
RACED, ROUNDS, TIMES, SLACK = (1, 8), 9, 4, 1.3
"""Rows that keep their bits, and whole layers as one launch, are worth that much."""


def compile_for(device: Device, layers: Iterable[DenseWeights]) -> None:
    """All kernels for such layers at once, where compiling is ours to do."""

    def rehearsed(run: Launcher) -> None:
        for weights in layers:
            _launched(DenseProduct(run), weights)

    prepare(device, rehearsed)


def selfcheck(device: Device, weights: DenseWeights, tuning: Tuning = TUNING) -> str | None:
    """What is wrong with the products of a layer on this device; None where they are right."""
    try:
        return _wrong(*_launched(dense_product(device, tuning), weights), weights)
    except (RuntimeError, ValueError) as error:
        return f"does not run: {' '.join(str(error).split())[:500]}"


def slower(product: DenseProduct, weights: DenseWeights, clock: Callable[[], float] = time.perf_counter) -> str | None:
    """How much slower it is than MLX's own; None where it is not, or hardly."""
    for rows in RACED:
        x = _drawn(rows, weights)
        ours, theirs = _raced([partial(product, x, weights.weight), partial(mx.matmul, x, weights.weight.T)], clock)
        if ours > SLACK * theirs:
            return f"takes {ours / theirs:.2f} times as long as MLX's own for {rows} rows, {weights}"
    return None


def _raced(works: list[Callable[[], mx.array]], clock: Callable[[], float]) -> list[float]:
    """Seconds of each, turn by turn."""
    for work in works:
        mx.eval(work())
    rounds = [[_seconds(work, clock) for work in works] for _ in range(ROUNDS)]
    return [median(each) for each in zip(*rounds, strict=True)]


def _seconds(work: Callable[[], mx.array], clock: Callable[[], float]) -> float:
    begun = clock()
    mx.eval([work() for _ in range(TIMES)])
    return clock() - begun


def _launched(product: DenseProduct, weights: DenseWeights) -> tuple[mx.array, list[mx.array]]:
    x = _drawn(max(ROWS), weights)
    return x, [product(x[:rows], weights.weight, bias=weights.bias) for rows in ROWS]


def _wrong(x: mx.array, found: list[mx.array], weights: DenseWeights) -> str | None:
    mx.eval(found)
    if any(_differs(found[0][:, ends], x, weights, ends) for ends in (slice(None, ENDS), slice(-ENDS, None))):
        return f"multiply differs for {weights}"
    if not all(mx.array_equal(some, found[0][: some.shape[0]]).item() for some in found):
        return f"a row's product depends on how many rows there are, for {weights}"
    return None


def _differs(found: mx.array, x: mx.array, weights: DenseWeights, ends: slice) -> bool:
    wanted = x.astype(mx.float32) @ weights.weight[ends].astype(mx.float32).T
    wanted = wanted if weights.bias is None else wanted + weights.bias[ends]
    apart = mx.abs(found.astype(mx.float32) - wanted).max() / mx.abs(wanted).max()
    return not float(apart) <= BOUNDS[weights.weight.dtype]  # nor what is not a number


def _drawn(rows: int, weights: DenseWeights) -> mx.array:
    drawn = mx.random.normal((rows, weights.weight.shape[1]), key=mx.random.key(7))
    return drawn.astype(weights.weight.dtype)
