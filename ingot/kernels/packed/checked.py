"""Products with packed weights that were compared with MLX's own before they are used, each kind of layer once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import mlx.core as mx

from ingot.kernels.device import Device
from ingot.kernels.packed.scratch import Scratch, scratch
from ingot.kernels.packed.tuning import TUNING, Cut
from ingot.kernels.packed_matmul.kernels import PackedProduct, PackedWeights, Packing, packed_product
from ingot.kernels.packed_matmul.selfcheck import scratch_check, selfcheck

MOST_SCRATCH = 1 << 30
Key = tuple[Packing, mx.Dtype, bool, int, tuple[Cut, ...], int]
"""What the products of layers have in common that are right alike: how weights are packed, the format of their scales,
whether they are experts', how many columns they have, how their outputs are cut, and how many the last cut lacks."""


class CheckedPacked:
    """Those of a device. What does not compile or differs is not used, and `wrong` says why. Metal has good ones of
    MLX's own."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.wrong: dict[Key | Packing, str] = {}
        self.scratch: Scratch | None = None
        self._right: set[Key] = set()

    def supports(self, packing: Packing) -> bool:
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
            self.scratch = self._checked(scratch(self._device, size, dtype), known)

    def _checked(self, room: Scratch | None, layers: Iterable[PackedWeights]) -> Scratch | None:
        """None where it is not right for some layer."""
        kinds = {weights.packing: weights for weights in layers if room is not None and room.covers(weights)}
        for packing, weights in kinds.items():
            assert room is not None
            wrong = scratch_check(self._device, room, weights)
            if wrong is not None:
                self.wrong[packing] = wrong
                return None
        return room

    def _is_right(self, weights: PackedWeights) -> bool:
        key = _key(weights)
        if key not in self._right and key not in self.wrong:
            wrong = selfcheck(self._device, weights)
            if wrong is None:
                self._right.add(key)
            else:
                self.wrong[key] = wrong
        return key in self._right


def _key(weights: PackedWeights) -> Key:
    packing, outputs = weights.packing, weights.outputs
    cuts = tuple(TUNING.cut_of(packing.bits, packing.group, outputs, eights) for eights in (1, 2))
    lacking = -outputs % (16 * max(cut.tiles for cut in cuts))
    return packing, weights.scales.dtype, weights.experts is not None, weights.columns, cuts, lacking
