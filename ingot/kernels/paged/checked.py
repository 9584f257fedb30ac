"""Kernels that were compared with plain MLX before they are used, each kind once."""

from __future__ import annotations

import mlx.core as mx

from ingot.kernels.delta.checked import CheckedDelta
from ingot.kernels.device import Device
from ingot.kernels.packed.checked import CheckedPacked
from ingot.kernels.paged.kernels import PagedAttention, Shape, paged_attention
from ingot.kernels.paged.selfcheck import selfcheck
from ingot.kernels.paged.texts import SLABS

Key = tuple[str, Shape, mx.Dtype, float, float | None, bool, int | None]


class CheckedKernels:
    """The kernels of a device. What does not compile or differs is not used, and `wrong` says why."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.wrong: dict[Key, str] = {}
        self._right: set[Key] = set()
        self.delta = CheckedDelta(device)
        self.packed = CheckedPacked(device)

    def attention(
        self,
        shape: Shape,
        dtype: mx.Dtype,
        *,
        scale: float = 1.0,
        cap: float | None = None,
        sinks: mx.array | None = None,
        window: int | None = None,
    ) -> PagedAttention | None:
        """None where there is no kernel for such layers that is right."""
        key = (self._device.kind, shape, dtype, scale, cap, sinks is not None, window)
        if key not in self._right and key not in self.wrong:
            failed = (
                selfcheck(self._device, shape, dtype, scale=scale, cap=cap, sinks=sinks, window=window, slabs=slabs)
                for slabs in SLABS
            )
            wrong = next((reason for reason in failed if reason is not None), None)
            if wrong is None:
                self._right.add(key)
            else:
                self.wrong[key] = wrong
        if key in self.wrong:
            return None
        return paged_attention(self._device, shape, dtype, scale=scale, cap=cap, sinks=sinks, window=window)
