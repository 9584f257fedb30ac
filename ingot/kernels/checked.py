"""A device's kernels that were compared with plain MLX operations before they are used, each kind once: attention over
pages and rope here, gated delta, packed and dense products by their own modules.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from ingot.kernels.dense_matmul.selfcheck import CheckedDense
from ingot.kernels.device import Device
from ingot.kernels.gated_delta.selfcheck import CheckedDelta
from ingot.kernels.packed_matmul.selfcheck import CheckedPacked
from ingot.kernels.paged_attention.kernels import PagedAttention, paged_attention
from ingot.kernels.paged_attention.rope import HeadRmsNorm, RopeKernel, RopeShape, rope_kernel
from ingot.kernels.paged_attention.selfcheck import (
    CodedSample,
    check_coded,
    check_paged_attention,
    check_rope,
    check_unpacked,
    slab_counts,
)
from ingot.kernels.paged_attention.shapes import AttentionShape, AttentionTuning, CodedShape, tuning_choices

AttentionKey = tuple[str, AttentionShape, mx.Dtype, float, float | None, bool, int | None]
CodedAttentionKey = tuple[CodedShape, AttentionShape, mx.Dtype, float, float | None]


class CheckedKernels:
    """The kernels of a device. What does not compile or differs is not used, and `wrong` says why."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.wrong: dict[AttentionKey, str] = {}
        self._right: dict[AttentionKey, AttentionTuning] = {}  # and how they are cut
        self.wrong_rope: dict[tuple[RopeShape, mx.Dtype], str | None] = {}
        """Why what turns queries and keys of such layers is not used; None where it is right."""
        self.wrong_coded: dict[CodedAttentionKey, str | None] = {}
        """Why such attention does not read such pages in fewer bits; None where it is right."""
        self.wrong_unpacked: dict[CodedAttentionKey, str | None] = {}
        """Why it does not unpack them for prompts."""
        self.delta = CheckedDelta(device)
        self.packed = CheckedPacked(device)
        self.dense = CheckedDense(device)

    def attention(
        self,
        shape: AttentionShape,
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
            self._check(key, sinks)
        if key not in self._right:
            return None
        how: dict[str, Any] = {"scale": scale, "cap": cap, "sinks": sinks, "window": window}
        return paged_attention(self._device, shape, dtype, tuning=self._right[key], **how)

    def _check(self, key: AttentionKey, sinks: mx.array | None) -> None:
        """What is wrong for prompts alone is left to MLX for prompts alone, and what is wrong by matrix units is done
        without them."""
        _, shape, dtype, scale, cap, _, window = key
        for tuning in tuning_choices(self._device.kind):
            failed = (
                check_paged_attention(
                    self._device,
                    shape,
                    dtype,
                    scale=scale,
                    cap=cap,
                    sinks=sinks,
                    window=window,
                    slabs=slabs,
                    tuning=tuning,
                )
                for slabs in slab_counts(self._device)
            )
            wrong = next((reason for reason in failed if reason is not None), None)
            if wrong is None:
                self._right[key] = tuning
                return
            self.wrong[key] = wrong

    def check_coded(self, attention: PagedAttention, sample: CodedSample, *, scale: float, cap: float | None) -> None:
        """Compare an attention over pages like these, where it has kernels for them."""
        key = (sample.shape, attention.shape, attention.dtype, scale, cap)
        if key in self.wrong_coded or not sample.suits(attention) or not attention.reads(sample.shape):
            return
        self.wrong_coded[key] = check_coded(self._device, attention, sample, scale=scale, cap=cap)
        if attention.unpacks(sample.shape):
            self.wrong_unpacked[key] = check_unpacked(self._device, attention, sample, scale=scale, cap=cap)

    def reads(self, coded: CodedShape) -> bool:
        """Whether pages in fewer bits are read as they lie: by attention that was compared, all of which was right."""
        return _all_right(self.wrong_coded, coded)

    def unpacks(self, coded: CodedShape) -> bool:
        """Whether prompts see them unpacked by kernels: likewise."""
        return _all_right(self.wrong_unpacked, coded)

    def turning(self, shape: RopeShape, dtype: mx.Dtype, norms: Sequence[HeadRmsNorm]) -> RopeKernel | None:
        """None where there is no kernel for such layers that is right."""
        if (shape, dtype) not in self.wrong_rope:
            failed = (check_rope(self._device, shape, dtype, norms, slabs) for slabs in slab_counts(self._device))
            self.wrong_rope[shape, dtype] = next((reason for reason in failed if reason is not None), None)
        if self.wrong_rope[shape, dtype] is not None:
            return None
        return rope_kernel(self._device, shape, dtype, norms)


def _all_right(compared: dict[CodedAttentionKey, str | None], coded: CodedShape) -> bool:
    found = [why for (shape, *_), why in compared.items() if shape == coded]
    return bool(found) and not any(found)
