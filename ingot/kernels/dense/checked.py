"""Products with weights of 16 bits that were compared with MLX's own before they are used, each kind of layer once."""

from __future__ import annotations

from collections.abc import Iterable

import mlx.core as mx

from ingot.kernels.dense.tuning import CHOICES, Tuning
from ingot.kernels.dense_matmul.kernels import DenseProduct, DenseWeights, dense_product
from ingot.kernels.dense_matmul.selfcheck import compile_for, selfcheck, slower
from ingot.kernels.device import Device
from ingot.kernels.gpu.emulator import Emulator
from ingot.kernels.gpu.launchers import launcher

RACED_BYTES = 1 << 27
"""Of weights from which on a product takes longer than asking for it, and more than caches hold."""
Key = tuple[mx.Dtype, tuple[int, ...], bool]


class CheckedDense:
    """Those of a device. What does not compile, differs, or is slower is not used, and `wrong` says why. Metal is left
    to MLX."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.wrong: dict[Key, str] = {}
        self._right: dict[Key, Tuning] = {}  # and how they are cut
        self._slower: str | None = None

    def meet(self, layers: Iterable[DenseWeights]) -> None:
        """Compile for all layers of a model at once, and let the largest be raced."""
        known = {weights.kind: weights for weights in layers if self._could_be(weights)}
        if not known:
            return
        compile_for(self._device, known.values())
        largest = max(known.values(), key=lambda weights: weights.weight.nbytes)
        if largest.weight.nbytes >= RACED_BYTES and not isinstance(launcher(self._device), Emulator):
            if self._is_right(largest):
                self._slower = slower(dense_product(self._device, self._right[largest.kind]), largest)
            if self._slower is not None:
                self.wrong[largest.kind] = self._slower

    def of(self, weights: DenseWeights) -> DenseProduct | None:
        """None where there is no kernel for such weights that is right and fast."""
        if self._slower is not None or not self._could_be(weights) or not self._is_right(weights):
            return None
        return dense_product(self._device, self._right[weights.kind])

    def _could_be(self, weights: DenseWeights) -> bool:
        return self._device.kind == "cuda" and launcher(self._device) is not None and weights.is_covered

    def _is_right(self, weights: DenseWeights) -> bool:
        key = weights.kind
        if key not in self._right and key not in self.wrong:
            for tuning in CHOICES:
                wrong = selfcheck(self._device, weights, tuning)
                if wrong is None:
                    self._right[key] = tuning
                    break
            else:
                self.wrong[key] = str(wrong)
        return key in self._right
