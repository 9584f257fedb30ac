"""Products with weights of 16 bits against MLX's own, on the device at hand: what differs must not be used, nor what is
slower."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import mlx.core as mx

from ingot.kernels.dense.kernels import DenseProduct, dense_product
from ingot.kernels.device import Device
from ingot.kernels.gpu.launchers import Launcher, prepare

BOUNDS = {mx.float16: 2**-9, mx.bfloat16: 2**-6}
"""Of the largest product, by which another may be off. It is rounded once."""
ROWS = (64, 20, 11, 3, 1)
"""Of each width some."""
ENDS = 128
"""Outputs at both ends that are compared: as float32, all of them might not fit beside a model."""
RACED, ROUNDS, TIMES, SLACK = (1, 8), 5, 4, 1.05


def compile_for(device: Device, weights: Iterable[mx.array]) -> None:
    """All kernels for such weights at once, where compiling is ours to do."""

    def rehearsed(run: Launcher) -> None:
        for weight in weights:
            _launched(DenseProduct(run), weight, _drawn(max(ROWS), weight))

    prepare(device, rehearsed)


def selfcheck(device: Device, weight: mx.array) -> str | None:
    """What is wrong with the products of a layer on this device; None where they are right."""
    try:
        x = _drawn(max(ROWS), weight)
        product = dense_product(device)
        return _wrong(product, weight, x)
    except (RuntimeError, ValueError) as error:
        return f"does not run: {' '.join(str(error).split())[:500]}"


def slower(product: DenseProduct, weight: mx.array, clock: Callable[[], float] = time.perf_counter) -> str | None:
    """How much slower it is than MLX's own; None where it is not, or hardly."""
    for rows in RACED:
        x = _drawn(rows, weight)
        works = (lambda x=x: product(x, weight), lambda x=x: x @ weight.T)
        for work in works:
            mx.eval(work())
        rounds = [[_seconds(work, clock) for work in works] for _ in range(ROUNDS)]
        ours, theirs = (min(each) for each in zip(*rounds, strict=True))
        if ours > SLACK * theirs:
            return f"takes {ours / theirs:.2f} times as long as MLX's own for {rows} rows, {_name(weight)}"
    return None


def _seconds(work: Callable[[], mx.array], clock: Callable[[], float]) -> float:
    begun = clock()
    mx.eval([work() for _ in range(TIMES)])
    return clock() - begun


def _launched(product: DenseProduct, weight: mx.array, x: mx.array) -> tuple[list[mx.array], mx.array]:
    """Products of several numbers of rows, and that of one with itself as a bias."""
    found = [product(x[:rows], weight) for rows in ROWS]
    return found, product(x[:1], weight, bias=found[-1][0])


def _wrong(product: DenseProduct, weight: mx.array, x: mx.array) -> str | None:
    found, biased = _launched(product, weight, x)
    mx.eval(found, biased)
    if _differs(found[0], weight, x):
        return f"multiply differs for {_name(weight)}"
    if not all(mx.array_equal(some, found[0][: some.shape[0]]).item() for some in found):
        return f"a row's product depends on how many rows there are, for {_name(weight)}"
    if _differs(biased, weight, x[:1], times=2):
        return f"multiply with a bias differs for {_name(weight)}"
    return None


def _differs(found: mx.array, weight: mx.array, x: mx.array, *, times: int = 1) -> bool:
    for ends in (slice(None, ENDS), slice(-ENDS, None)):
        wanted = times * (x.astype(mx.float32) @ weight[ends].astype(mx.float32).T)
        apart = mx.abs(found[:, ends].astype(mx.float32) - wanted).max() / mx.abs(wanted).max()
        if not float(apart) <= BOUNDS[weight.dtype]:  # nor what is not a number
            return True
    return False


def _drawn(rows: int, weight: mx.array) -> mx.array:
    return mx.random.normal((rows, weight.shape[1]), key=mx.random.key(7)).astype(weight.dtype)


def _name(weight: mx.array) -> str:
    return f"{weight.shape[0]}x{weight.shape[1]} of {weight.dtype}"
