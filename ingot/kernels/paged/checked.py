"""Kernels that were compared with plain MLX before they are used, each kind once."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from ingot.kernels.delta.checked import CheckedDelta
from ingot.kernels.device import Device
from ingot.kernels.paged.kernels import PagedAttention, Shape, paged_attention
from ingot.kernels.paged.selfcheck import selfcheck
from ingot.kernels.paged.tuning import TUNINGS
from ingot.kernels.paged.turning import Norm, Turning, TurnShape, turning
from ingot.kernels.paged.turning_check import check_turning

SOME_SLABS = 3
Key = tuple[str, Shape, mx.Dtype, float, float | None, bool, int | None]


class CheckedKernels:
    """The kernels of a device. What does not compile or differs is not used, and `wrong` says why."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.wrong: dict[Key, str] = {}
        self._right: set[Key] = set()
        self.wrong_turns: dict[tuple[TurnShape, mx.Dtype], str | None] = {}
        """Why what turns queries and keys of such layers is not used; None where it is right."""
        self.delta = CheckedDelta(device)

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
                for slabs in self._slabs
            )
            wrong = next((reason for reason in failed if reason is not None), None)
            if wrong is None:
                self._right.add(key)
            else:
                self.wrong[key] = wrong
        if key in self.wrong:
            return None
        return paged_attention(self._device, shape, dtype, scale=scale, cap=cap, sinks=sinks, window=window)

    def turning(self, shape: TurnShape, dtype: mx.Dtype, norms: Sequence[Norm]) -> Turning | None:
        """None where there is no kernel for such layers that is right."""
        if (shape, dtype) not in self.wrong_turns:
            failed = (check_turning(self._device, shape, dtype, norms, slabs) for slabs in self._slabs)
            self.wrong_turns[shape, dtype] = next((reason for reason in failed if reason is not None), None)
        if self.wrong_turns[shape, dtype] is not None:
            return None
        return turning(self._device, shape, dtype, norms)

    @property
    def _slabs(self) -> tuple[int, ...]:
        """Over how many of them kernels are tried: each kind once."""
        return TUNINGS[self._device.kind].slabs or (SOME_SLABS,)
