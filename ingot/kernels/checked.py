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
    slab_counts,
)
from ingot.kernels.paged_attention.shapes import AttentionShape, AttentionTuning, CodedShape, tuning_choices
from ingot.kernels.selfcheck import Verdicts, first_wrong

AttentionKey = tuple[str, AttentionShape, mx.Dtype, float, float | None, bool, int | None]
CodedAttentionKey = tuple[CodedShape, AttentionShape, mx.Dtype, float, float | None]


class CheckedKernels(Verdicts[AttentionKey, AttentionTuning]):
    """All kernels of a device; its own verdicts are those of attention."""

    def __init__(self, device: Device) -> None:
        super().__init__(device)
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
        """None where there is no kernel for such layers that is right. What is wrong for prompts alone is left to MLX
        for prompts alone, and what is wrong by matrix units is done without them."""
        key = (self._device.kind, shape, dtype, scale, cap, sinks is not None, window)
        how: dict[str, Any] = {"scale": scale, "cap": cap, "sinks": sinks, "window": window}

        def check(tuning: AttentionTuning) -> str | None:
            return first_wrong(
                check_paged_attention(self._device, shape, dtype, slabs=slabs, tuning=tuning, **how)
                for slabs in slab_counts(self._device)
            )

        tuning = self._way(key, tuning_choices(self._device.kind), check)
        return None if tuning is None else paged_attention(self._device, shape, dtype, tuning=tuning, **how)

    def check_coded(self, attention: PagedAttention, sample: CodedSample, *, scale: float, cap: float | None) -> None:
        """Compare an attention over pages like these, where it has kernels for them."""
        key = (sample.shape, attention.shape, attention.dtype, scale, cap)
        if key in self.wrong_coded or not sample.suits(attention) or not attention.reads(sample.shape):
            return
        self.wrong_coded[key] = check_coded(self._device, attention, sample, scale=scale, cap=cap)
        if attention.unpacks(sample.shape):
            self.wrong_unpacked[key] = check_coded(self._device, attention, sample, prompts=True, scale=scale, cap=cap)

    def reads(self, coded: CodedShape) -> bool:
        """Whether pages in fewer bits are read as they lie: by attention that was compared, all of which was right."""
        return _all_right(self.wrong_coded, coded)

    def unpacks(self, coded: CodedShape) -> bool:
        """Whether prompts see them unpacked by kernels: likewise."""
        return _all_right(self.wrong_unpacked, coded)

    def turning(self, shape: RopeShape, dtype: mx.Dtype, norms: Sequence[HeadRmsNorm]) -> RopeKernel | None:
        """None where there is no kernel for such layers that is right."""
        if (shape, dtype) not in self.wrong_rope:
            self.wrong_rope[shape, dtype] = first_wrong(
                check_rope(self._device, shape, dtype, norms, slabs) for slabs in slab_counts(self._device)
            )
        if self.wrong_rope[shape, dtype] is not None:
            return None
        return rope_kernel(self._device, shape, dtype, norms)


def _all_right(compared: dict[CodedAttentionKey, str | None], coded: CodedShape) -> bool:
    found = [why for (shape, *_), why in compared.items() if shape == coded]
    return bool(found) and not any(found)
