"""Products with packed weights against plain operations, on the device at hand: what differs must not be used."""

from __future__ import annotations

import mlx.core as mx

from ingot.kernels.device import Device
from ingot.kernels.gpu.launchers import prepare
from ingot.kernels.packed.scratch import Scratch
from ingot.kernels.packed_matmul.kernels import PackedProduct, PackedWeights, packed_product

BOUNDS = {mx.float32: 1e-4, mx.float16: 2**-9, mx.bfloat16: 2**-6}
"""Of the largest product, by which another may be off. It is rounded once."""
ROWS = (11, 3, 1)
ENDS = 128
"""Outputs at both ends that are compared: unpacked as float32, all of them might not fit beside a model."""


def selfcheck(device: Device, weights: PackedWeights) -> str | None:
    """What is wrong with the products of a layer on this device; None where they are right. Compiles their kernels."""
    launch, wrong = (_launched, _wrong) if weights.experts is None else (_launched_experts, _wrong_experts)
    try:
        prepare(device, lambda run: launch(PackedProduct(run, weights.packing, weights.scales.dtype), weights))
        product = packed_product(device, weights.packing, weights.scales.dtype)
        return wrong(*launch(product, weights), weights)
    except (RuntimeError, ValueError) as error:
        return f"does not run: {' '.join(str(error).split())[:500]}"


def scratch_check(device: Device, room: Scratch, weights: PackedWeights) -> str | None:
    """What is wrong with products by weights that are unpacked into `room`. Compiles the kernel."""
    x = _drawn(max(ROWS), weights)
    try:
        prepare(device, lambda run: room.launched_by(run).unpacked(x, weights))
        found = room.multiply(x, weights)
        mx.eval(found)
    except (RuntimeError, ValueError) as error:
        return f"does not run: {' '.join(str(error).split())[:500]}"
    # Weights are rounded, too.
    return f"unpack differs for {weights}" if _differs(found, x, weights, slack=2) else None


def _launched(product: PackedProduct, weights: PackedWeights) -> tuple[mx.array, list[mx.array]]:
    """Products, and where there may be gates what those let through: all that layers will launch."""
    x = _drawn(max(ROWS), weights)
    gated = [product.gated(x[:rows], weights) for rows in (max(ROWS), 1)] if weights.outputs % 2 == 0 else []
    return x, [*(product(x[:rows], weights) for rows in ROWS), *gated]


def _wrong(x: mx.array, found: list[mx.array], weights: PackedWeights) -> str | None:
    mx.eval(found)
    products, gated = found[: len(ROWS)], found[len(ROWS) :]
    if _differs(products[0], x, weights):
        return f"multiply differs for {weights}"
    if not all(mx.array_equal(some, products[0][: some.shape[0]]).item() for some in products):
        return f"a row's product depends on how many rows there are, for {weights}"
    if any(_gates_differ(some, products[0][: some.shape[0]]) for some in gated):
        return f"a gate differs for {weights}"
    return None


def _gates_differ(found: mx.array, products: mx.array) -> bool:
    gate, other = (part.astype(mx.float32) for part in mx.split(products, 2, axis=-1))
    wanted = gate * mx.sigmoid(gate) * other
    apart = mx.abs(found.astype(mx.float32) - wanted).max() / mx.abs(wanted).max()
    return not float(apart) <= 4 * BOUNDS[found.dtype]  # each operation rounds; nor what is no number


def _launched_experts(product: PackedProduct, weights: PackedWeights) -> tuple[mx.array, list[mx.array]]:
    x = _drawn(2, weights)
    return x, [product.gather(x, weights, mx.array(_chosen(weights), mx.int32))]


def _chosen(weights: PackedWeights) -> list[int]:
    assert weights.experts is not None
    return [weights.experts - 1, 0, weights.experts // 2, weights.experts - 1]


def _wrong_experts(x: mx.array, products: list[mx.array], weights: PackedWeights) -> str | None:
    [found], chosen = products, _chosen(weights)
    mx.eval(found)
    if any(_differs(found[i : i + 1], x[i // 2 : i // 2 + 1], weights.part(expert)) for i, expert in enumerate(chosen)):
        return f"gather differs for {weights}"
    return None


def _drawn(rows: int, weights: PackedWeights) -> mx.array:
    return mx.random.normal((rows, weights.columns), key=mx.random.key(7)).astype(weights.scales.dtype)


def _differs(found: mx.array, x: mx.array, weights: PackedWeights, *, slack: int = 1) -> bool:
    bound = slack * BOUNDS[weights.scales.dtype]
    return any(
        not _apart(found[:, ends], x, weights.part(ends)) <= bound  # nor what is not a number
        for ends in (slice(None, ENDS), slice(-ENDS, None))
    )


def _apart(found: mx.array, x: mx.array, weights: PackedWeights) -> float:
    """From plain operations in float32, of the largest product."""
    wanted = x.astype(mx.float32) @ weights.unpacked(mx.float32).T
    return float(mx.abs(found.astype(mx.float32) - wanted).max() / mx.abs(wanted).max())
