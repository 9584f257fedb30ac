"""Kernels of the gated delta rule that were compared with plain MLX before they are used, each kind once."""

from __future__ import annotations

import mlx.core as mx

from ingot.kernels.device import Device
from ingot.kernels.gated_delta.kernels import DeltaKernels, DeltaShape, delta_kernels
from ingot.kernels.gated_delta.selfcheck import selfcheck


class CheckedDelta:
    """Those of a device. What does not compile or differs is not used, and `wrong` says why. On Metal mlx-lm has one of
    its own."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.wrong: dict[tuple[DeltaShape, mx.Dtype], str] = {}
        self._right: set[tuple[DeltaShape, mx.Dtype]] = set()

    def of(
        self, shape: DeltaShape, dtype: mx.Dtype, *, filter: mx.array, a_log: mx.array, dt_bias: mx.array
    ) -> DeltaKernels | None:
        """None where there are no kernels for such a layer that are right."""
        if self._device.kind == "metal" or not self._is_right(shape, dtype):
            return None
        return delta_kernels(self._device, shape, dtype, filter=filter, a_log=a_log, dt_bias=dt_bias)

    def _is_right(self, shape: DeltaShape, dtype: mx.Dtype) -> bool:
        key = (shape, dtype)
        if key not in self._right and key not in self.wrong:
            wrong = shape.unsupported() or selfcheck(self._device, shape, dtype)
            if wrong is None:
                self._right.add(key)
            else:
                self.wrong[key] = wrong
        return key in self._right
