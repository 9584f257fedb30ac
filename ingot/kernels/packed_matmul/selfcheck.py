"""Products with packed weights against plain operations, on the device at hand: what differs, or does not compile, is
not used. Each kind of layer is compared once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

import mlx.core as mx

from ingot.kernels.device import Device
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
from ingot.kernels.selfcheck import BOUNDS, Case, Verdicts, check_cases

MOST_SCRATCH = 1 << 30
PackedKey = tuple[PackedFormat, mx.Dtype, bool, int, tuple[PackedCut, ...], int]
"""What the products of layers have in common that are right alike: how weights are packed, the format of their scales,
whether they are experts', how many columns they have, how their outputs are cut, and how many the last cut lacks."""


class CheckedPacked(Verdicts[PackedKey | PackedFormat, bool]):
    """Those of a device. Metal has good ones of MLX's own."""

    scratch: UnpackScratch | None = None

    def supports(self, packing: PackedFormat) -> bool:
        """Whether there could be a kernel for weights packed so. Metal needs none."""
        reason = packing.unsupported()
        if reason is not None and self._device.kind != "metal":
            self.wrong[packing] = reason
        return reason is None

    def of(self, weights: PackedWeights) -> PackedProduct | None:
        """None where there is no kernel for such weights that is right."""
        if self._device.kind == "metal" or not self.supports(weights.packing):
            return None
        if not self._way(_packed_key(weights), [True], lambda _: check_packed_product(self._device, weights)):
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


def _packed_key(weights: PackedWeights) -> PackedKey:
    packing, outputs = weights.packing, weights.outputs
    cuts = tuple(PACKED_TUNING.cut_of(packing.bits, packing.group, outputs, eights) for eights in (1, 2))
    lacking = -outputs % (16 * max(cut.tiles for cut in cuts))
    return packing, weights.scales.dtype, weights.experts is not None, weights.columns, cuts, lacking


ROWS = (11, 3, 1)
ENDS = 128
"""Outputs at both ends that are compared: unpacked as float32, all of them might not fit beside a model."""


def check_packed_product(device: Device, weights: PackedWeights) -> str | None:
    """What is wrong with the products of a layer on this device; None where they are right."""
    cases = _products if weights.experts is None else _gathered
    return check_cases(
        device,
        lambda: packed_product(device, weights.packing, weights.scales.dtype),
        lambda product: cases(product, weights),
    )


def check_scratch(device: Device, room: UnpackScratch, weights: PackedWeights) -> str | None:
    """What is wrong with products by weights that are unpacked into `room`."""

    def cases(room: UnpackScratch) -> Iterator[Case]:
        x = _random_rows(max(ROWS), weights)
        # Weights are rounded, too.
        yield from _ends(f"unpack differs for {weights}", room.multiply(x, weights), x, weights, slack=2)

    return check_cases(device, lambda: room, cases)


def _products(product: PackedProduct, weights: PackedWeights) -> Iterator[Case]:
    """Products, and where there may be gates what those let through: all that layers will launch."""
    x = _random_rows(max(ROWS), weights)
    products = [product(x[:rows], weights) for rows in ROWS]
    yield from _ends(f"multiply differs for {weights}", products[0], x, weights)
    for some in products:
        said = f"a row's product depends on how many rows there are, for {weights}"
        yield Case(said, some, products[0][: some.shape[0]])
    for rows in (max(ROWS), 1) if weights.outputs % 2 == 0 else ():
        gate, other = (part.astype(mx.float32) for part in mx.split(products[0][:rows], 2, axis=-1))
        found = product.gated(x[:rows], weights)
        # Each operation rounds.
        yield Case(f"a gate differs for {weights}", found, gate * mx.sigmoid(gate) * other, 4 * BOUNDS[found.dtype])


def _gathered(product: PackedProduct, weights: PackedWeights) -> Iterator[Case]:
    assert weights.experts is not None
    chosen = [weights.experts - 1, 0, weights.experts // 2, weights.experts - 1]
    x = _random_rows(2, weights)
    found = product.gather(x, weights, mx.array(chosen, mx.int32))
    for i, expert in enumerate(chosen):
        own, row = found[i : i + 1], x[i // 2 : i // 2 + 1]
        yield from _ends(f"gather differs for {weights}", own, row, weights.part(expert))


def _ends(said: str, found: mx.array, x: mx.array, weights: PackedWeights, *, slack: int = 1) -> Iterator[Case]:
    for ends in (slice(None, ENDS), slice(-ENDS, None)):
        wanted = x.astype(mx.float32) @ weights.part(ends).unpacked(mx.float32).T
        yield Case(said, found[:, ends], wanted, slack * BOUNDS[weights.scales.dtype])


def _random_rows(rows: int, weights: PackedWeights) -> mx.array:
    return mx.random.normal((rows, weights.columns), key=mx.random.key(7)).astype(weights.scales.dtype)
