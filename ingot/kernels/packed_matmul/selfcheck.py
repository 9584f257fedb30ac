"""Products with packed weights against plain operations, on the device at hand: what differs, or does not compile, is
not used. Each kind of layer is compared once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import mlx.core as mx

from ingot.kernels.device import Device
from ingot.kernels.gpu.launcher import compile_kernels
from ingot.kernels.packed_matmul.kernels import (
    PACKED_TUNING,
    PackedCut,
    PackedFormat,
    PackedProduct,
    PackedWeights,
    UnpackScratch,
    make_scratch,
    packed_product,
)

MOST_SCRATCH = 1 << 30
PackedKey = tuple[PackedFormat, mx.Dtype, bool, int, tuple[PackedCut, ...], int]
"""What the products of layers have in common that are right alike: how weights are packed, the format of their scales,
whether they are experts', how many columns they have, how their outputs are cut, and how many the last cut lacks."""


class CheckedPacked:
    """Those of a device. What does not compile or differs is not used, and `wrong` says why. Metal has good ones of
    MLX's own."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.wrong: dict[PackedKey | PackedFormat, str] = {}
        self.scratch: UnpackScratch | None = None
        self._right: set[PackedKey] = set()

    def supports(self, packing: PackedFormat) -> bool:
        """Whether there could be a kernel for weights packed so. Metal needs none."""
        reason = packing.unsupported()
        if reason is not None and self._device.kind != "metal":
            self.wrong[packing] = reason
        return reason is None

    def of(self, weights: PackedWeights) -> PackedProduct | None:
        """None where there is no kernel for such weights that is right."""
        if self._device.kind == "metal" or not self.supports(weights.packing) or not self._is_right(weights):
            return None
        return packed_product(self._device, weights.packing, weights.scales.dtype)

    def reserve(self, layers: Iterable[PackedWeights]) -> None:
        """Memory for many rows: as much as the largest of the weights needs that several layers are alike in, but for
        those that are larger than that is worth. An output head, of which there is one, rarely meets many rows."""
        known = [*layers]
        counted = Counter((weights.size, weights.scales.dtype) for weights in known)
        several = [key for key, count in counted.items() if count > 1 and key[0] * key[1].size <= MOST_SCRATCH]
        if self.scratch is None and several:
            size, dtype = max(several, key=lambda key: key[0])
            self.scratch = self._checked(make_scratch(self._device, size, dtype), known)

    def _checked(self, room: UnpackScratch | None, layers: Iterable[PackedWeights]) -> UnpackScratch | None:
        """None where it is not right for some layer."""
        kinds = {weights.packing: weights for weights in layers if room is not None and room.covers(weights)}
        for packing, weights in kinds.items():
            assert room is not None
            wrong = check_scratch(self._device, room, weights)
            if wrong is not None:
                self.wrong[packing] = wrong
                return None
        return room

    def _is_right(self, weights: PackedWeights) -> bool:
        key = _packed_key(weights)
        if key not in self._right and key not in self.wrong:
            wrong = check_packed_product(self._device, weights)
            if wrong is None:
                self._right.add(key)
            else:
                self.wrong[key] = wrong
        return key in self._right


def _packed_key(weights: PackedWeights) -> PackedKey:
    packing, outputs = weights.packing, weights.outputs
    cuts = tuple(PACKED_TUNING.cut_of(packing.bits, packing.group, outputs, eights) for eights in (1, 2))
    lacking = -outputs % (16 * max(cut.tiles for cut in cuts))
    return packing, weights.scales.dtype, weights.experts is not None, weights.columns, cuts, lacking


BOUNDS = {mx.float32: 1e-4, mx.float16: 2**-9, mx.bfloat16: 2**-6}
"""Of the largest product, by which another may be off. It is rounded once."""
ROWS = (11, 3, 1)
ENDS = 128
"""Outputs at both ends that are compared: unpacked as float32, all of them might not fit beside a model."""


def check_packed_product(device: Device, weights: PackedWeights) -> str | None:
    """What is wrong with the products of a layer on this device; None where they are right. Compiles their kernels."""
    launch, wrong = (
        (_launch_products, _find_wrong) if weights.experts is None else (_launch_experts, _find_wrong_experts)
    )
    try:
        compile_kernels(device, lambda run: launch(PackedProduct(run, weights.packing, weights.scales.dtype), weights))
        product = packed_product(device, weights.packing, weights.scales.dtype)
        return wrong(*launch(product, weights), weights)
    except (RuntimeError, ValueError) as error:
        return f"does not run: {' '.join(str(error).split())[:500]}"


def check_scratch(device: Device, room: UnpackScratch, weights: PackedWeights) -> str | None:
    """What is wrong with products by weights that are unpacked into `room`. Compiles the kernel."""
    x = _random_rows(max(ROWS), weights)
    try:
        compile_kernels(device, lambda run: room.with_launcher(run).unpacked(x, weights))
        found = room.multiply(x, weights)
        mx.eval(found)
    except (RuntimeError, ValueError) as error:
        return f"does not run: {' '.join(str(error).split())[:500]}"
    # Weights are rounded, too.
    return f"unpack differs for {weights}" if _differs(found, x, weights, slack=2) else None


def _launch_products(product: PackedProduct, weights: PackedWeights) -> tuple[mx.array, list[mx.array]]:
    """Products, and where there may be gates what those let through: all that layers will launch."""
    x = _random_rows(max(ROWS), weights)
    gated = [product.gated(x[:rows], weights) for rows in (max(ROWS), 1)] if weights.outputs % 2 == 0 else []
    return x, [*(product(x[:rows], weights) for rows in ROWS), *gated]


def _find_wrong(x: mx.array, found: list[mx.array], weights: PackedWeights) -> str | None:
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


def _launch_experts(product: PackedProduct, weights: PackedWeights) -> tuple[mx.array, list[mx.array]]:
    x = _random_rows(2, weights)
    return x, [product.gather(x, weights, mx.array(_chosen_experts(weights), mx.int32))]


def _chosen_experts(weights: PackedWeights) -> list[int]:
    assert weights.experts is not None
    return [weights.experts - 1, 0, weights.experts // 2, weights.experts - 1]


def _find_wrong_experts(x: mx.array, products: list[mx.array], weights: PackedWeights) -> str | None:
    [found], chosen = products, _chosen_experts(weights)
    mx.eval(found)
    if any(_differs(found[i : i + 1], x[i // 2 : i // 2 + 1], weights.part(expert)) for i, expert in enumerate(chosen)):
        return f"gather differs for {weights}"
    return None


def _random_rows(rows: int, weights: PackedWeights) -> mx.array:
    return mx.random.normal((rows, weights.columns), key=mx.random.key(7)).astype(weights.scales.dtype)


def _differs(found: mx.array, x: mx.array, weights: PackedWeights, *, slack: int = 1) -> bool:
    bound = slack * BOUNDS[weights.scales.dtype]
    return any(
        not _relative_error(found[:, ends], x, weights.part(ends)) <= bound  # nor what is not a number
        for ends in (slice(None, ENDS), slice(-ENDS, None))
    )


def _relative_error(found: mx.array, x: mx.array, weights: PackedWeights) -> float:
    """From plain operations in float32, of the largest product."""
    wanted = x.astype(mx.float32) @ weights.unpacked(mx.float32).T
    return float(mx.abs(found.astype(mx.float32) - wanted).max() / mx.abs(wanted).max())
