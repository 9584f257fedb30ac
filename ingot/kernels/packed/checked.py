"""Products with packed weights that were compared with MLX's own before they are used, each kind of layer once."""

from __future__ import annotations

import mlx.core as mx

from ingot.kernels.device import Device
from ingot.kernels.packed.kernels import PackedProduct, PackedWeights, Packing, packed_product
from ingot.kernels.packed.selfcheck import selfcheck

Key = tuple[Packing, mx.Dtype, tuple[int, ...]]
"""How weights are packed, the format of their scales, and how many of those there are."""


class CheckedPacked:
    """Those of a device. What does not compile or differs is not used, and `wrong` says why. Metal has good ones of
    MLX's own."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.wrong: dict[Key | Packing, str] = {}
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

    def _is_right(self, weights: PackedWeights) -> bool:
        key = (weights.packing, weights.scales.dtype, weights.scales.shape)
        if key not in self._right and key not in self.wrong:
            wrong = selfcheck(self._device, weights)
            if wrong is None:
                self._right.add(key)
            else:
                self.wrong[key] = wrong
        return key in self._right
